"""What the lead sends to each rank of a round: one NumPy header, then arrays; written and read here and nowhere else.

    header | figures f8 | extras (pickled) | loads f8 | destinations i4 | batches i4 | cuts i8
           | sources a batch i4 | sources i4 | source counts i4 | source totals i8

Header, figures and extras are the same for all ranks; what follows is each one's own. Each part begins at a multiple of
8 bytes.
"""

from __future__ import annotations

import pickle
from dataclasses import astuple, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.rounds import Figures, RankPlan, RoundPlan
from evenkeel.partitioning.samples import RankSamples
from evenkeel.partitioning.slices import Slice, Slices
from evenkeel.partitioning.speeds import ALL_EQUAL, LearnedSpeeds
from evenkeel.partitioning.splits import read_parts, read_splits
from trainer_client.balancing.decide import Decision
from trainer_client.balancing.report import Mode, Reason, RoundReport

if TYPE_CHECKING:
    from trainer_client.balancing.batches import FlatBatch
    from trainer_client.balancing.contribution import Bytes
    from trainer_client.balancing.costs.fits import Fit

_MODES, _REASONS = tuple(Mode), tuple(Reason)
_COUNTED = ("samples", "moved_samples", "size", "moved_size", "moved_size_between_nodes", "split_samples", "pieces",
            "exchanged", "exchanged_between_nodes")  # fmt: skip
_NUM_FIGURES = len(Figures.__slots__)

HEADER = np.dtype(
    [
        ("size", "<u4"),  # bytes in all
        ("room_up", "<u4"),  # bytes of a contribution that one gather takes, `depth` rounds later
        ("room_down", "<u4"),  # bytes of a directive that one scatter takes, in the next round
        ("mode", "u1"),
        ("reason", "u1"),
        ("last", "u1"),
        ("planned", "u1"),
        ("num_batches", "<u4"),
        ("num_fields", "<u4"),
        ("num_parts", "<u4"),
        ("num_cuts", "<u4"),
        ("num_sources", "<u4"),
        ("extras", "<u4"),  # bytes
        ("world_size", "<u4"),
        ("windowed", "u1"),
        ("padding", "u1", (3,)),
        ("seconds", "<f8"),
        ("wait", "<f8"),
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Notes:
    """What is rarely part of a directive, the same for all ranks.

    Attributes:
        decision: What all ranks do, where header and mode do not tell all of it.
        learned: What is known of the ranks' speeds.
        template: An empty batch of the round's schema, where it is another one than in the round before.
        fit: That learned costs follow from `depth` rounds later on, as a tuple of one or none; None: as before.
        pieces: (pieces, PIECE_WIDTH) of all split samples; None: none is split.
        window: What a state within the window keeps of the round; None: it has one batch.
    """

    decision: Decision | None = None
    learned: LearnedSpeeds = ALL_EQUAL
    template: FlatBatch | None = None
    fit: tuple[Fit | None] | None = None
    pieces: NDArray[np.int64] | None = None
    window: dict[str, Any] | None = None

    def pack(self) -> bytes:
        """As bytes; none where nothing is set."""
        values: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        if not self.learned and not self.learned.delays:
            del values["learned"]
        values = {name: value for name, value in values.items() if value is not None}
        return pickle.dumps(values) if values else b""


NO_NOTES = Notes()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Round:
    """What the lead has made of a round.

    Attributes:
        decision: What all ranks do.
        world_size: How many they are.
        figures: Of each batch of the window that some rank has.
        home_loads: (batches, ranks) float64, as loaded.
        loads: (batches, ranks) float64, as trained.
        plan: Which rank trains which sample; None: every sample stays where and in the batch in which it was loaded.
        slices: The plan's.
        wait_seconds: For which the lead waited for the service.
        notes: What is rarely there.
        room_up: See `HEADER`.
    """

    decision: Decision
    world_size: int
    figures: tuple[Figures, ...] = ()
    home_loads: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 0)))
    loads: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 0)))
    plan: RoundPlan | None = None
    slices: Slices | None = None
    wait_seconds: float = 0.0
    notes: Notes = NO_NOTES
    room_up: int = 0

    def pack(self) -> Bytes:
        """(ranks, width) the directives of all ranks; `set_room` tells them of the next scatter."""
        decision, plan, slices = self.decision, self.plan, self.slices
        notes = self.notes
        if decision != Decision(mode=decision.mode, reason=decision.reason, last=decision.last) or decision.error:
            notes = replace(notes, decision=decision)
        extras = notes.pack()
        rows = _Rows(self.world_size)
        header = rows.header
        header["room_up"] = self.room_up
        header["mode"], header["reason"] = _MODES.index(decision.mode), _REASONS.index(decision.reason)
        header["last"], header["world_size"], header["extras"] = decision.last, self.world_size, len(extras)
        header["num_batches"], header["wait"] = len(self.figures), self.wait_seconds
        rows.add_common(np.array([astuple(one) for one in self.figures], "<f8").tobytes())
        rows.add_common(extras)
        rows.add(np.stack([self.home_loads.T, self.loads.T], axis=2).astype("<f8", copy=False))
        if plan is not None and slices is not None:
            begins, source_begins = slices.home_begin, slices.source_begin[:: slices.num_batches]
            header["planned"], header["seconds"] = True, plan.seconds
            header["windowed"] = plan.steps is not None
            header["num_fields"] = slices.source_totals.shape[1]
            header["num_parts"], header["num_sources"] = np.diff(begins), np.diff(source_begins)
            rows.add_ragged(slices.destinations, begins)
            rows.add_ragged(slices.steps if slices.steps is not None else np.zeros(0, "<i4"), begins)
            if plan.parts is not None:
                further = plan.parts.begins > 0
                cuts = np.stack([plan.parts.samples[further], plan.parts.begins[further]], axis=1)
                cut_begins = np.concatenate([[0], np.cumsum(further)])[begins]
                header["num_cuts"] = np.diff(cut_begins)
                rows.add_ragged(cuts, cut_begins)
            rows.add(np.diff(slices.source_begin).astype("<i4").reshape(self.world_size, -1))
            for array in (slices.sources, slices.source_counts, slices.source_totals):
                rows.add_ragged(array, source_begins)
        return rows.table()


