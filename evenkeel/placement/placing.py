"""From a solution for the average rank to a placement: shards that live on one rank get theirs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from evenkeel.placement.limits import Limits, Watch
from evenkeel.placement.model import Sharding
from evenkeel.placement.packing import Shelves, improve_packing
from evenkeel.placement.placement_problem import PlacementProblem, Solution
from evenkeel.placement.ranks import Shards, place_shards
from evenkeel.placement.request import PlanRequest
from evenkeel.placement.solver import seconds, solve, usage

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_RUNG = 1.02
_RUNGS = 11
"""Tighter budgets for the average rank that are tried until the shards fit on whole ranks."""
_ATTEMPTS = 4
_TOLERABLE = 0.01  # gap that more attempts are not worth
_REPACKED = 3
_SHARE = 0.5
"""Of the time that is left, for the choice that shards are then put on ranks by."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A solution with ranks for the shards that live on one rank.

    Attributes:
        modules: For each group, the module of each of its tables.
        prices: Cost that one more unit of each budget saves, at the optimum of the dual.
        ranks: Ranks of each table that is not on all of them.
        seconds: Time of the slowest rank.
        use: HBM of the fullest rank and memory of the fullest host, in units.
    """

    modules: tuple[IntArray, ...]
    ranks: dict[int, tuple[int, ...]]
    seconds: float
    use: FloatArray


def solve_and_place(request: PlanRequest, problem: PlacementProblem, limits: Limits) -> tuple[Placed | None, Solution]:
    """Solve, then find ranks for single-rank shards, under tighter average budgets where they do not fit."""
    watch = Watch(limits)
    shards = bool(single_rank_tables(request))
    first = solve(problem, limits.within(_SHARE * watch.left()) if shards else limits)
    solution, best = first, None
    enough = max(first.bound, heaviest_shard(request, problem)) * (1 + request.solver.gap)
    starts: list[Placed] = []
    unplaced: list[tuple[IntArray, ...]] = []
    for attempt in range(_RUNGS + 1):
        if solution.modules is None:
            break
        placed = _place(request, problem, solution, watch)
        if placed is None:
            unplaced.append(solution.modules)
        else:
            starts.append(placed)
            best = placed if best is None or placed.seconds < best.seconds else best
        tolerable = enough if attempt < _ATTEMPTS else enough * (1 + _TOLERABLE)
        close = best is not None and best.seconds <= tolerable
        if close or attempt == _RUNGS or not shards or watch.is_over():
            break
        tighter = problem.with_budget(*(_rung(float(budget), attempt) for budget in problem.budget))
        solution = solve(tighter, limits.within(_SHARE * watch.left()))
    # Ranks and ratios together, from the best placements, and from choices that did not fit as they were.
    starts.sort(key=lambda placed: placed.seconds)
    tries = [(placed.modules, placed) for placed in starts[:_REPACKED]] + [(m, None) for m in unplaced[:_REPACKED]]
    for turn, (modules, start) in enumerate(tries):
        if best is not None and best.seconds <= enough * (1 + (_TOLERABLE if turn else 0)):
            break
        found = _repack(request, problem, modules, start, enough, watch)
        best = found if best is None or (found is not None and found.seconds < best.seconds) else best
    if best is None and first.modules is not None:
        # Each shard fits on average, but no placement on whole ranks was found: nothing is proved.
        return None, Solution(None, np.inf, first.bound, False, first.prices)
    return best, first


def fastest(request: PlanRequest, problem: PlacementProblem, limits: Limits) -> Solution:
    """The best choice found, at the time of its slowest rank; ranks themselves are searched only where they differ."""
    if not single_rank_tables(request):
        return solve(problem, limits)
    placed, solution = solve_and_place(request, problem, limits)
    if placed is None:
        return replace(solution, modules=None, cost=np.inf)
    bound = min(max(solution.bound, heaviest_shard(request, problem)), placed.seconds)
    return replace(solution, modules=placed.modules, cost=placed.seconds, bound=bound)


def _rung(budget: float, steps: int) -> float:
    """A somewhat smaller budget, on a ladder that all budgets share: what a smaller one finds, a larger one finds."""
    if not np.isfinite(budget) or budget <= 0:
        return budget
    return float(_RUNG ** (math.floor(math.log(budget) / math.log(_RUNG)) - steps))


@dataclass(frozen=True, slots=True)
class _Shard:
    """A shard that lives on one rank.

    Attributes:
        group: Its group, of one table.
        table: Its table.
        copies: Shards of the table.
    """

    group: int
    table: int
    copies: int


def _shards(request: PlanRequest, problem: PlacementProblem) -> list[_Shard]:
    single = set(single_rank_tables(request))
    found = []
    for number, group in enumerate(problem.groups):
        table = group.tables[0]
        if table in single:
            copies = request.tables[table].column_shards
            found += [_Shard(number, table, copies)] * copies
    return found


def _whole(request: PlanRequest, problem: PlacementProblem, shard: _Shard) -> FloatArray:
    """(3, modules) time and HBM on the rank that holds `shard`, and memory on its host."""
    group = problem.groups[shard.group]
    time = group.time[0] + np.array([module.fixed for module in group.modules])
    ranks = request.topology.ranks / shard.copies
    return np.stack([time * ranks, group.hbm[0] * ranks, group.host[0] * ranks / request.topology.local_ranks])


def _rest(problem: PlacementProblem, modules: tuple[IntArray, ...], shards: list[_Shard]) -> tuple[float, FloatArray]:
    """Time and use of everything that is on all ranks."""
    own = {shard.group for shard in shards}
    others = [number for number in range(len(problem.groups)) if number not in own]
    rest = PlacementProblem(tuple(problem.groups[number] for number in others), problem.budget)
    chosen = tuple(modules[number] for number in others)
    return seconds(rest, chosen), usage(rest, chosen)


def single_rank_tables(request: PlanRequest) -> list[int]:
    """Tables whose shards live on one rank each."""
    kinds = (Sharding.TABLE_WISE, Sharding.COLUMN_WISE)
    return [index for index, table in enumerate(request.tables) if table.sharding in kinds]


def _place(request: PlanRequest, problem: PlacementProblem, solution: Solution, watch: Watch) -> Placed | None:
    """Ranks for the shards of `solution` as it is."""
    assert solution.modules is not None
    shards = _shards(request, problem)
    if not shards:
        return Placed(solution.modules, {}, solution.cost, usage(problem, solution.modules))
    figures = np.stack(
        [_whole(request, problem, shard)[:, int(solution.modules[shard.group][0])] for shard in shards], axis=1
    )
    owner = np.array([shard.table for shard in shards])
    room = problem.budget - _rest(problem, solution.modules, shards)[1]
    topology = request.topology
    sized = Shards(owner, figures[0], figures[1], figures[2])
    found = place_shards(sized, topology.ranks, topology.local_ranks, float(room[0]), float(room[1]), watch.is_over)
    return None if found is None else _placed(request, problem, solution.modules, shards, found[0])


def _placed(
    request: PlanRequest,
    problem: PlacementProblem,
    modules: tuple[IntArray, ...],
    shards: list[_Shard],
    where: IntArray,
) -> Placed:
    """What a choice of modules and of ranks comes to."""
    ranks, local = request.topology.ranks, request.topology.local_ranks
    figures = np.stack([_whole(request, problem, s)[:, int(modules[s.group][0])] for s in shards], axis=1)
    load, hbm = (np.bincount(where, weights=figures[row], minlength=ranks) for row in (0, 1))
    host = np.bincount(where // local, weights=figures[2], minlength=ranks // local)
    by_table: dict[int, tuple[int, ...]] = {}
    for shard, rank in zip(shards, where, strict=True):
        by_table[shard.table] = (*by_table.get(shard.table, ()), int(rank))
    time, use = _rest(problem, modules, shards)
    return Placed(modules, by_table, time + float(load.max()), use + np.array([hbm.max(), host.max()]))


def _repack(
    request: PlanRequest,
    problem: PlacementProblem,
    modules: tuple[IntArray, ...],
    best: Placed | None,
    enough: float,
    watch: Watch,
) -> Placed | None:
    """Ranks and ratios of single-rank shards together, from `best` on; column shards keep their ratio."""
    shards = _shards(request, problem)
    if not shards:
        return best
    figures = [_whole(request, problem, shard) for shard in shards]
    shape = (3, len(shards), max(figure.shape[1] for figure in figures))
    padded = np.zeros(shape)
    padded[0] = np.inf
    for row, (shard, figure) in enumerate(zip(shards, figures, strict=True)):
        kept = slice(None) if shard.copies == 1 else int(modules[shard.group][0])
        columns = np.arange(figure.shape[1])[kept]
        padded[:, row, columns] = figure[:, columns]
    time, use = _rest(problem, modules, shards)
    room, topology = problem.budget - use, request.topology
    shelves = Shelves(
        padded[0], padded[1], padded[2], topology.ranks, topology.local_ranks, float(room[0]), float(room[1])
    )
    if best is None:
        start = _spread(np.where(np.isfinite(padded[0]), padded[1], np.inf).min(axis=1), topology.ranks)
    else:
        left = {table: list(ranks) for table, ranks in best.ranks.items()}
        start = np.array([left[shard.table].pop(0) for shard in shards])

    packed = improve_packing(shelves, start, enough - time, watch)
    if packed is None:
        return best
    chosen = list(modules)
    for shard, option in zip(shards, packed.option, strict=True):
        chosen[shard.group] = np.array([option])
    found = _placed(request, problem, tuple(chosen), shards, packed.rank)
    return found if best is None or found.seconds < best.seconds else best


def _spread(sizes: FloatArray, ranks: int) -> IntArray:
    """Ranks by size alone, largest first onto the emptiest."""
    rank, load = np.zeros(len(sizes), dtype=np.int64), np.zeros(ranks)
    for item in np.argsort(-sizes, kind="stable"):
        rank[item] = load.argmin()
        load[rank[item]] += sizes[item]
    return rank


def heaviest_use(request: PlanRequest, problem: PlacementProblem, resource: int) -> float:
    """A bound that no spreading beats: HBM of the rank (0), or memory of the host (1), with the largest shard."""
    single, largest = set(single_rank_tables(request)), 0.0
    for group in problem.groups:
        if group.tables[0] in single:
            copies = request.tables[group.tables[0]].column_shards
            use = np.where(np.isfinite(group.time[0]), (group.hbm, group.host)[resource][0], np.inf)
            hosts = request.topology.local_ranks if resource else 1
            largest = max(largest, float(use.min()) * request.topology.ranks / copies / hosts)
    return largest


def heaviest_shard(request: PlanRequest, problem: PlacementProblem) -> float:
    """A bound that no spreading beats: the rank with the heaviest shard takes at least its time."""
    single, heaviest = set(single_rank_tables(request)), 0.0
    for group in problem.groups:
        if group.tables[0] in single:
            fixed = np.array([module.fixed for module in group.modules])
            copies = request.tables[group.tables[0]].column_shards
            heaviest = max(heaviest, float((group.time[0] + fixed).min()) * request.topology.ranks / copies)
    return heaviest
