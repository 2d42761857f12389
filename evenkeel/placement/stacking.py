"""Groups as items of a knapsack: one for each table, or one for a whole group."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from evenkeel.placement.knapsack import Knapsack
from evenkeel.placement.placement_problem import Group

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


def sampled(group: Group, choices: list[IntArray]) -> Knapsack:
    """One item, whose options are choices of a module for each table of a group."""
    rows, stacked = np.arange(len(group.tables)), np.stack(choices)
    opening_of, cost = group.openings()
    fixed = np.array([float(cost[np.unique(opening_of[chosen])].sum()) for chosen in choices])
    use = np.stack([group.hbm[rows, stacked].sum(axis=1), group.host[rows, stacked].sum(axis=1)])
    return Knapsack((group.time[rows, stacked].sum(axis=1) + fixed)[None, :], use[:, None, :], np.zeros(2))


def folded(group: Group) -> Group:
    """A free group with the fixed time of its modules in the time of its only table."""
    fixed = np.array([module.fixed for module in group.modules])
    return Group(group.tables, group.modules, group.time + fixed, group.hbm, group.host, False)


def stack(groups: list[Group]) -> Knapsack:
    """All tables of some groups."""
    parts = [Knapsack(g.time, np.stack([g.hbm, g.host]), np.zeros(2)) for g in groups]
    return stack_knapsacks(parts, np.zeros(2))


def stack_knapsacks(parts: list[Knapsack], budget: FloatArray) -> Knapsack:
    """All items of some knapsacks, under one budget."""
    items = sum(len(part.cost) for part in parts)
    options = max((part.cost.shape[1] for part in parts), default=1)
    cost, use = np.full((items, options), np.inf), np.zeros((2, items, options))
    row = 0
    for part in parts:
        stop, width = row + len(part.cost), part.cost.shape[1]
        cost[row:stop, :width] = part.cost
        use[:, row:stop, :width] = part.use
        row = stop
    return Knapsack(cost, use, budget)
