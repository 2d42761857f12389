"""Placing shards that live on one rank: tables that are not row-wise.

The choice of modes was made for the average rank, which bounds every placement from below. Here shards go to ranks,
longest first onto the least loaded rank with room, then move or swap while the slowest rank gets faster.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Shards:
    """Shards to place.

    Attributes:
        owner: (shards,) table of each shard; shards of one table go to different ranks while there are enough.
        seconds: (shards,) time a step on the rank that holds it.
        hbm: (shards,) HBM.
        host: (shards,) host memory.
    """

    owner: IntArray
    seconds: FloatArray
    hbm: FloatArray
    host: FloatArray


def place_shards(
    shards: Shards,
    ranks: int,
    local_ranks: int,
    hbm_room: float,
    host_room: float,
    is_over: Callable[[], bool] = lambda: False,
) -> tuple[IntArray, float] | None:
    """A rank for each shard, and the time of the slowest rank; `None` where the shards do not fit this way.

    Args:
        shards: What to place.
        ranks: Number of ranks.
        local_ranks: Ranks of a host.
        hbm_room: HBM that is left on each rank.
        host_room: Memory that is left on each host; may be infinite.
        is_over: Asked at every move; once true, the ranks are left as they are.
    """
    for key in (shards.seconds, shards.hbm, shards.host):
        placed = _greedy(shards, np.lexsort((np.arange(len(key)), -key)), ranks, local_ranks, hbm_room, host_room)
        if placed is not None:
            where = _improve(shards, placed, ranks, local_ranks, hbm_room, host_room, is_over)
            return where, float(np.bincount(where, weights=shards.seconds, minlength=ranks).max())
    return None


def _greedy(
    shards: Shards, order: IntArray, ranks: int, local_ranks: int, hbm_room: float, host_room: float
) -> IntArray | None:
    load, hbm = np.zeros(ranks), np.zeros(ranks)
    host = np.zeros(ranks // local_ranks)
    where = np.full(len(order), -1, dtype=np.int64)
    taken: dict[int, set[int]] = {}
    for shard in order:
        fits = hbm + shards.hbm[shard] <= hbm_room + 1e-6
        fits &= np.repeat(host + shards.host[shard] <= host_room + 1e-6, local_ranks)
        own = taken.setdefault(int(shards.owner[shard]), set())
        elsewhere = fits.copy()
        elsewhere[list(own)] = False
        fits = elsewhere if elsewhere.any() else fits
        if not fits.any():
            return None
        score = np.where(fits, load, np.inf)
        ties = np.flatnonzero(score == score.min())
        rank = int(ties[hbm[ties].argmin()])
        where[shard] = rank
        own.add(rank)
        load[rank] += shards.seconds[shard]
        hbm[rank] += shards.hbm[shard]
        host[rank // local_ranks] += shards.host[shard]
    return where


def _improve(
    shards: Shards,
    where: IntArray,
    ranks: int,
    local_ranks: int,
    hbm_room: float,
    host_room: float,
    is_over: Callable[[], bool],
) -> IntArray:
    """Move a shard off the slowest rank, or swap it for a lighter one, while that makes the slowest faster."""
    where = where.copy()
    for _ in range(4 * len(where)):
        if is_over():
            break
        load = np.bincount(where, weights=shards.seconds, minlength=ranks)
        hbm = np.bincount(where, weights=shards.hbm, minlength=ranks)
        host = np.bincount(where // local_ranks, weights=shards.host, minlength=ranks // local_ranks)
        slow = int(load.argmax())
        mine = np.flatnonzero(where == slow)
        others = np.flatnonzero(where != slow)
        # Rows: a shard of the slowest rank; columns: nothing to each rank, then a swap with each other shard.
        target = np.concatenate([np.arange(ranks), where[others]])
        back = np.concatenate([np.zeros(ranks), shards.seconds[others]])
        back_hbm = np.concatenate([np.zeros(ranks), shards.hbm[others]])
        back_host = np.concatenate([np.zeros(ranks), shards.host[others]])
        delta = shards.seconds[mine][:, None] - back[None, :]
        pair = np.maximum(load[slow] - delta, load[target][None, :] + delta)
        more = shards.hbm[mine][:, None] - back_hbm[None, :]
        fits = (hbm[target][None, :] + more <= hbm_room + 1e-6) & (hbm[slow] - more <= hbm_room + 1e-6)
        more_host = (shards.host[mine][:, None] - back_host[None, :]) * (target // local_ranks != slow // local_ranks)
        fits &= host[target // local_ranks][None, :] + more_host <= host_room + 1e-6
        fits &= host[slow // local_ranks] - more_host <= host_room + 1e-6
        pair = np.where(fits & (target != slow)[None, :], pair, np.inf)
        if not pair.size or pair.min() >= load[slow] * (1 - 1e-9):
            return where
        row, column = np.unravel_index(int(pair.argmin()), pair.shape)
        where[mine[row]] = target[column]
        if column >= ranks:
            where[others[column - ranks]] = slow
    return where
