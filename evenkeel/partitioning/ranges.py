"""What amounts and options may be: stated once for `partition`, the balancer's wire and the trainers' options."""

from __future__ import annotations

from typing import NamedTuple


class Range(NamedTuple):
    """Numbers from `least` to `most`, both included."""

    least: float
    most: float

    def holds(self, value: float) -> bool:
        """Whether the value is one of them; NaN is not."""
        return self.least <= value <= self.most

    def __str__(self) -> str:
        return f"{self.least:g} to {self.most:g}"


TOLERANCE = Range(0.0, 1.0)  # share of the lower bound: at 1, loads may be twice of it
MOVE_PRICE = Range(0.0, 1000.0)  # of a step's time: what moving all samples takes
SPEEDS = Range(1e-6, 1e6)
MEMORY_CAPS = Range(0.0, float("inf"))
SPLIT_ABOVE = Range(0.0, 1000.0)  # of an even division
SPLIT_PRICE = Range(0.0, 1e100)  # of a position's keys and values, and of a step, in units of cost
MAX_RANKS = 1 << 16
MAX_SAMPLES = (1 << 31) - 1  # indices have 32 bits
MAX_TOTAL = 1 << 62  # above all sums of integers, so that they are exact
EXACT = 2.0**53  # up to which sums of integers are exact as float64
MAX_SUM = 1e300  # above all sums of fractions, so that no product of theirs is beyond float64


def share_of_total(num_ranks: int) -> float:
    """What one rank's amounts may add up to: a little less than its part of `MAX_TOTAL`, since sums are rounded."""
    return MAX_TOTAL * (1.0 - 1e-9) / num_ranks
