"""What the lead sends to each rank of a round: one NumPy header, then arrays; written and read here and nowhere else.

    header | broadcast (pickled) | loads f8 | destinations i4 | batches i4 | begins of parts i8 | sources a batch i4
           | sources i4 | source counts i4 | source totals i8

The broadcast is the same for all ranks; what follows is each one's own. Each part begins at a multiple of 8 bytes.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.rounds import Figures, RankPlan, RoundPlan
from evenkeel.partitioning.slices import Slice, Slices
from evenkeel.partitioning.speeds import ALL_EQUAL, LearnedSpeeds
from evenkeel.partitioning.splits import read_parts, read_splits
from trainer_client.balancing.contribution import pack_changed
from trainer_client.balancing.decide import Decision
from trainer_client.balancing.groups import Bytes
from trainer_client.balancing.report import Mode, RoundReport

if TYPE_CHECKING:
    from trainer_client.balancing.batches import FlatBatch
    from trainer_client.balancing.costs.fitting import Fit

END = Decision(mode=Mode.END)
_F8, _I4, _I8, _U1 = (np.dtype(code) for code in ("<f8", "<i4", "<i8", "u1"))

_HEADER = np.dtype(
    [
        ("size", "<u4"),  # bytes in all
        ("broadcast", "<u4"),  # bytes
        ("num_parts", "<u4"),
        ("num_sources", "<u4"),
    ]
)


@dataclass(slots=True, kw_only=True, eq=False)
class Broadcast:
    """What a directive says to all ranks alike."""

    decision: Decision = END
    world_size: int = 1
    figures: tuple[Figures, ...] = ()  # of each batch of the round that some rank has
    rebatched: bool = False  # samples may change their batch
    num_fields: int = 0  # with lengths
    partition_seconds: float = 0.0
    wait_seconds: float = 0.0  # for which the lead waited for the service
    learned: LearnedSpeeds = ALL_EQUAL  # what is known of the ranks' speeds
    template: FlatBatch | None = None  # an empty batch of the round's schema, where it has changed
    fit: tuple[Fit | None] | None = None  # that learned costs follow from `depth` rounds on; None: as before
    pieces: NDArray[np.int64] | None = None  # (pieces, PIECE_WIDTH) of all split samples
    for_states: dict[str, Any] | None = None  # what a state keeps that is taken between the batches of the round


NO_BROADCAST = Broadcast()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Directive:
    """What one rank does in a round."""

    decision: Decision  # what all ranks do
    plan: RankPlan = field(default_factory=lambda: RankPlan(steps=None, slices=()))  # where its own samples go
    reports: tuple[RoundReport, ...] = ()  # one per batch; none where the round does not take place
    template: FlatBatch | None = None  # an empty batch of the round's schema
    broadcast: Broadcast = NO_BROADCAST

    @property
    def ended(self) -> bool:
        """Whether the pass is over on all ranks, and the round does not take place."""
        return self.decision.mode is Mode.END

    @property
    def moves(self) -> bool:
        """Whether any sample of any rank moves, so that all ranks take part in an exchange."""
        return any(report.moved_samples > 0 for report in self.reports)

    @property
    def batches(self) -> tuple[int, ...]:
        """The batches of the round that are trained, in order."""
        batches = self.decision.batches
        return tuple(range(len(self.reports))) if batches is None else batches


def pack_directives(broadcast: Broadcast, *, plan: RoundPlan | None = None, slices: Slices | None = None) -> Bytes:
    """(ranks, width) the directives of all ranks; a round without a plan does not take place."""
    if plan is None or slices is None:
        return _Rows(broadcast.world_size, pack_changed(broadcast)).table()
    broadcast = replace(
        broadcast, rebatched=plan.steps is not None, partition_seconds=plan.seconds, figures=plan.batches,
        num_fields=slices.source_totals.shape[1],
    )  # fmt: skip
    rows = _Rows(broadcast.world_size, pack_changed(broadcast))
    begins, source_begins = slices.home_begin, slices.source_begin[:: slices.num_batches]
    rows.header["num_parts"], rows.header["num_sources"] = _sizes(begins), _sizes(source_begins)
    rows.add(np.stack([plan.loads_before.T, plan.loads_after.T], axis=2).astype("<f8", copy=False))
    rows.add(slices.destinations, begins)
    rows.add(slices.steps if slices.steps is not None else np.zeros(0, "<i4"), begins)
    if plan.parts is not None:
        rows.add(plan.parts.begins, begins)
    rows.add(_sizes(slices.source_begin).astype("<i4").reshape(broadcast.world_size, -1))
    for array in (slices.sources, slices.source_counts, slices.source_totals):
        rows.add(array, source_begins)
    return rows.table()


def _sizes(begins: NDArray[np.int64]) -> NDArray[np.int64]:
    """What `np.diff` gives, of which a round of few ranks would notice the calls."""
    sizes: NDArray[np.int64] = begins[1:] - begins[:-1]
    return sizes


class _Rows:
    """A table of bytes, a row for each rank, filled part by part without a loop over ranks."""

    def __init__(self, num_ranks: int, broadcast: bytes) -> None:
        self.header = np.zeros(num_ranks, _HEADER)
        self.header["broadcast"] = len(broadcast)
        self._broadcast = np.frombuffer(broadcast, np.uint8)
        self._ends = np.full(num_ranks, _HEADER.itemsize + len(broadcast) + -len(broadcast) % 8, np.int64)
        self._parts: list[tuple[NDArray[np.uint32], NDArray[np.int64], NDArray[np.int64]]] = []

    def add(self, array: NDArray[Any], begins: NDArray[np.int64] | None = None) -> None:
        """Rows of an array to each rank, from `begins[rank]` to before `begins[rank + 1]`; by default one each."""
        if not array.size:
            return
        words = np.ascontiguousarray(array).reshape(-1).view("<u4")
        begins = np.arange(len(array) + 1) if begins is None else begins.astype(np.int64)
        begins = begins * (words.size // len(array))
        self._parts.append((words, begins, self._ends // 4))
        sizes = _sizes(begins) * 4
        self._ends = self._ends + sizes + -sizes % 8

    def table(self) -> Bytes:
        """(ranks, width) all of it."""
        self.header["size"] = self._ends
        width = int(self._ends.max())
        table = np.zeros((len(self.header), width), np.uint8)
        table[:, : _HEADER.itemsize] = self.header.view(np.uint8).reshape(len(self.header), -1)
        table[:, _HEADER.itemsize : _HEADER.itemsize + len(self._broadcast)] = self._broadcast
        words, rows = table.reshape(-1).view("<u4"), np.arange(len(self.header)) * (width // 4)
        for part, begins, ends in self._parts:
            shifts = np.repeat(rows + ends - begins[:-1], _sizes(begins))
            words[shifts + np.arange(part.size)] = part
        return table


def read_directive(row: Bytes, *, number: int, rank: int, template: FlatBatch | None = None) -> Directive:
    """Reads what `pack_directives` made for a rank of a round, behind which anything may follow.

    `template` is an empty batch of the round before.
    """
    _, num_broadcast, num_parts, num_sources = row[: _HEADER.itemsize].view("<u4").tolist()
    at = _HEADER.itemsize

    def take(dtype: np.dtype[Any], *shape: int) -> NDArray[Any]:
        nonlocal at
        size = dtype.itemsize * math.prod(shape)
        begin, at = at, at + size + -size % 8
        return row[begin : begin + size].view(dtype).reshape(shape)

    packed = take(_U1, num_broadcast)
    broadcast = Broadcast(**pickle.loads(packed.tobytes())) if num_broadcast else NO_BROADCAST
    decision, figures, count = broadcast.decision, broadcast.figures, len(broadcast.figures)
    loads = take(_F8, count, 2).tolist()
    destinations = take(_I4, num_parts)
    steps = take(_I4, num_parts) if broadcast.rebatched else None
    begins = take(_I8, num_parts if broadcast.pieces is not None else 0)
    ends = np.cumsum(take(_I4, count)).tolist()
    sources, counts = take(_I4, num_sources), take(_I4, num_sources)
    totals = take(_I8, num_sources, broadcast.num_fields)
    slices = tuple(
        Slice(
            rank=rank, destinations=destinations if steps is None else destinations[steps == batch],
            sources=sources[begin:end], source_counts=counts[begin:end], source_totals=totals[begin:end],
        )
        for batch, (begin, end) in enumerate(pairwise([0, *ends]))
    )  # fmt: skip
    plan = RankPlan(steps=steps, slices=slices)
    splits: Sequence[Any] = [()] * count
    if broadcast.pieces is not None:
        steps, parts = read_parts(begins, steps, count)
        plan, splits = replace(plan, steps=steps, cuts=parts), read_splits(broadcast.pieces, count)
    reports = tuple(
        RoundReport(
            round=number, batch=batch, mode=decision.mode, reason=decision.reason, ranks=decision.ranks,
            world_size=broadcast.world_size, home_load=home_load, own_load=own_load,
            own_samples=int(plan.slices[batch].source_counts.sum()), wait_seconds=broadcast.wait_seconds,
            partition_seconds=broadcast.partition_seconds, learned=broadcast.learned, splits=splits[batch],
            **vars(one),
        )
        for batch, (one, (home_load, own_load)) in enumerate(zip(figures, loads, strict=True))
    )  # fmt: skip
    return Directive(
        decision=decision, plan=plan, reports=reports, template=broadcast.template or template, broadcast=broadcast
    )
