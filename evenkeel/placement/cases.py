"""The cases of a request: at which width the sequence tables of each collection are cut into columns.

TorchRec exchanges the column shards of an `EmbeddingCollection` as rows of one width. Which one is best, only a search
at each can tell, so each is a request and a problem of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from evenkeel.placement.building import build_problem, without_rank
from evenkeel.placement.incumbent import Placed, can_be_placed
from evenkeel.placement.invalid_input import InvalidInputError
from evenkeel.placement.layouts import cuts, layouts
from evenkeel.placement.limits import Limits, Watch
from evenkeel.placement.model import Runtime, Sharding, Table
from evenkeel.placement.placement_problem import PlacementProblem, Solution
from evenkeel.placement.placing import solve_and_place
from evenkeel.placement.request import PlanRequest
from evenkeel.placement.solver import solve

MOST_CASES = 12
"""Of a request at most: the smaller ones of its collections get a width beforehand above that."""
_FIRST = 0.5
"""Of the time, for the case that is likely the best."""
_POOLED_ONLY = {Sharding.TABLE_ROW_WISE, Sharding.GRID}


@dataclass(frozen=True, slots=True)
class Case:
    """A request with a width for each collection of sequence tables, and its problem."""

    request: PlanRequest
    problem: PlacementProblem

    def given(self, change: Callable[[PlacementProblem], PlacementProblem]) -> Case:
        """The same case with another problem."""
        return Case(self.request, change(self.problem))


def cases(
    request: PlanRequest, grid: npt.NDArray[np.float64] | None = None, *, watch: Watch | None = None
) -> tuple[Case, ...]:
    """The cases of `request`, likely better ones first.

    Raises:
        InvalidInputError: If `build_problem` raises it, or if the tables of a collection have no common width.
        SolveCancelledError: If `watch` says so.
    """
    found: list[Case] = []
    refused: InvalidInputError | None = None
    for asked in at_each_width(request):
        try:
            found.append(Case(asked, build_problem(asked, grid, watch=watch)))
        except InvalidInputError as error:  # Modes may rule out what a width leaves of a table.
            if watch is not None and watch.is_over():
                raise
            refused = refused or error
    if refused is not None and not found:
        raise refused
    return tuple(found)


def search(cases: Sequence[Case], limits: Limits) -> tuple[Case, Placed | None, Solution]:
    """The best placement of all cases, `None` where none was found, with its case and a bound over all of them."""
    watch = Watch(limits)
    best: tuple[Case, Placed | None, Solution] | None = None
    bound, pending = np.inf, list[Solution]()
    for number, case in enumerate(cases):
        placed, solution = None, Solution(None, np.inf, np.inf, True, np.zeros(2))
        over = np.inf if best is None or best[1] is None else best[1].seconds
        if not without_rank(case.request, case.problem):
            left = len(cases) - number
            share = _FIRST if left > 1 and not number else 1 / left
            own = limits.within(share * watch.left()) if left > 1 else limits.within(watch.left())
            placed, solution = solve_and_place(case.request, case.problem, own, over)
        bound = min(bound, solution.bound)
        pending += [] if solution.proved else [solution]
        if best is None or (placed is not None and placed.seconds < over):
            best = case, placed, solution
    assert best is not None, "a request has a case"
    case, placed, solution = best
    least = np.inf if placed is None else placed.seconds
    proved = all(other.bound >= least and placed is not None for other in pending)
    return case, placed, replace(solution, bound=bound, proved=proved)


def fastest(cases: Sequence[Case], limits: Limits) -> Solution:
    """The best choice found, at the time of its slowest rank; ranks themselves are searched only where they differ."""
    if not any(can_be_placed(case.problem) for case in cases):
        return solve(cases[0].problem, limits)
    _, placed, solution = search(cases, limits)
    if placed is None:
        return replace(solution, modules=None, cost=np.inf)
    return replace(solution, modules=placed.modules, cost=placed.seconds, bound=min(solution.bound, placed.seconds))


def at_each_width(request: PlanRequest) -> tuple[PlanRequest, ...]:
    """The request once for each width that column shards of its sequence tables may have together.

    Raises:
        InvalidInputError: If the tables of a collection have no common width.
    """
    collections: dict[str, list[int]] = {}
    for index, table in enumerate(request.tables):
        if request.runtime is Runtime.TORCHREC and not table.pooled and Sharding.COLUMN_WISE in table.shardings:
            collections.setdefault(table.group, []).append(index)
    shared = [indices for indices in collections.values() if len(indices) > 1]
    shared.sort(key=lambda indices: -sum(_bytes(request.tables[index]) for index in indices))
    found: list[dict[int, Table]] = [{}]
    for indices in shared:
        ways = _ways(request, indices)
        if len(found) * len(ways) > MOST_CASES:
            ways = ways[:1]
        found = [{**tables, **way} for tables in found for way in ways]
    return tuple(
        replace(request, tables=tuple(way.get(index, table) for index, table in enumerate(request.tables)))
        if way
        else request
        for way in found
    )


def _ways(request: PlanRequest, indices: list[int]) -> list[dict[int, Table]]:
    """The tables of a collection at each width that leaves them something that no other one leaves them as well."""
    tables, ranks = [request.tables[index] for index in indices], request.topology.ranks
    if len({table.dim // table.column_shards for table in tables if table.column_shards}) > 1:
        return [{}]  # Applying the plan says what is wrong with it.
    largest = max(tables, key=_bytes)
    share = sum(map(_bytes, request.tables)) / ranks

    def fit(width: int) -> tuple[bool, int]:
        """Those first at which a shard of the largest table is no more than a rank's share, the widest of them."""
        fits = _bytes(largest) * min(1.0, width / largest.dim) <= share
        return (not fits, -width if fits else width)

    widths = sorted({table.dim // pieces for table in tables for pieces in _pieces(table, ranks)}, key=fit)
    found: list[dict[int, Table]] = []
    left: list[list[set[object]]] = []
    for width in widths:
        cut = [_at(table, width, ranks) for table in tables]
        way = {index: table for index, table in zip(indices, cut, strict=True) if table is not None}
        if len(way) == len(indices):
            found.append(way)
            left.append([set(layouts(table, request.topology)) for table in way.values()])
    if not found:
        raise _no_common_width(request, indices)

    def within(one: int, other: int) -> bool:
        return all(mine <= its for mine, its in zip(left[one], left[other], strict=True))

    numbers = range(len(found))
    beaten = {a for a in numbers for b in numbers if a != b and within(a, b) and (a > b or not within(b, a))}
    return [way for number, way in enumerate(found) if number not in beaten]


def _at(table: Table, width: int, ranks: int) -> Table | None:
    """The table with column shards of that width, or with none if it has none; `None` if nothing else is left."""
    pieces = table.dim // width if table.dim % width == 0 else 0
    whole = pieces == 1 and Sharding.TABLE_WISE in table.shardings  # which is the same, and not exchanged with others
    if pieces in _pieces(table, ranks) and not whole:
        return replace(table, column_shards=pieces)
    others = tuple(sharding for sharding in table.shardings if sharding is not Sharding.COLUMN_WISE)
    return None if _POOLED_ONLY.issuperset(others) else replace(table, sharding=others, column_shards=0)


def _pieces(table: Table, ranks: int) -> list[int]:
    return [table.column_shards] if table.column_shards else [1, *cuts(table, ranks)]


def _bytes(table: Table) -> int:
    return table.rows * table.dim * table.value_bytes


def _no_common_width(request: PlanRequest, indices: list[int]) -> InvalidInputError:
    only = [i for i in indices if _POOLED_ONLY.issuperset(set(request.tables[i].shardings) - {Sharding.COLUMN_WISE})]
    first, table = (request.tables[index] for index in (only[0], only[-1]))
    what = f"leaves {table.name!r} no width that {first.name!r} of the same collection can have too"
    remedy = "TorchRec exchanges sequences of one width: allow row_wise, or make their widths multiples of one"
    given = [sharding.value for sharding in table.shardings]
    return InvalidInputError(f"tables[{only[-1]}].sharding", given, what, remedy)
