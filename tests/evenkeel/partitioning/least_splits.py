"""The least time that a step with samples in pieces can take, whatever the plan: a bound, not a plan."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.splits import Divisible
from evenkeel.partitioning.splits.cutting import pieces_at, table_of

_HALVINGS = 24


def least_time(costs: NDArray[np.float64], divisible: Divisible, num_ranks: int, price: float, most: int) -> float:
    """No plan takes less, if ranks compute their own queries' attention and no sample has more pieces than `most`.

    A rank takes its load, and at least what it receives, and what it sends if that were once. In a step of time t no
    piece takes longer than t.
    From a sample's end, each piece then begins at some position at the earliest (`pieces_at`), and receives the keys
    and values of all before it; what all samples cost and all these pieces receive is at most the time of all ranks.

    Args:
        costs: (n,) of all samples.
        divisible: Those that may be split, plainly causal; the others are whole.
        num_ranks: Of equal speed.
        price: What it takes at least to send a position's keys and values to a rank.
        most: As many pieces as a sample may have.

    Returns:
        In the unit of the costs; infinity if there is no such plan.
    """
    table, own = table_of(divisible.spans), costs[divisible.samples]
    whole = np.ones(costs.size, np.bool_)
    whole[divisible.samples] = False
    total, times, begins = float(costs.sum()), np.empty(most), np.empty(most)

    def enough(level: float) -> bool:
        received = 0.0
        for sample in np.flatnonzero(own > level).tolist():
            count = pieces_at(table, sample, level, price, most, times, begins)
            if count > most:
                return False
            received += price * float(begins[:count].sum())
        return total + received <= num_ranks * level

    low = max(total / num_ranks, float(costs[whole].max(initial=0.0)))
    high = max(low, float(costs.max(initial=0.0)))
    if enough(low):
        return low
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return low