def set_room(table: Bytes, room: int) -> None:
    """Writes into packed directives how many bytes the next scatter takes."""
    table[:, 8:12].view("<u4")[:] = room


class _Rows:
    """A table of bytes, a row for each rank, filled part by part without a loop over ranks."""

    def __init__(self, num_ranks: int) -> None:
        self.header = np.zeros(num_ranks, HEADER)
        self._ends = np.full(num_ranks, HEADER.itemsize, np.int64)
        self._parts: list[tuple[NDArray[np.uint32], NDArray[np.int64], NDArray[np.int64]]] = []
        self._common: list[tuple[int, bytes]] = []

    def add_common(self, data: bytes) -> None:
        """The same for all; before all others."""
        self._common.append((int(self._ends[0]), data))
        self._ends += len(data) + -len(data) % 8

    def add(self, array: NDArray[Any]) -> None:
        """(ranks, …) an element of the first dimension to each."""
        self.add_ragged(array, np.arange(len(array) + 1))

    def add_ragged(self, array: NDArray[Any], begins: NDArray[np.int64]) -> None:
        """Rows of an array to each rank: from `begins[rank]` to before `begins[rank + 1]`. Nothing of an empty one."""
        if not array.size:
            return
        words = np.ascontiguousarray(array).reshape(-1).view("<u4")
        begins = begins.astype(np.int64) * (words.size // len(array))
        self._parts.append((words, begins, self._ends // 4))
        sizes = np.diff(begins) * 4
        self._ends = self._ends + sizes + -sizes % 8

    def table(self) -> Bytes:
        """(ranks, width) all of it."""
        self.header["size"] = self._ends
        width = int(self._ends.max())
        table = np.zeros((len(self.header), width), np.uint8)
        table[:, : HEADER.itemsize] = self.header.view(np.uint8).reshape(len(self.header), -1)
        for at, data in self._common:
            table[:, at : at + len(data)] = np.frombuffer(data, np.uint8)
        words, rows = table.reshape(-1).view("<u4"), np.arange(len(self.header)) * (width // 4)
        for part, begins, ends in self._parts:
            shifts = np.repeat(rows + ends - begins[:-1], np.diff(begins))
            words[shifts + np.arange(part.size)] = part
        return table


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Directive:
    """What one rank does in a round.

    Attributes:
        decision: What all ranks do.
        plan: Which of its own samples go where, and in which batch of the window.
        reports: One per batch of the window; none where the round does not take place.
        notes: What is rarely there.
        room_up: See `HEADER`.
        room_down: See `HEADER`.
    """

    decision: Decision
    plan: RankPlan
    reports: tuple[RoundReport, ...] = ()
    notes: Notes = NO_NOTES
    room_up: int = 0
    room_down: int = 0

    @property
    def ended(self) -> bool:
        """Whether the pass is over on all ranks, and the round does not take place."""
        return self.decision.mode is Mode.END

    @property
    def moves(self) -> bool:
        """Whether any sample of any rank moves, so that all ranks take part in an exchange."""
        return any(figures.moved_samples > 0 for figures in self.plan.figures)

    @classmethod
    def of_end(cls, decision: Decision) -> Directive:
        """That of a round which does not take place, as its pass has ended."""
        return cls(decision=decision, plan=RankPlan(steps=None, slices=()))


def read_directive(row: Bytes, *, number: int, rank: int, samples: RankSamples) -> Directive:
    """Reads a rank's row of `Round.pack`.

    Args:
        row: Its bytes; behind them anything.
        number: Of the round.
        rank: The rank.
        samples: That it has contributed.
    """
    header = row[: HEADER.itemsize].view(HEADER)[0]
    reader = _Reader(row)
    count, world_size = int(header["num_batches"]), int(header["world_size"])
    figures = tuple(_figures(values) for values in reader.take("<f8", count, _NUM_FIGURES).tolist())
    packed = reader.take("u1", int(header["extras"]))
    notes = Notes(**pickle.loads(packed.tobytes())) if packed.size else NO_NOTES
    mode, reason = _MODES[header["mode"]], _REASONS[header["reason"]]
    decision = notes.decision or Decision(mode=mode, reason=reason, last=bool(header["last"]))
    loads = reader.take("<f8", count, 2).tolist()
    planned = bool(header["planned"])
    plan = _plan(header, reader, rank, figures, notes) if planned else RankPlan.staying(rank, samples, count)
    reports = tuple(
        _report(number, batch, decision, one, home_load=home, own_load=own, world_size=world_size, plan=plan,
                learned=notes.learned, wait=float(header["wait"]), seconds=float(header["seconds"]))
        for batch, (one, (home, own)) in enumerate(zip(figures, loads, strict=True))
    )  # fmt: skip
    return Directive(
        decision=decision, plan=plan, reports=reports, notes=notes, room_up=int(header["room_up"]),
        room_down=int(header["room_down"]),
    )  # fmt: skip


class _Reader:
    """Takes one part after another out of a row."""

    def __init__(self, row: Bytes) -> None:
        self._row, self._at = row, HEADER.itemsize

    def take(self, dtype: str, *shape: int) -> NDArray[Any]:
        size = np.dtype(dtype).itemsize * int(np.prod(shape))
        begin, self._at = self._at, self._at + size + -size % 8
        return self._row[begin : begin + size].view(dtype).reshape(shape)


def _plan(header: Any, reader: _Reader, rank: int, figures: tuple[Figures, ...], notes: Notes) -> RankPlan:
    num_parts, num_cuts, num_sources = (int(header[name]) for name in ("num_parts", "num_cuts", "num_sources"))
    count = len(figures)
    destinations = reader.take("<i4", num_parts)
    steps = reader.take("<i4", num_parts) if header["windowed"] else None
    cuts = reader.take("<i8", num_cuts, 2)
    ends = np.cumsum(reader.take("<i4", count)).tolist()
    sources, counts = reader.take("<i4", num_sources), reader.take("<i4", num_sources)
    totals = reader.take("<i8", num_sources, int(header["num_fields"]))
    slices = tuple(
        Slice(
            rank=rank, destinations=destinations if steps is None else destinations[steps == batch],
            sources=sources[begin:end], source_counts=counts[begin:end], source_totals=totals[begin:end],
        )
        for batch, (begin, end) in enumerate(zip([0, *ends], ends, strict=False))
    )  # fmt: skip
    plan = RankPlan(steps=steps, slices=slices, figures=figures)
    if notes.pieces is None:
        return plan
    steps, parts = read_parts(cuts, num_parts - num_cuts, steps, count)
    return replace(plan, steps=steps, cuts=parts, splits=read_splits(notes.pieces, count))


def _figures(values: list[float]) -> Figures:
    figures = dict(zip(Figures.__slots__, values, strict=True))
    return Figures(**{name: int(value) if name in _COUNTED else value for name, value in figures.items()})  # type: ignore[arg-type]


def _report(
    number: int,
    batch: int,
    decision: Decision,
    figures: Figures,
    *,
    home_load: float,
    own_load: float,
    world_size: int,
    plan: RankPlan,
    learned: LearnedSpeeds,
    wait: float,
    seconds: float,
) -> RoundReport:
    return RoundReport(
        round=number, batch=batch, mode=decision.mode, reason=decision.reason, ranks=decision.ranks,
        world_size=world_size, home_load=home_load, own_load=own_load, mean_load=figures.mean_load,
        max_load_before=figures.max_load_before, max_load=figures.max_load_after,
        imbalance_before=figures.imbalance_before, imbalance=figures.imbalance_after, lower_bound=figures.lower_bound,
        samples=figures.samples, own_samples=int(plan.slices[batch].source_counts.sum()),
        moved_samples=figures.moved_samples, size=figures.size, moved_size=figures.moved_size, wait_seconds=wait,
        partition_seconds=seconds, split_samples=figures.split_samples, pieces=figures.pieces,
        exchanged=figures.exchanged, max_load_whole=figures.max_load_whole, learned=learned,
    )  # fmt: skip
