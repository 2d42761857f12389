"""Branch and bound over the modules of all groups: what may be chosen is halved where the dual's minimisers disagree.

The dual takes mixtures: half a group at one ratio and half at another, which no plan can do. Where one table is a large
part of all memory and a budget is tight, that is far below the best plan. So the search looks at the choices that the
dual mixes, takes the group whose choices differ most in memory, and parts it between them: by its combinations of open
modules, or, where most of the difference is one table's, by the modules of that table. The dual of each half is higher,
and after some dozens of such cuts there is little left to mix.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from evenkeel.placement.combinations import Combinations
from evenkeel.placement.dual import DualPoint, maximise_dual
from evenkeel.placement.knapsack import Knapsack
from evenkeel.placement.layers import SLACK
from evenkeel.placement.limits import Watch

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

_ITERATIONS = 8
_TOLERANCE = 1e-5
"""Relative distance to the dual's optimum: near enough for its mixture to say where to cut."""
_MIXED = 4
"""Choices of a mixture that are kept."""
_ONE_TABLE = 0.5
"""Part of a group's difference above which a single table is parted."""
_OPEN_BYTES, _GROUP_BYTES = 64 << 20, 500
"""Memory of the parts that are still to be cut, and of what is kept of each group's choice beside its modules."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a part of the search proved.

    Attributes:
        bound: No choice there costs less, or less than the cutoff.
        proved: Whether it ended by itself, not by its time limit.
    """

    bound: float
    proved: bool


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the search shares with the one that it is a part of.

    Attributes:
        combinations: Of each bound group.
        free: Tables that are in no bound group.
        budget: (2,) budgets.
        scale: (2,) natural size of prices.
        solve: The best choice under one combination of each bound group.
        offer: Takes the modules of each bound group, and the options of the free tables, that keep the budgets.
        cutoff: Choices that cost this or more are of no interest; falls with what is found.
        most_cuts: How often to cut at most; as often as it takes where `None`.
        watch: The time that is left.
    """

    combinations: Sequence[Combinations]
    free: Knapsack
    budget: FloatArray
    scale: FloatArray
    solve: Callable[[tuple[int, ...]], Outcome]
    offer: Callable[[list[IntArray], IntArray], None]
    cutoff: Callable[[], float]
    most_cuts: int | None
    watch: Watch


@dataclass(frozen=True, slots=True)
class _Part:
    """What is left of a group: some of its combinations, and for some tables the modules that they may be in."""

    first: IntArray
    second: IntArray
    allowed: dict[int, BoolArray]


@dataclass(frozen=True, slots=True)
class _Priced:
    """The choice of least priced cost in a part: its combination, the module of each table, and its use."""

    value: float
    combination: tuple[int, int]
    modules: IntArray
    use: FloatArray


@dataclass(frozen=True, slots=True)
class _Point:
    """The choice of each group at one pair of prices, and its weight in the dual's mixture."""

    prices: FloatArray
    groups: tuple[_Priced, ...]
    weight: float


@dataclass(order=True, slots=True)
class _Node:
    """A part of each group, and the value of their dual."""

    bound: float
    number: int
    parts: tuple[_Part, ...] = field(compare=False)
    mixture: list[_Point] = field(compare=False)


@dataclass(frozen=True, slots=True)
class _Cut:
    """Where a group is parted: its first (0) or second (1) column, or where a table is given, its use of a budget."""

    group: int
    side: int
    place: float
    table: int | None = None


