"""What a placement comes to: the shards of each rank and host, their time and bytes, and the best placement so far."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from evenkeel.placement.assigning import Places
from evenkeel.placement.building import whole_shards
from evenkeel.placement.layouts import Scope
from evenkeel.placement.limits import Watch
from evenkeel.placement.placement_problem import Group, PlacementProblem
from evenkeel.placement.ranks import Machines, Shards, loads, place_shards
from evenkeel.placement.request import PlanRequest

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
Modules = tuple[IntArray, ...]


@dataclass(frozen=True, slots=True)
class Placed:
    """A solution with ranks for the shards that are not on all of them.

    Attributes:
        modules: For each group, the module of each of its tables.
        places: Of each table that is not everywhere, the rank, or host, of each of its pieces.
        seconds: Time of the slowest rank.
        use: HBM of the fullest rank and memory of the fullest host, in units.
    """

    modules: Modules
    places: Places
    seconds: float
    use: FloatArray


class Incumbent:
    """The best placement so far, and where it came from."""

    def __init__(self, request: PlanRequest, problem: PlacementProblem, watch: Watch) -> None:
        self.request, self.problem, self.watch = request, problem, watch
        scales: dict[int, FloatArray] = {}
        for group in problem.groups:
            if id(group.modules) not in scales:
                scales[id(group.modules)] = _scale(request, group)
        self.whole = [_whole(group, scales[id(group.modules)]) for group in problem.groups]
        topology = request.topology
        self.machines = Machines(topology.ranks, topology.local_ranks, *map(float, problem.budget))
        self.placed = [np.array([m.layout.scope is not Scope.EVERYWHERE for m in g.modules]) for g in problem.groups]
        self.movable = any(bool(mask.any()) for mask in self.placed)
        self.best: Placed | None = None
        self.threshold, self.common = np.inf, 0.0
        self.starts: list[Placed] = []
        self.nearly: list[Placed] = []
        self.unplaced: list[Modules] = []
        self.tried: set[bytes] = set()
        self.prices = np.zeros(2)

    def has(self, enough: float) -> bool:
        """Whether a placement is as fast as that."""
        return self.best is not None and self.best.seconds <= enough

    def offer(self, modules: Modules, places: Places) -> bool:
        """Takes a placement, if it keeps the budgets and is the best so far; whether it keeps them."""
        # Pieces of a table are alike: in the order of their places those of one rank are neighbours.
        placed = self.judge(modules, {table: tuple(sorted(own)) for table, own in places.items()})
        if np.any(placed.use > self.problem.budget + 1e-6) or not self._apart(placed):
            return False
        self.starts.append(placed)
        if self.best is None or placed.seconds < self.best.seconds:
            self.best = placed
            self.common = self.rest(modules)[0]
        return True

    def _apart(self, placed: Placed) -> bool:
        """Whether no two pieces of a table share a rank or host while there are enough: TorchRec wants them apart."""
        for group, mine in zip(self.problem.groups, placed.modules, strict=True):
            for row, table in enumerate(group.tables):
                places, layout = placed.places.get(table, ()), group.modules[int(mine[row])].layout
                most = -(-layout.pieces // layout.places(self.request.topology))
                if places and max(map(places.count, places)) > most:
                    return False
        return True

    def judge(self, modules: Modules, places: Places) -> Placed:
        """What a choice of modules and places comes to."""
        pieces = self.pieces(modules)
        time, use = self.rest(modules)
        where = np.array([place for table in dict.fromkeys(pieces.owner.tolist()) for place in places[table]])
        there = loads(pieces, where.astype(np.int64), self.machines)
        use = use + np.array([there.hbm.max(initial=0.0), there.host.max(initial=0.0)])
        return Placed(modules, places, time + float(there.seconds.max(initial=0.0)), use)

    def pieces(self, modules: Modules) -> Shards:
        """The shards of a choice that are not everywhere, table by table."""
        owner: list[int] = []
        figures: list[FloatArray] = []
        wide: list[bool] = []
        for group, whole, mine in zip(self.problem.groups, self.whole, modules, strict=True):
            for row, module in enumerate(mine.tolist()):
                layout = group.modules[module].layout
                if layout.scope is not Scope.EVERYWHERE:
                    owner += [group.tables[row]] * layout.pieces
                    figures += [whole[:, row, module]] * layout.pieces
                    wide += [layout.scope is Scope.HOST] * layout.pieces
        sizes = np.array(figures).reshape(-1, 3).T
        return Shards(np.array(owner, dtype=np.int64), sizes[0], sizes[1], sizes[2], np.array(wide, dtype=bool))

    def rest(self, modules: Modules) -> tuple[float, FloatArray]:
        """Time and use of everything that is on all ranks, and the fixed time of all openings."""
        total, use = 0.0, np.zeros(2)
        for group, placed, mine in zip(self.problem.groups, self.placed, modules, strict=True):
            rows = np.flatnonzero(~placed[mine])
            opening_of, cost = group.openings()
            total += float(group.time[rows, mine[rows]].sum()) + float(cost[np.unique(opening_of[mine])].sum())
            use += [group.hbm[rows, mine[rows]].sum(), group.host[rows, mine[rows]].sum()]
        return total, use

    def place(self, modules: Modules) -> None:
        """Finds places for the shards of a choice as it is, once."""
        name = b"".join(mine.tobytes() for mine in modules)
        if name in self.tried:
            return
        self.tried.add(name)
        pieces, (_, use) = self.pieces(modules), self.rest(modules)
        room = self.problem.budget - use
        found = place_shards(pieces, replace(self.machines, hbm_room=room[0], host_room=room[1]), self.watch.is_over)
        if found is None or not self.offer(modules, by_table(pieces, found[0])):
            self.unplaced.append(modules)

    def least_shard(self) -> float:
        """A bound that no spreading beats: the rank with the heaviest shard takes at least its time."""
        heaviest = 0.0
        for group, whole in zip(self.problem.groups, self.whole, strict=True):
            fixed = np.array([module.fixed for module in group.modules])
            heaviest = max(heaviest, float((whole[0] + fixed).min(axis=1, initial=np.inf).max(initial=0.0)))
        return heaviest

    def below(self, threshold: float, part: float = 1.0) -> PlacementProblem:
        """The problem without shards that take a rank longer than that, or more than a part of its memory.

        What cannot be put on a rank otherwise keeps its smallest shards.
        """
        dropped = []
        for group, whole, placed in zip(self.problem.groups, self.whole, self.placed, strict=True):
            fixed = np.array([module.fixed for module in group.modules])
            slow = whole[0] + fixed > threshold
            if part < 1:
                slow = placed & (slow | (whole[1] > part * self.problem.budget[0]))
                slow &= (np.isfinite(whole[0]) & ~slow).any(axis=1, keepdims=True)
            dropped.append(slow)
        return self.problem.without(dropped)

    def where(self, placed: Placed) -> IntArray:
        """The place of each shard of `pieces`."""
        owners = dict.fromkeys(self.pieces(placed.modules).owner.tolist())
        return np.array([place for table in owners for place in placed.places[table]], dtype=np.int64)


def _scale(request: PlanRequest, group: Group) -> FloatArray:
    """(3, modules) what to multiply time, HBM and memory by, to have those of a shard."""
    scale: FloatArray = np.array([whole_shards(request, module.layout) for module in group.modules]).T
    return scale


def _whole(group: Group, scale: FloatArray) -> FloatArray:
    """(3, tables, modules) time, HBM and host memory of one shard, or of a table that is everywhere."""
    time = np.where(np.isfinite(group.time), group.time, np.inf)
    return np.stack([time * scale[0], group.hbm * scale[1], group.host * scale[2]])


def by_table(pieces: Shards, where: IntArray) -> Places:
    """The places of the shards of each table, from (shards,) the place of each."""
    found: dict[int, tuple[int, ...]] = {}
    for table, place in zip(pieces.owner.tolist(), where.tolist(), strict=True):
        found[table] = (*found.get(table, ()), place)
    return found


def can_be_placed(problem: PlacementProblem) -> bool:
    """Whether a table of the problem may have shards that are not on all ranks."""
    return any(module.layout.scope is not Scope.EVERYWHERE for group in problem.groups for module in group.modules)


def heaviest_use(request: PlanRequest, problem: PlacementProblem, resource: int) -> float:
    """A bound that no spreading beats: HBM of the rank (0), or memory of the host (1), with the largest shard."""
    largest = 0.0
    for group in problem.groups:
        whole = np.where(np.isfinite(group.time), _whole(group, _scale(request, group))[1 + resource], np.inf)
        largest = max(largest, float(whole.min(axis=1, initial=np.inf).max(initial=0.0)))
    return largest
