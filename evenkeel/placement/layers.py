"""Breadth-first branch and bound for a multiple-choice knapsack, in arrays: wide layers instead of a tree.

Items are decided one after another, the most consequential first. A state is a partial choice: its cost and what it
leaves of the budgets. Under any prices `p`, finishing it costs at least `cost + (sum over undecided items of their
least priced cost) - p . left`; the maximum over a few dozen prices around the dual optimum is nearly the linear
relaxation, and is evaluated for all states of a layer at once. A state that costs no less than another and leaves no
more of either budget is dropped: whatever completes it completes the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

SLACK = 1e-6
_CHUNK = 50_000
_FEW_STATES = 64
_FEW_TO_COMPARE = 512
_WIDE = 8


@dataclass(frozen=True, slots=True)
class LayerResult:
    """Outcome of a search.

    Attributes:
        choice: (items,) the best choice below the cutoff, if one was found.
        cost: Its cost, or the cutoff.
        bound: No feasible choice below the cutoff costs less; the cost where the search was complete.
        complete: Whether no state was dropped for want of room, so that nothing better exists.
    """

    choice: IntArray | None
    cost: float
    bound: float
    complete: bool


@dataclass(frozen=True, slots=True)
class Layers:
    """A knapsack prepared for layered search.

    Attributes:
        order: (items,) the order of decision.
        options: Useful options of each item, in order of decision.
        cost: Their costs.
        use: Their (2, options) uses.
        prices: (prices, 2) prices under which states are bounded.
        rest: (items + 1, prices) least priced cost of the items still undecided at each layer.
        need: (items + 1, 2) least use of the items still undecided at each layer.
        budget: (2,) budgets; unlimited ones are zero and so are the uses that go with them.
    """

    order: IntArray
    options: list[IntArray]
    cost: list[FloatArray]
    use: list[FloatArray]
    prices: FloatArray
    rest: FloatArray
    need: FloatArray
    budget: FloatArray


def prepare_layers(
    cost: FloatArray, use: FloatArray, budget: FloatArray, prices: FloatArray, useful: npt.NDArray[np.bool_]
) -> Layers:
    """Arrange a knapsack for `search_layers`.

    Args:
        cost: (items, options) costs; infinite where there is no option.
        use: (2, items, options) uses of the budgets.
        budget: (2,) budgets; may be infinite.
        prices: (prices, 2) prices to bound with, the best first.
        useful: (items, options) which options may be chosen.
    """
    limited = np.isfinite(budget)
    use = np.where(limited[:, None, None], use, 0.0)
    budget = np.where(limited, budget, 0.0)
    kept_cost = np.where(useful, cost, np.inf)
    weight = prices[0][0] * use[0] + prices[0][1] * use[1]
    spread = np.where(useful, weight, -np.inf).max(axis=1) - np.where(useful, weight, np.inf).min(axis=1)
    order = np.argsort(-spread, kind="stable")
    least = np.stack([(kept_cost + p[0] * use[0] + p[1] * use[1]).min(axis=1) for p in prices], axis=1)
    frugal = np.where(useful, use, np.inf).min(axis=2).T
    options = [np.flatnonzero(useful[item]) for item in order]
    pairs = list(zip(order, options, strict=True))
    return Layers(
        order=order,
        options=options,
        cost=[cost[item, kept] for item, kept in pairs],
        use=[use[:, item, kept] for item, kept in pairs],
        prices=prices,
        rest=_from_the_end(least[order]),
        need=_from_the_end(frugal[order]),
        budget=budget,
    )


def _from_the_end(values: FloatArray) -> FloatArray:
    """(items + 1, ...) sums of all that follow, from each item on."""
    return np.vstack([np.cumsum(values[::-1], axis=0)[::-1], np.zeros((1, values.shape[1]))])


def search_layers(
    layers: Layers, cutoff: float, *, most_states: int, is_over: Callable[[], bool] = lambda: False
) -> LayerResult:
    """The cheapest feasible choice below `cutoff`, exactly unless more than `most_states` states are alive at once.

    Beyond, the states of the lowest bound go on and the result is not complete.

    Args:
        layers: What to search.
        cutoff: Choices that cost this or more are of no interest.
        most_states: States to go on with at most.
        is_over: Asked at every layer; once true, the search ends with nothing found.
    """
    spent, left = np.zeros(1), layers.budget[:, None].copy()
    history: list[tuple[npt.NDArray[np.int32], npt.NDArray[np.int16]]] = []
    dropped = np.inf
    for layer, options in enumerate(layers.options):
        expanded = _expand(layers, layer, spent, left, cutoff, 2 * _WIDE * most_states, is_over)
        if expanded is None:
            return LayerResult(None, cutoff, -np.inf, False)
        (parent, taken, spent, left, bound), unkept = expanded
        dropped = min(dropped, unkept)
        kept = np.arange(len(spent))
        for compared, most in ((False, _WIDE * most_states), (True, most_states)):
            if compared and len(kept) > _FEW_STATES:
                kept = kept[undominated(spent[kept], left[:, kept])]
            if len(kept) > most:
                order = np.argpartition(bound[kept], most)
                dropped = min(dropped, float(bound[kept[order[most]]]))
                kept = np.sort(kept[order[:most]])
        if not len(kept):
            break
        spent, left = spent[kept], left[:, kept]
        history.append((parent[kept].astype(np.int32), options[taken[kept]].astype(np.int16)))
    complete = dropped == np.inf
    if len(history) < len(layers.options):
        return LayerResult(None, cutoff, min(dropped, cutoff), complete)
    best = int(spent.argmin())
    if not spent[best] < cutoff:
        return LayerResult(None, cutoff, min(dropped, cutoff), complete)
    choice, state = np.zeros(len(layers.order), dtype=np.int64), best
    for layer in range(len(history) - 1, -1, -1):
        parents, chosen = history[layer]
        choice[layers.order[layer]] = chosen[state]
        state = int(parents[state])
    return LayerResult(choice, float(spent[best]), min(dropped, float(spent[best])), complete)


Expanded: TypeAlias = tuple[IntArray, IntArray, FloatArray, FloatArray, FloatArray]


def _expand(
    layers: Layers,
    layer: int,
    spent: FloatArray,
    left: FloatArray,
    cutoff: float,
    most: int,
    is_over: Callable[[], bool],
) -> tuple[Expanded, float] | None:
    """Every state with every option of the next item that may still end below `cutoff`; about `most` at most.

    Returns:
        Parent state, option, cost, what is left of the budgets, and lower bound of each; and the least lower bound of
        those that were dropped for want of room. `None` once the time is up.
    """
    cost, use = layers.cost[layer], layers.use[layer]
    rest, need = layers.rest[layer + 1], layers.need[layer + 1] - SLACK
    step = max(1, _CHUNK // len(cost))
    blocks: list[Expanded] = []
    held, dropped = 0, np.inf
    for first in range(0, len(spent), step):
        if is_over():
            return None
        rows = slice(first, first + step)
        new_spent = (spent[rows, None] + cost[None, :]).ravel()
        new_left = (left[:, rows, None] - use[:, None, :]).reshape(2, -1)
        # The price of the dual optimum settles most of them; the others are for what it leaves.
        bound = new_spent + rest[0] - layers.prices[0] @ new_left
        kept = np.flatnonzero((new_left[0] >= need[0]) & (new_left[1] >= need[1]) & (bound < cutoff))
        new_spent, new_left, bound = new_spent[kept], new_left[:, kept], bound[kept]
        if len(layers.prices) > 1 and len(kept):
            np.maximum(bound, new_spent + (rest[1:, None] - layers.prices[1:] @ new_left).max(axis=0), out=bound)
            below = np.flatnonzero(bound < cutoff)
            kept, new_spent, new_left, bound = kept[below], new_spent[below], new_left[:, below], bound[below]
        blocks.append((kept // len(cost) + first, kept % len(cost), new_spent, new_left, bound))
        held += len(kept)
        if held > most:
            block, unkept = _lowest(_together(blocks), most // 2)
            blocks, held, dropped = [block], len(block[0]), min(dropped, unkept)
    return _together(blocks), dropped


def _together(blocks: list[Expanded]) -> Expanded:
    if len(blocks) == 1:
        return blocks[0]
    parent, taken, costs, lefts, bounds = zip(*blocks, strict=True)
    joined = np.concatenate
    return joined(parent), joined(taken), joined(costs), np.concatenate(lefts, axis=1), joined(bounds)


def _lowest(states: Expanded, most: int) -> tuple[Expanded, float]:
    """The states of the lowest bounds, in their order, and the least bound of the others."""
    parent, taken, spent, left, bound = states
    order = np.argpartition(bound, most)
    kept = np.sort(order[:most])
    return (parent[kept], taken[kept], spent[kept], left[:, kept], bound[kept]), float(bound[order[most]])


def undominated(spent: FloatArray, left: FloatArray) -> IntArray:
    """States that no other beats or equals in cost and in both budgets left, in ascending order."""
    order = np.lexsort((-left[1], -left[0], spent))
    first, second = left[0, order], left[1, order]
    if len(order) <= _FEW_TO_COMPARE:
        # [i, j]: j costs no more, for it comes before i, and leaves no less.
        beaten = np.tri(len(order), k=-1, dtype=bool) & (first >= first[:, None]) & (second >= second[:, None])
        return np.sort(order[~beaten.any(axis=1)])
    return np.sort(order[~_beaten(first, second)])


def _beaten(first: FloatArray, second: FloatArray) -> npt.NDArray[np.bool_]:
    """Which elements have an earlier one that is no less in both, by halves: n log n, in arrays.

    At each level, blocks of positions fall into a left and a right half; in descending order of `first`, an element
    of the right half is beaten if the largest `second` among the left half's so far is no less than its own.
    """
    num = len(first)
    height = np.unique(second, return_inverse=True)[1].astype(np.int64)
    # At the top level all positions are one block; each level parts every block, keeping its order by `first`.
    order = np.argsort(-first, kind="stable").astype(np.int64)
    beaten = np.zeros(num, dtype=bool)
    places = np.arange(num)
    for level in range(int(num - 1).bit_length() - 1, -1, -1):
        half = 1 << level
        block, in_left = order >> (level + 1), (order & half) == 0
        # Heights of later blocks lie above all of earlier ones, so that one running maximum serves all blocks.
        lifted = height[order] + block * num
        highest = np.maximum.accumulate(np.where(in_left, lifted, -1))
        beaten[order[~in_left & (highest >= lifted)]] = True
        lefts = np.cumsum(in_left)
        start = block * (2 * half)
        # All blocks but the last are full, so `block * half` of the left are in earlier ones.
        rank_left = lefts - 1 - block * half
        rank_right = places - start - (lefts - block * half) + half
        parted = np.empty_like(order)
        parted[start + np.where(in_left, rank_left, rank_right)] = order
        order = parted
    return beaten