class Halving:
    """One search, the lowest bound first."""

    def __init__(self, around: Surroundings) -> None:
        self.around = around
        self.limited = np.isfinite(around.budget)
        self.room = np.where(self.limited, around.budget + SLACK, 0.0)
        self.share = np.where(self.limited, 1 / np.maximum(around.budget, 1.0), 0.0)
        self.free = len(around.combinations)
        self.unit = 1.0
        self.tried: set[tuple[int, ...]] = set()
        tables = len(around.free.cost) + sum(len(c.group.tables) for c in around.combinations)
        self.most_open = _OPEN_BYTES // (_MIXED * (8 * tables + _GROUP_BYTES * (self.free + 1)))
        self.made = 0

    def run(self, bound: float, prices: FloatArray) -> Outcome:
        """Until nothing below the cutoff is left, or time or room is up.

        Args:
            bound: No choice costs less. In units of it, HiGHS tells small differences of costs apart.
            prices: (2,) where to begin.

        Raises:
            SolveCancelledError: If the caller wants the search to stop.
        """
        around = self.around
        self.unit = abs(bound) or 1.0
        prices = prices / self.unit
        sizes = (combinations.fixed.shape for combinations in around.combinations)
        parts = [_Part(np.arange(first), np.arange(second), {}) for first, second in sizes]
        root = self._node((*parts, _Part(np.zeros(1, np.int64), np.zeros(1, np.int64), {})), [prices, np.zeros(2)])
        left, closed, cuts = [] if root is None else [root], np.inf, 0
        while left and left[0].bound < around.cutoff():
            bound = min(left[0].bound, closed)
            if cuts == around.most_cuts or len(left) > self.most_open or around.watch.is_over():
                return Outcome(bound, False)
            cuts += 1
            node = heapq.heappop(left)
            outcome = self._solve(node)
            cut = self._cut(node)
            if cut is None:
                # One combination of each group is left, and it was solved.
                if outcome is None or not outcome.proved:
                    return Outcome(bound, False)
                closed = min(closed, max(outcome.bound, node.bound))
                continue
            for part in self._halves(cut, node.parts[cut.group]):
                inside = (*node.parts[: cut.group], part, *node.parts[cut.group + 1 :])
                half = self._node(inside, [point.prices for point in node.mixture], node, cut.group)
                if half is not None:
                    heapq.heappush(left, half)
        return Outcome(closed, True)

    def _solve(self, node: _Node) -> Outcome | None:
        """The best choice under the combinations that weigh most; nothing where that was asked before."""
        groups = zip(node.mixture[0].groups, self.around.combinations, strict=False)
        names = tuple(p.combination[0] * len(c.second) + p.combination[1] for p, c in groups)
        alone = all(len(part.first) == len(part.second) == 1 for part in node.parts)
        if names in self.tried and not alone:
            return None
        self.tried.add(names)
        return self.around.solve(names)

    def _node(
        self, parts: tuple[_Part, ...], starts: list[FloatArray], parent: _Node | None = None, changed: int = 0
    ) -> _Node | None:
        """The dual of some parts, of which one differs from the parent's; nothing if it is not below the cutoff."""
        around, seen = self.around, list[tuple[_Priced, ...]]()
        known = {} if parent is None else {point.prices.tobytes(): point.groups for point in parent.mixture}

        def evaluate(prices: FloatArray) -> DualPoint:
            around.watch.check()
            before = known.get(prices.tobytes())
            groups = []
            for number, part in enumerate(parts):
                same = before is not None and number != changed
                found = (
                    before[number] if before is not None and same else self._priced(number, part, prices * self.unit)
                )
                if found is None:
                    return DualPoint(prices, np.inf, np.zeros(2))
                groups.append(found)
            seen.append(tuple(groups))
            use = np.sum([found.use for found in groups], axis=0)
            if np.all(use <= around.budget + SLACK):
                around.offer([found.modules for found in groups[: self.free]], groups[self.free].modules)
            value = sum(found.value for found in groups) - float(prices @ self.room) * self.unit
            return DualPoint(prices, value / self.unit, np.where(self.limited, use - self.room, -1.0))

        dual = maximise_dual(
            evaluate, around.scale / self.unit, starts=starts, tolerance=_TOLERANCE,
            iterations=len(starts) + _ITERATIONS, cutoff=around.cutoff() / self.unit,
        )  # fmt: skip
        best = dual.best
        bound = max(best.value * self.unit, -np.inf if parent is None else parent.bound)
        if bound >= around.cutoff():
            return None
        self.made += 1
        points = [_Point(*each) for each in zip((p.prices for p in dual.points), seen, dual.weights, strict=True)]
        mixture = sorted((point for point in points if point.weight > 0), key=lambda point: -point.weight)[:_MIXED]
        if not any(point.prices is best.prices for point in mixture):
            mixture.append(points[next(place for place, point in enumerate(dual.points) if point is best)])
        return _Node(bound, self.made, parts, mixture)

    def _priced(self, number: int, part: _Part, prices: FloatArray) -> _Priced | None:
        """The choice of least priced cost in a part; nothing where there is none."""
        if number == self.free:
            free = self.around.free
            priced = _within(free.cost + prices[0] * free.use[0] + prices[1] * free.use[1], part)
            modules = priced.argmin(axis=1) if len(priced) else np.zeros(0, dtype=np.int64)
            value, combination = float(priced[np.arange(len(priced)), modules].sum()), (0, 0)
        else:
            combinations = self.around.combinations[number]
            priced = _within(combinations.group.priced(prices), part)
            totals = combinations.totals(priced, part.first, part.second)
            row, column = divmod(int(totals.argmin()), len(part.second))
            value, combination = float(totals[row, column]), (int(part.first[row]), int(part.second[column]))
            if np.isfinite(value):
                opened = combinations.open(combination[0] * len(combinations.second) + combination[1])
                modules = opened[priced[:, opened].argmin(axis=1)]
        if not np.isfinite(value):
            return None
        return _Priced(value, combination, modules, self._uses(number, modules).sum(axis=1))

    def _uses(self, number: int, modules: IntArray) -> FloatArray:
        """(2, tables) what the modules of a group's tables use of each budget."""
        rows = np.arange(len(modules))
        if number == self.free:
            return self.around.free.use[:, rows, modules]
        group = self.around.combinations[number].group
        return np.stack([group.hbm[rows, modules], group.host[rows, modules]])

    def _cut(self, node: _Node) -> _Cut | None:
        """Between the choices of the group whose part in the mixture differs most; nothing if all are single."""
        weights = np.array([point.weight for point in node.mixture])
        weights = weights / weights.sum() if weights.any() else np.full(len(weights), 1 / len(weights))
        most, found = -1.0, None
        for number, part in enumerate(node.parts):
            priced = [point.groups[number] for point in node.mixture]
            use = np.stack([self._uses(number, each.modules) for each in priced])
            apart = self.share @ np.tensordot(weights, np.abs(use - np.tensordot(weights, use, 1)), 1)
            if not apart.any():
                continue
            table = int(apart.argmax())
            together = use.sum(axis=2)
            score, cut = float(apart[table]), None
            if apart[table] < _ONE_TABLE * apart.sum():
                score = float(self.share @ (weights @ np.abs(together - weights @ together)))
                cut = _between(number, part, [each.combination for each in priced])
            if cut is None:
                side = int((np.ptp(use[:, :, table], axis=0) * self.share).argmax())
                low, high = float(use[:, side, table].min()), float(use[:, side, table].max())
                cut = _Cut(number, side, (low + high) / 2, table)
            if score > most:
                most, found = score, cut
        return found or self._middle(node)

    def _middle(self, node: _Node) -> _Cut | None:
        """Halves of the longest column there is."""
        sizes = [(len(own), number, side) for number, p in enumerate(node.parts) for side, own in enumerate(_sides(p))]
        size, number, side = max(sizes)
        return _Cut(number, side, float(_sides(node.parts[number])[side][size // 2])) if size > 1 else None

    def _halves(self, cut: _Cut, part: _Part) -> Iterator[_Part]:
        """A part below and above a cut."""
        if cut.table is None:
            own = _sides(part)[cut.side]
            for kept in (own[own < cut.place], own[own >= cut.place]):
                yield replace(part, second=kept) if cut.side else replace(part, first=kept)
            return
        free = cut.group == self.free
        time = self.around.free.cost if free else self.around.combinations[cut.group].group.time
        allowed = part.allowed.get(cut.table, np.isfinite(time[cut.table]))
        below = self._uses_of(cut.group, cut.table)[cut.side] <= cut.place
        for kept in (allowed & below, allowed & ~below):
            left = replace(part, allowed={**part.allowed, cut.table: kept})
            if kept.any():
                yield left if free else self._holding(cut.group, left, kept)

    def _uses_of(self, number: int, table: int) -> FloatArray:
        """(2, modules) what each module of a table uses."""
        if number == self.free:
            return self.around.free.use[:, table]
        group = self.around.combinations[number].group
        return np.stack([group.hbm[table], group.host[table]])

    def _holding(self, number: int, part: _Part, modules: BoolArray) -> _Part:
        """The combinations in which one of some modules is open, where only one column has them."""
        combinations = self.around.combinations[number]
        openings = set(combinations.group.openings()[0][modules].tolist())
        first = np.array([bool(openings & set(combinations.first[place])) for place in part.first.tolist()], dtype=bool)
        second = np.array(
            [bool(openings & set(combinations.second[place])) for place in part.second.tolist()], dtype=bool
        )
        return replace(
            part,
            first=part.first if second.any() else part.first[first],
            second=part.second if first.any() else part.second[second],
        )


def _sides(part: _Part) -> tuple[IntArray, IntArray]:
    return part.first, part.second


def _within(priced: FloatArray, part: _Part) -> FloatArray:
    """(tables, modules) priced costs, infinite where a table may not be."""
    for table, allowed in part.allowed.items():
        priced[table, ~allowed] = np.inf
    return priced


def _between(number: int, part: _Part, combinations: list[tuple[int, int]]) -> _Cut | None:
    """In the middle of some combinations, in the column in which they are further apart; nothing if they are one."""
    places = [np.searchsorted(own, [each[side] for each in combinations]) for side, own in enumerate(_sides(part))]
    side = int(np.argmax([np.ptp(own) / len(column) for own, column in zip(places, _sides(part), strict=True)]))
    low, high = int(places[side].min()), int(places[side].max())
    return None if low == high else _Cut(number, side, float(_sides(part)[side][(low + high + 1) // 2]))
