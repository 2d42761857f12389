"""The watch that every loop of a search looks at."""

from __future__ import annotations

import math
import time
from collections.abc import Callable


class Watch:
    """The time that a search has left, from now on."""

    def __init__(self, seconds: float = 60.0, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._end = clock, clock() + seconds

    def left(self) -> float:
        """Seconds; none or less once the time is up."""
        return self._end - self._clock()

    def wall_left(self) -> float:
        """The same for a library that looks at the wall clock: without end where the time is told by another one."""
        return self.left() if self._clock is time.monotonic else math.inf

    def part(self, share: float) -> Watch:
        """A watch over a part of the time that is left."""
        return Watch(max(0.0, share * self.left()), clock=self._clock)

    def is_over(self) -> bool:
        """Whether the time is up."""
        return self.left() <= 0
