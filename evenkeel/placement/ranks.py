"""Placing shards that live on one rank, or on the ranks of one host.

The choice of modes was made for the average rank, which bounds every placement from below. Here shards go to ranks,
those of hosts first, longest first onto the least loaded rank with room, then move or swap while the slowest rank gets
faster. Where memory is too short for that, they first go wherever least is exceeded, and then move or swap off ranks
that hold too much.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

_SLACK = 1e-6
_SPARE = (1e-3, 0.03, np.inf)
"""Time above the mean that a rank may take while shards are made to fit, more where they do not."""
_MENDS = 2
"""Moves a shard, at most, to make all fit."""
_LEAST, _TRIED = 1e-9, 4
_TOLERABLE = 0.003
"""Time above the least that there could be at which no other places are looked for."""
_WIDEST = (64, 1000)
"""Shards of a rank, and of others, that are compared for one move at most; the rest have their turn in the next."""


@dataclass(frozen=True, slots=True)
class Shards:
    """Shards to place.

    Attributes:
        owner: (shards,) table of each shard; shards of one table go to different places while there are enough.
        seconds: (shards,) time a step on the rank, or on each rank of the host, that holds it.
        hbm: (shards,) HBM likewise.
        host: (shards,) memory of the host.
        wide: (shards,) whether it is on all ranks of a host.
    """

    owner: IntArray
    seconds: FloatArray
    hbm: FloatArray
    host: FloatArray
    wide: BoolArray


@dataclass(frozen=True, slots=True)
class Machines:
    """Where shards can go.

    Attributes:
        ranks: Number of ranks.
        local_ranks: Ranks of a host.
        hbm_room: HBM that is left on each rank.
        host_room: Memory that is left on each host; may be infinite.
    """

    ranks: int
    local_ranks: int
    hbm_room: float
    host_room: float

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return self.ranks // self.local_ranks


@dataclass(slots=True)
class Loads:
    """What places hold.

    Attributes:
        seconds: (ranks,) time.
        hbm: (ranks,) HBM.
        host: (hosts,) memory.
    """

    seconds: FloatArray
    hbm: FloatArray
    host: FloatArray


def loads(shards: Shards, where: IntArray, machines: Machines) -> Loads:
    """What ranks and hosts hold, with each shard where it is: a rank, or a host for a wide one."""
    narrow, wide, local = ~shards.wide, shards.wide, machines.local_ranks

    def on_ranks(weight: FloatArray) -> FloatArray:
        alone: FloatArray = np.bincount(where[narrow], weights=weight[narrow], minlength=machines.ranks).astype(float)
        return alone + np.repeat(np.bincount(where[wide], weights=weight[wide], minlength=machines.hosts), local)

    hosts = np.where(wide, where, where // local)
    host: FloatArray = np.bincount(hosts, weights=shards.host, minlength=machines.hosts).astype(float)
    return Loads(on_ranks(shards.seconds), on_ranks(shards.hbm), host)


def place_shards(
    shards: Shards, machines: Machines, is_over: Callable[[], bool] = lambda: False
) -> tuple[IntArray, float] | None:
    """A rank for each shard, or a host for a wide one, and the time of the slowest rank; `None` where they do not fit.

    Args:
        shards: What to place.
        machines: Where.
        is_over: Asked at every move; once true, the shards are left where they are.
    """
    spread = np.where(shards.wide, machines.local_ranks, 1)
    least = max(float((spread * shards.seconds).sum()) / machines.ranks, float(shards.seconds.max(initial=0.0)))
    best: tuple[IntArray, float] | None = None
    for key in (shards.seconds, shards.hbm, shards.host, None):
        if best is not None and (key is not None or best[1] <= least * (1 + _TOLERABLE)):
            continue
        if key is None:
            placed = _mended(shards, machines, least, is_over)
        else:
            placed = _greedy(shards, np.lexsort((np.arange(len(key)), -key, ~shards.wide)), machines)
        if placed is not None:
            where = _improve(shards, placed, machines, is_over)
            slowest = float(loads(shards, where, machines).seconds.max(initial=0.0))
            best = (where, slowest) if best is None or slowest < best[1] else best
    return best


def _greedy(shards: Shards, order: IntArray, machines: Machines) -> IntArray | None:
    ranks, local = machines.ranks, machines.local_ranks
    load, hbm, host = np.zeros(ranks), np.zeros(ranks), np.zeros(machines.hosts)
    where = np.full(len(order), -1, dtype=np.int64)
    taken: dict[int, set[int]] = {}
    for shard in order:
        wide = bool(shards.wide[shard])
        per_place = (len(host), -1) if wide else (ranks, 1)
        mine, held = load.reshape(per_place).max(axis=1), hbm.reshape(per_place).max(axis=1)
        room = host + shards.host[shard] <= machines.host_room + _SLACK
        fits = (held + shards.hbm[shard] <= machines.hbm_room + _SLACK) & (room if wide else np.repeat(room, local))
        own = taken.setdefault(int(shards.owner[shard]), set())
        elsewhere = fits.copy()
        elsewhere[list(own)] = False
        fits = elsewhere if elsewhere.any() else fits
        if not fits.any():
            return None
        score = np.where(fits, mine, np.inf)
        ties = np.flatnonzero(score == score.min())
        place = int(ties[held[ties].argmin()])
        where[shard] = place
        own.add(place)
        part = slice(place * local, (place + 1) * local) if wide else slice(place, place + 1)
        load[part] += shards.seconds[shard]
        hbm[part] += shards.hbm[shard]
        host[place if wide else place // local] += shards.host[shard]
    return where


def _mended(shards: Shards, machines: Machines, least: float, is_over: Callable[[], bool]) -> IntArray | None:
    """Places in which all shards fit, found by way of places in which they do not; `None` where none were found.

    `least` is a time that no placement is below.
    """
    ranks, hosts = machines.ranks, machines.hosts
    spread = np.where(shards.wide, machines.local_ranks, 1)
    if (spread * shards.hbm).sum() > ranks * (machines.hbm_room + _SLACK):
        return None
    if shards.host.sum() > hosts * (machines.host_room + _SLACK):
        return None
    limits = Loads(np.full(ranks, least), np.full(ranks, machines.hbm_room), np.full(hosts, machines.host_room))
    where, spares = _anywhere(shards, machines, limits), iter(_SPARE)
    limits.seconds = np.full(ranks, max(least, _LEAST) * (1 + next(spares)))
    for turn in range(_MENDS * len(where)):
        now = loads(shards, where, machines)
        if (now.hbm <= machines.hbm_room + _SLACK).all() and (now.host <= machines.host_room + _SLACK).all():
            return where
        if is_over():
            return None
        over = _over(now.seconds, limits.seconds) + _over(now.hbm, limits.hbm)
        over += np.repeat(_over(now.host, limits.host), machines.local_ranks)
        worst = [rank for rank in np.argsort(-over, kind="stable")[:_TRIED].tolist() if over[rank] > 0]
        if not any(_ease(shards, where, machines, limits, rank, turn) for rank in worst):
            spare = next(spares, None)
            if spare is None:
                return None
            limits.seconds = np.full(ranks, max(least, _LEAST) * (1 + spare))
    return None


def _over(held: FloatArray, limit: FloatArray) -> FloatArray:
    """How much of a limit is exceeded."""
    exceeded: FloatArray = np.where(np.isfinite(limit), np.maximum(0.0, held - limit) / np.maximum(limit, _LEAST), 0.0)
    return exceeded


def _anywhere(shards: Shards, machines: Machines, limits: Loads) -> IntArray:
    """Largest shards first, each where the fullest of its time, HBM and memory is least full."""
    local = machines.local_ranks
    parts = [np.maximum(limit[0], _LEAST) for limit in (limits.seconds, limits.hbm, limits.host)]
    sizes = np.stack([shards.seconds / parts[0], shards.hbm / parts[1], shards.host / parts[2]])
    held = np.zeros((3, machines.ranks))
    where = np.full(len(shards.owner), -1, dtype=np.int64)
    taken: dict[int, list[int]] = {}
    for shard in np.lexsort((-sizes.max(axis=0), ~shards.wide)):
        wide = bool(shards.wide[shard])
        there = held.reshape(3, -1, local).max(axis=2) if wide else held
        after = (there + sizes[:, shard, None]).max(axis=0)
        own = taken.setdefault(int(shards.owner[shard]), [])
        if len(own) < len(after):
            after[own] = np.inf
        place = int(after.argmin())
        where[shard] = place
        own.append(place)
        first = place * local if wide else place // local * local
        held[:2, first : first + local] += sizes[:2, shard, None] if wide else 0.0
        if not wide:
            held[:2, place] += sizes[:2, shard]
        held[2, first : first + local] += sizes[2, shard]
    return where


def _ease(shards: Shards, where: IntArray, machines: Machines, limits: Loads, rank: int, turn: int) -> bool:
    """The move or swap of a shard of a rank after which least is exceeded; whether one helps."""
    now, local, ranks = loads(shards, where, machines), machines.local_ranks, machines.ranks
    mine = _some(np.flatnonzero((where == rank) & ~shards.wide), _WIDEST[0], turn)
    others = _some(np.flatnonzero((where != rank) & ~shards.wide), _WIDEST[1], turn)
    if not len(mine):
        return False
    target = np.concatenate([np.arange(ranks), where[others]])
    change = np.zeros((len(mine), len(target)))
    for weight, held, limit in ((shards.seconds, now.seconds, limits.seconds), (shards.hbm, now.hbm, limits.hbm)):
        more = weight[mine][:, None] - np.concatenate([np.zeros(ranks), weight[others]])[None, :]
        change += _over(held[rank] - more, limit[rank]) + _over(held[target] + more, limit[target])
        change -= _over(held[rank], limit[rank]) + _over(held[target], limit[target])
    if np.isfinite(machines.host_room):
        mine_host, host = rank // local, target // local
        more = shards.host[mine][:, None] - np.concatenate([np.zeros(ranks), shards.host[others]])[None, :]
        more = more * (host != mine_host)
        held, limit = now.host, limits.host
        change += _over(held[mine_host] - more, limit[mine_host]) + _over(held[host] + more, limit[host])
        change -= _over(held[mine_host], limit[mine_host]) + _over(held[host], limit[host])
    change[:, target == rank] = np.inf
    change[_beside(shards, where, mine, others, rank, ranks)] = np.inf
    row, column = np.unravel_index(int(change.argmin()), change.shape)
    if not change[row, column] < -_LEAST:
        return False
    where[mine[row]] = target[column]
    if column >= ranks:
        where[others[column - ranks]] = rank
    return True


def _some(shards: IntArray, most: int, turn: int) -> IntArray:
    step = -(-len(shards) // most) if len(shards) else 1
    return shards[turn % step :: step]


def _beside(shards: Shards, where: IntArray, mine: IntArray, others: IntArray, rank: int, ranks: int) -> BoolArray:
    """(mine, ranks and others) whether a move or swap puts a shard beside another one of its table."""
    narrow = np.flatnonzero(~shards.wide)
    owners, code, count = np.unique(shards.owner, return_inverse=True, return_counts=True)
    if count.max(initial=1) == 1:
        return np.zeros((len(mine), ranks + len(others)), dtype=bool)
    held = np.zeros((len(owners), ranks), dtype=bool)
    held[code[narrow], where[narrow]] = True
    back = np.concatenate([np.zeros(ranks, dtype=bool), held[code[others], rank]])
    beside: BoolArray = held[code[mine]][:, np.concatenate([np.arange(ranks), where[others]])] | back[None, :]
    return beside


def _improve(shards: Shards, where: IntArray, machines: Machines, is_over: Callable[[], bool]) -> IntArray:
    """Move shards off the slowest rank, or swap them for lighter ones, while that makes the slowest faster."""
    where = where.copy()
    for _ in range(4 * len(where)):
        if is_over() or not (_move_narrow(shards, where, machines) or _move_wide(shards, where, machines)):
            break
    return where


def _move_narrow(shards: Shards, where: IntArray, machines: Machines) -> bool:
    """The best move or swap of a shard that is on the slowest rank alone; whether one helps."""
    now, local, ranks = loads(shards, where, machines), machines.local_ranks, machines.ranks
    slow = int(now.seconds.argmax()) if ranks else 0
    mine = np.flatnonzero((where == slow) & ~shards.wide)
    others = np.flatnonzero((where != slow) & ~shards.wide)
    # Rows: a shard of the slowest rank; columns: nothing to each rank, then a swap with each other shard.
    target = np.concatenate([np.arange(ranks), where[others]])
    back, back_hbm, back_host = (
        np.concatenate([np.zeros(ranks), weight[others]]) for weight in (shards.seconds, shards.hbm, shards.host)
    )
    delta = shards.seconds[mine][:, None] - back[None, :]
    pair = np.maximum(now.seconds[slow] - delta, now.seconds[target][None, :] + delta)
    more = shards.hbm[mine][:, None] - back_hbm[None, :]
    room = machines.hbm_room + _SLACK
    fits = (now.hbm[target][None, :] + more <= room) & (now.hbm[slow] - more <= room)
    more_host = (shards.host[mine][:, None] - back_host[None, :]) * (target // local != slow // local)
    fits &= now.host[target // local][None, :] + more_host <= machines.host_room + _SLACK
    fits &= now.host[slow // local] - more_host <= machines.host_room + _SLACK
    fits &= ~_beside(shards, where, mine, others, slow, ranks)
    pair = np.where(fits & (target != slow)[None, :], pair, np.inf)
    if not pair.size or pair.min() >= now.seconds[slow] * (1 - 1e-9):
        return False
    row, column = np.unravel_index(int(pair.argmin()), pair.shape)
    where[mine[row]] = target[column]
    if column >= ranks:
        where[others[column - ranks]] = slow
    return True


def _move_wide(shards: Shards, where: IntArray, machines: Machines) -> bool:
    """The best move of a wide shard off the host of the slowest rank, or swap with another one; whether one helps."""
    if not shards.wide.any():
        return False
    now, local = loads(shards, where, machines), machines.local_ranks
    host = int(now.seconds.argmax()) // local
    peak, most = now.seconds.reshape(-1, local).max(axis=1), now.hbm.reshape(-1, local).max(axis=1)
    mine = np.flatnonzero(shards.wide & (where == host))
    others = np.flatnonzero(shards.wide & (where != host))
    target = np.concatenate([np.arange(machines.hosts), where[others]])
    back, back_hbm, back_host = (
        np.concatenate([np.zeros(machines.hosts), weight[others]])
        for weight in (shards.seconds, shards.hbm, shards.host)
    )
    delta = shards.seconds[mine][:, None] - back[None, :]
    pair = np.maximum(peak[host] - delta, peak[target][None, :] + delta)
    more, more_host = shards.hbm[mine][:, None] - back_hbm, shards.host[mine][:, None] - back_host
    room, host_room = machines.hbm_room + _SLACK, machines.host_room + _SLACK
    fits = (most[target] + more <= room) & (most[host] - more <= room) & (target != host)
    fits &= (now.host[target] + more_host <= host_room) & (now.host[host] - more_host <= host_room)
    pair = np.where(fits, pair, np.inf)
    if not pair.size or pair.min() >= peak[host] * (1 - 1e-9):
        return False
    row, column = np.unravel_index(int(pair.argmin()), pair.shape)
    where[mine[row]] = target[column]
    if column >= machines.hosts:
        where[others[column - machines.hosts]] = host
    return True
