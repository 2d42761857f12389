"""Which rows should be hot: those with which the fewest bytes go over the busiest link, and owners have equal loads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer_client.embedding.routing.ownership import as_int64
from trainer_client.embedding.tables.config import RoutedTable
from trainer_client.embedding.tables.hot import distinct_rows

Array = npt.NDArray[Any]

_KEY = 8  # bytes of a key on its way
_LEVELS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class HotCosts:
    """What is expected of a step. A link is a rank's, or a node's if there are several nodes.

    Attributes:
        busiest_link_bytes: Of rows, gradients and keys through the busiest link, in its busier direction.
        all_to_all_bytes: What a rank sends in All2Alls on average; without what hot rows send.
        heaviest_owner: Rows that are asked of the owner with the most, over the mean.
    """

    busiest_link_bytes: float
    all_to_all_bytes: float
    heaviest_owner: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HotChoice:
    """Rows to hold.

    Attributes:
        keys: (k) int64 keys of the hot rows.
        memory_bytes: What they take on each rank during a step.
        without: What is expected of a step in which no row is hot, and each key of a rank is sent once.
        expected: What is expected with them.
    """

    keys: Tensor
    memory_bytes: int
    without: HotCosts
    expected: HotCosts


class _Keys(NamedTuple):
    """(keys,) owners, ascending, and chances that a rank wants a key in a step, descending for each owner."""

    owner: Array
    wanted: Array
    row_bytes: int
    world_size: int
    ranks_per_link: int

    def costs(self, hot: Array) -> HotCosts:
        """Those of a set of hot rows, a mask over the keys."""
        loads, both_ways = self.loads(~hot), 2 * self.row_bytes
        owned = np.bincount(self.owner[hot], minlength=self.world_size)
        by_link, hot_by_link = (each.reshape(-1, self.ranks_per_link).sum(1) for each in (loads, owned))
        size = int(owned.sum())
        # Rows that are not in their owner's stretch go there; from the stretches they go around a ring.
        ends = np.array([0, *accumulate(hot_by_link.tolist())])
        stretches = np.linspace(0, size, len(by_link) + 1)
        staying = np.minimum(ends[1:], stretches[1:]) - np.maximum(ends[:-1], stretches[:-1])
        moved = float((hot_by_link - np.maximum(staying, 0)).max())
        others = (self.world_size - 1) / self.world_size
        asked = (self.world_size - self.ranks_per_link) * float(by_link.max())
        return HotCosts(
            busiest_link_bytes=asked * (both_ways + _KEY) + (size * others + moved) * both_ways,
            all_to_all_bytes=float(loads.sum()) * others * (both_ways + _KEY),
            heaviest_owner=float(loads.max() / loads.mean()) if loads.any() else 1.0,
        )

    def loads(self, which: Array) -> Array:
        """(ranks,) rows that a rank asks of each owner, of those in a mask."""
        return np.bincount(self.owner, self.wanted * which, minlength=self.world_size)

    def candidates(self) -> Iterator[Array]:
        """For each of some loads, the fewest hot rows with which no owner has more: a mask over the keys."""
        every = np.ones(len(self.owner), dtype=bool)
        loads, up_to = self.loads(every), np.cumsum(self.wanted)
        first = np.searchsorted(self.owner, self.owner)
        before = up_to - self.wanted - (up_to - self.wanted)[first]  # of its owner, when it is taken off
        levels = [np.linspace(0, loads.max(), _LEVELS), np.quantile(loads, np.linspace(0, 1, _LEVELS))]
        for level in np.unique(levels):
            yield before < (loads - level)[self.owner] - 1e-9


def choose_hot_rows(
    table: RoutedTable,
    keys: Tensor,
    wanted: Tensor,
    *,
    world_size: int,
    ranks_per_node: int | None = None,
    memory_bytes: float = 1e9,
) -> HotChoice:
    """Chooses the hot rows of a table by bytes, from how many of a rank's batches look its keys up.

    A hot row costs a rank as many bytes as one that every rank asks for in every step, each key sent once. So within
    a node what falls is the load of the heaviest owner; between nodes a row travels once a node instead of once a rank.

    Args:
        table: The table.
        keys: (n) keys, each once, such as `heavy_hitters` finds.
        wanted: (n) share of a rank's batches that look each up, however often.
        world_size: Ranks that share the table.
        ranks_per_node: How many of them a node has; all by default.
        memory_bytes: What hot rows may take on a rank: their values, or gradients, twice.

    Returns:
        The choice; without keys where no set of hot rows lowers the bytes of the busiest link.

    Raises:
        ValueError: If keys and wanted differ in number, a key is there twice or outside of a continuous table, wanted
            are no shares, or the ranks fill no nodes.
    """
    per_node = world_size if ranks_per_node is None else ranks_per_node
    if keys.shape != wanted.shape or keys.dim() != 1:
        raise ValueError(f"keys have shape {tuple(keys.shape)}, wanted {tuple(wanted.shape)}; give one for each key")
    share = wanted.cpu().double().numpy()
    if not ((share >= 0) & (share <= 1)).all():
        raise ValueError(f"wanted is {share.min():g} to {share.max():g}; give shares of batches, from 0 to 1")
    if not 1 <= per_node <= world_size or world_size % per_node:
        raise ValueError(f"ranks_per_node is {ranks_per_node}; give a divisor of world_size {world_size}")
    if distinct_rows(table, keys).numel() < keys.numel():
        raise ValueError("keys has some of them twice; give each once, with the share of batches that look it up")
    wide = as_int64(keys).cpu()
    owner = table.route(wide, world_size)[0].numpy()
    order = np.lexsort((-share, owner))
    row_bytes = table.embedding_dim * table.dtype.itemsize
    every = _Keys(owner[order], share[order], row_bytes, world_size, 1 if per_node == world_size else per_node)
    best = np.zeros(len(order), dtype=bool)
    without = expected = every.costs(best)
    for hot in every.candidates():
        fits = 2 * int(hot.sum()) * row_bytes <= memory_bytes
        if fits and (costs := every.costs(hot)).busiest_link_bytes < expected.busiest_link_bytes:
            best, expected = hot, costs
    return HotChoice(
        keys=wide[torch.from_numpy(order[best])],
        memory_bytes=2 * int(best.sum()) * row_bytes,
        without=without,
        expected=expected,
    )
