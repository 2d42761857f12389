"""The watch that every loop of a search looks at."""

from __future__ import annotations

import math
import time
from collections.abc import Callable


class SolveCancelledError(Exception):
    """The caller asked the search to stop."""


class Watch:
    """The time that a search has left, from now on."""

    def __init__(
        self,
        seconds: float = 60.0,
        *,
        should_stop: Callable[[], bool] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin. Once `should_stop`, asked now and then, answers true, the search raises `SolveCancelledError`."""
        self._clock, self._should_stop = clock, should_stop
        self._end = clock() + seconds

    def left(self) -> float:
        """Seconds; none or less once the time is up."""
        return self._end - self._clock()

    def wall_left(self) -> float:
        """The same for a library that looks at the wall clock: without end where the time is told by another one."""
        return self.left() if self._clock is time.monotonic else math.inf

    def part(self, share: float) -> Watch:
        """A watch over a part of the time that is left."""
        return Watch(max(0.0, share * self.left()), should_stop=self._should_stop, clock=self._clock)

    def is_cancelled(self) -> bool:
        """Whether the caller wants the search to stop."""
        return self._should_stop is not None and self._should_stop()

    def is_over(self) -> bool:
        """Whether the time is up.

        Raises:
            SolveCancelledError: If the caller wants the search to stop.
        """
        if self.is_cancelled():
            raise SolveCancelledError
        return self.left() <= 0
