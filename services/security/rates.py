"""Token buckets: how much a caller may do per second. Pure: the clock is an argument."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(slots=True)
class Bucket:
    """Holds up to `burst` permits and gains `rate` of them a second.

    Attributes:
        rate: Permits a second.
        burst: Permits at most.
        level: Permits now.
        at: When that was true.
    """

    rate: float
    burst: float
    level: float
    at: float

    @classmethod
    def full(cls, *, rate: float, burst: float, now: float) -> Bucket:
        """A bucket that nothing has been taken from."""
        return cls(rate, burst, burst, now)

    def try_take(self, now: float) -> bool:
        """Takes a permit if there is one."""
        self.level = min(self.burst, self.level + max(0.0, now - self.at) * self.rate)
        self.at = max(self.at, now)
        if self.level < 1.0:
            return False
        self.level -= 1.0
        return True


class Buckets:
    """One bucket per caller, for a bounded number of callers: the one unheard of for longest is forgotten."""

    def __init__(self, *, rate: float, burst: float, most: int = 4096) -> None:
        self._rate, self._burst, self._most = rate, burst, most
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()

    def try_take(self, caller: str, now: float) -> bool:
        """Whether the caller may go on; takes a permit if so."""
        bucket = self._buckets.get(caller)
        if bucket is None:
            while len(self._buckets) >= self._most:
                self._buckets.popitem(last=False)
            bucket = self._buckets[caller] = Bucket.full(rate=self._rate, burst=self._burst, now=now)
        self._buckets.move_to_end(caller)
        return bucket.try_take(now)

    def __len__(self) -> int:
        return len(self._buckets)
