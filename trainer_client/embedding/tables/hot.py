"""Hot rows: the rows that most lookups want, which every rank holds during a step, so that their lookups stay at home.

A row stays its owner's, with the optimizer's state. In each forward pass all ranks get the values of all hot rows, and
in each backward pass each owner gets the sum of all ranks' gradients. Then its optimizer takes the one step that it
would have taken without: nothing is new to optimizers, clipping, state dicts and checkpoints.

Both ways lead over equal stretches of the hot rows, one a rank: owners send to these what is not their own part, and an
all-gather gives them to all. So no owner sends more than its part to all, however many of the hot rows it owns; and
between nodes each value travels once a node, where an All2All sends it once a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from trainer_client.embedding.routing.ownership import as_int64
from trainer_client.embedding.tables.config import RoutedTable, by_owner, cut
from trainer_client.embedding.tables.exchange import differentiable_all_to_all, there_and_back
from trainer_client.embedding.tables.tables import find

# PyTorch 2.13 has new names for both.
_gather_into: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_sums: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """The hot rows of one exchange in their slots: by owner, then by table, then by key.

    Attributes:
        slots: By table, its keys, ascending, and the slot of each.
        sent: What this rank's tables look up for the slots that it owns.
        counts: By table, how many of these.
        send: Rows of this rank's slots for the stretch of each rank.
        receive: Rows of each owner in this rank's stretch.
        moves: Whether any rank sends to another's stretch.
        stretch: Rows of a stretch; the last ones may be shorter.
        size: Number of slots.
    """

    slots: dict[str, tuple[Tensor, Tensor]]
    sent: Tensor
    counts: dict[str, int]
    send: list[int]
    receive: list[int]
    moves: bool
    stretch: int
    size: int


def distinct_rows(table: RoutedTable, keys: Any) -> Tensor:
    """(n) different int64 keys of a table, ascending.

    Raises:
        ValueError: If these are no integers, or the table is continuous and has no such row.
    """
    try:
        given = torch.as_tensor(keys)
        hot: Tensor = torch.unique(as_int64(given if given.numel() else given.to(torch.int64)).cpu())
    except Exception as problem:
        remedy = "give whole numbers, or leave the table out"
        raise ValueError(f"hot rows of table {table.name}: {problem}; {remedy}") from problem
    if table.resolved_routing.dist_type == "continuous" and hot.numel():
        worst = int(hot[-1] if hot[0] >= 0 else hot[0])
        if not 0 <= worst < table.num_embeddings:
            raise ValueError(
                f"table {table.name}: hot row {worst} is outside of 0 to {table.num_embeddings - 1}; continuous "
                "routing takes row numbers only"
            )
    return hot


class HotRows:
    """The hot rows of a collection; all of its ranks have the same and use them together.

    A table of keys has a row only once its key is looked up in training. Until then such a key goes the ordinary way:
    the owners are asked what they hold in the first lookup, the second, the fourth, the eighth, and so on.
    """

    def __init__(
        self, tables: Sequence[RoutedTable], keys: Any, *, rank: int, world_size: int, group: dist.ProcessGroup | None
    ) -> None:
        """Starts with none of `keys` held, by table in any order; those of rank 0 hold for all. Collective.

        Raises:
            ValueError: If there is no such table, or a continuous one has no such row; on all ranks.
        """
        self._tables = {table.name: table for table in tables}
        self._rank, self._world_size = rank, world_size
        sent: list[Any] = [None]
        if rank == 0:
            try:
                sent = [self._checked(keys)]
            except ValueError as problem:
                sent = [problem]
        if world_size > 1:
            dist.broadcast_object_list(sent, group=group, group_src=0)
        if isinstance(sent[0], ValueError):
            raise sent[0]
        self.keys: dict[str, Tensor] = sent[0]
        self.restart()

    def _checked(self, keys: Any) -> dict[str, Tensor]:
        if not isinstance(keys, Mapping):
            raise ValueError(f"keys is {type(keys).__name__}; give a dict of the keys of each table's hot rows")
        for name in keys:
            if name not in self._tables:
                raise ValueError(f"hot rows are named of table {name!r}; the tables are {', '.join(self._tables)}")
        return {name: distinct_rows(table, keys.get(name, ())) for name, table in self._tables.items()}

    def restart(self) -> None:
        """Forgets what owners hold, as after a checkpoint was loaded. All ranks do it together."""
        self._held = {name: torch.zeros_like(keys, dtype=torch.bool) for name, keys in self.keys.items()}
        self._lookups = 0
        self._layouts: dict[tuple[tuple[str, ...], torch.device], _Layout] = {}

    def refresh(self, parts: Mapping[str, Any], device: torch.device, group: dist.ProcessGroup | None) -> None:
        """Called at the begin of each lookup, before anything can fail on a rank alone. Collective."""
        self._lookups += 1
        if self._lookups & (self._lookups - 1) or all(bool(held.all()) for held in self._held.values()):
            return
        device = next((parameter.device for part in parts.values() for parameter in part.parameters()), device)
        held = torch.cat([self._held_here(name, parts[name], device) for name in self.keys])
        dist.all_reduce(held, dist.ReduceOp.MAX, group=group)
        by_table = cut(held.bool().cpu(), [keys.numel() for keys in self.keys.values()])
        self._held = dict(zip(self.keys, by_table, strict=True))
        self._layouts = {}

    def _held_here(self, name: str, part: Any, device: torch.device) -> Tensor:
        """(keys) 1 for each hot key that this rank owns and holds, as int32."""
        keys = self.keys[name].to(device)
        mine = self._tables[name].route(keys, self._world_size)[0] == self._rank
        if hasattr(part, "find"):  # others than a table of keys hold all rows, or take any when they are asked
            try:
                mine &= part.find(keys) >= 0
            except ValueError:  # which the lookup will raise again, on all ranks
                mine = torch.zeros_like(mine)
        return mine.to(torch.int32)

    def _layout(self, tables: Sequence[RoutedTable], device: torch.device) -> _Layout:
        names = tuple(dict.fromkeys(table.name for table in tables if table.features))
        if (names, device) not in self._layouts:
            self._layouts[names, device] = self._lay_out(names, device)
        return self._layouts[names, device]

    def _lay_out(self, names: tuple[str, ...], device: torch.device) -> _Layout:
        keys = [self.keys[name][self._held[name]] for name in names]
        tables, counts = [self._tables[name] for name in names], [len(hot) for hot in keys]
        hot = by_owner(torch.cat(keys), counts, tables, self._world_size)
        assert hot.permutation is not None
        by_rank = hot.lengths.view(self._world_size, -1)
        size, stretch = len(hot.indices), -(-len(hot.indices) // self._world_size)
        owned = [0, *by_rank.sum(1).cumsum(0).tolist()]
        stretches = [min(at * stretch, size) for at in range(self._world_size + 1)]

        def overlap(of: int, to: int) -> int:
            """Slots that a rank owns in the stretch of a rank."""
            return int(max(0, min(owned[of + 1], stretches[to + 1]) - max(owned[of], stretches[to])))

        ranks, mine = range(self._world_size), self._rank
        slots = zip(keys, cut(hot.permutation, counts), strict=True)
        return _Layout(
            slots={name: (of.to(device), at.to(device)) for name, (of, at) in zip(names, slots, strict=True)},
            sent=hot.indices[owned[mine] : owned[mine + 1]].to(device),
            counts=dict(zip(names, by_rank[mine].tolist(), strict=True)),
            send=[overlap(mine, to) for to in ranks],
            receive=[overlap(of, mine) for of in ranks],
            moves=owned != stretches,
            stretch=stretch,
            size=size,
        )

    def slots(self, keys: Tensor, counts: Sequence[int], tables: Sequence[RoutedTable]) -> Tensor | None:
        """(keys) the slot of each key, so many of each table; -1 of other rows. None where none of these has a slot."""
        layout = self._layout(tables, keys.device)
        if not layout.size:
            return None
        by_table = zip(tables, cut(keys, counts), strict=True)
        return torch.cat([find(each, *layout.slots[table.name]) for table, each in by_table if table.features])

    def with_hot(
        self, keys: Tensor, incoming: list[list[int]], columns: Sequence[RoutedTable]
    ) -> tuple[Tensor, list[list[int]]]:
        """What a rank looks up for others, and how much of each column; behind it the hot rows that it owns."""
        layout = self._layout(columns, keys.device)
        counts = dict(layout.counts)
        return torch.cat([keys, layout.sent]), [*incoming, [counts.pop(table.name, 0) for table in columns]]

    def gather(self, rows: Tensor, columns: Sequence[RoutedTable], group: dist.ProcessGroup | None) -> Tensor:
        """(slots x dim) all hot rows, of the ones that this rank owns; the sum of gradients goes back. Collective."""
        layout = self._layout(columns, rows.device)
        if not layout.size:
            return rows
        if layout.moves:
            rows = differentiable_all_to_all(rows, layout.receive, layout.send, group)
        padded = functional.pad(rows, (0, 0, 0, layout.stretch - len(rows)))

        def gather(stretch: Tensor) -> Tensor:
            stretches = stretch.new_empty(len(stretch) * self._world_size, stretch.shape[1])
            _gather_into(stretches, stretch.contiguous(), group=group)
            return stretches

        def sum_up(stretches: Tensor) -> Tensor:
            stretch = stretches.new_empty(len(stretches) // self._world_size, stretches.shape[1])
            _scatter_sums(stretch, stretches.contiguous(), group=group)
            return stretch

        return there_and_back(padded, gather, sum_up)[: layout.size]
