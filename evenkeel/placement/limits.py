"""When a search may stop, and the watch that all of its loops look at."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

DEFAULT_GAP = 1e-4
EXACT_TABLES = 50


class SolveCancelledError(Exception):
    """The caller asked the solver to stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When a search may stop early.

    Attributes:
        gap: Relative gap to prove above `exact_tables` tables; up to those the optimum is proved.
        exact_tables: Number of tables up to which the optimum is proved whatever the gap.
        time_limit_s: Time after which the best found is returned with its gap.
        should_stop: Asked now and then; once true, the search raises `SolveCancelledError`.
        clock: Seconds, for the time limit.
    """

    gap: float = DEFAULT_GAP
    exact_tables: int = EXACT_TABLES
    time_limit_s: float = 30.0
    should_stop: Callable[[], bool] | None = None
    clock: Callable[[], float] = time.monotonic

    def within(self, seconds: float) -> Limits:
        """The same with another time limit."""
        return replace(self, time_limit_s=max(0.0, seconds))

    def at_most(self, gap: float) -> Limits:
        """The same, with a gap that is no finer."""
        return replace(self, gap=max(self.gap, gap), exact_tables=0)


class Watch:
    """The time that a search has left, from now on."""

    def __init__(self, limits: Limits | None = None) -> None:
        limits = limits or Limits(time_limit_s=60.0)
        self._clock, self._should_stop = limits.clock, limits.should_stop
        self._end = limits.clock() + limits.time_limit_s

    def left(self) -> float:
        """Seconds; none or less once the time is up."""
        return self._end - self._clock()

    def part(self, share: float) -> Watch:
        """A watch over a part of the time that is left."""
        limits = Limits(time_limit_s=max(0.0, share * self.left()), should_stop=self._should_stop, clock=self._clock)
        return Watch(limits)

    def is_cancelled(self) -> bool:
        """Whether the caller wants the search to stop."""
        return self._should_stop is not None and self._should_stop()

    def check(self) -> None:
        """Raises `SolveCancelledError` once the caller wants the search to stop."""
        if self.is_cancelled():
            raise SolveCancelledError

    def is_over(self) -> bool:
        """Whether the time is up.

        Raises:
            SolveCancelledError: If the caller wants the search to stop.
        """
        self.check()
        return self.left() <= 0
