"""The multiple-choice knapsack over two budgets: one option for each item, least cost, both budgets kept."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from evenkeel.placement.layouts import ROW_WISE
from evenkeel.placement.limits import Watch
from evenkeel.placement.model import Mode
from evenkeel.placement.problem import Group, Module, Problem
from evenkeel.placement.search import solve

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Knapsack:
    """Items with options.

    Attributes:
        cost: (items, options); infinite where an item has no such option.
        use: (2, items, options) use of the budgets.
        budget: (2,) budgets; infinite where there is none.
    """

    cost: FloatArray
    use: FloatArray
    budget: FloatArray


@dataclass(frozen=True, slots=True)
class KnapsackResult:
    """A choice of options.

    Attributes:
        choice: (items,) chosen option of each item; `None` where none is feasible.
        cost: Its cost; infinite without a choice.
        bound: No feasible choice costs less.
        proved: Whether the search ended by itself, not by its time limit.
    """

    choice: IntArray | None
    cost: float
    bound: float
    proved: bool


def solve_knapsack(knapsack: Knapsack, *, gap: float = 0.0, watch: Watch | None = None) -> KnapsackResult:
    """The cheapest choice, as `evenkeel.placement.search` finds it.

    Args:
        knapsack: What to choose from.
        gap: Relative gap to prove.
        watch: Once its time is up, the best found is returned with its bound; a minute by default.

    Raises:
        SolveCancelledError: If the caller wants the search to stop.
    """
    items, options = knapsack.cost.shape
    if not items:
        return KnapsackResult(np.zeros(0, dtype=np.int64), 0.0, 0.0, True)
    modules = tuple(Module(ROW_WISE, Mode.CACHING, float(number)) for number in range(options))
    group = Group(tuple(range(items)), modules, knapsack.cost, knapsack.use[0], knapsack.use[1], np.ones((3, options)))
    found = solve(Problem((group,), knapsack.budget), watch or Watch(), gap=gap)
    return KnapsackResult(None if found.choice is None else found.choice[0], found.cost, found.bound, found.proved)
