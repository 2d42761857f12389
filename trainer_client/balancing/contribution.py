"""What a rank says in a round: one NumPy header, then arrays; written and read here and nowhere else.

    header | batch_sizes u4 | costs i8 or f8 | sizes i8 | memory f8 | divisible f8 | lengths u4 | extras (pickled)

Each part begins at a multiple of 8 bytes. `Extras` is what is rarely there. Ranks that train copies of a batch (peers)
send the header alone, by which the lead sees that their copies are the same.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.samples import RankSamples, RoundSamples
from evenkeel.partitioning.splits import WIDTH

if TYPE_CHECKING:
    from trainer_client.balancing.batches import FlatBatch
    from trainer_client.balancing.batches.shared import Said
    from trainer_client.balancing.batches.structure import Schema
    from trainer_client.balancing.resume import Resumed

Bytes = NDArray[np.uint8]

HEADER = np.dtype(
    [
        ("size", "<u4"),  # bytes in all
        ("state", "u1"),
        ("flags", "u1"),
        ("num_batches", "<u2"),
        ("num_samples", "<u4"),
        ("num_fields", "<u4"),
        ("num_divisible", "<u4"),
        ("extras", "<u4"),  # bytes
        ("schema", "<u8"),
        ("shared", "<u8"),
        ("copy", "<u8"),
        ("taken", "<i8"),
        ("measured", "<f8", (5,)),
    ]
)
_FLOAT, _MEMORY, DROP_LAST, INVALID, OUT_OF_TURN = 1, 2, 4, 8, 16  # flags


class State(IntEnum):
    """Where a rank is in its loop."""

    DATA = 0
    EXHAUSTED = 1  # its data has ended; it takes part as long as others have some
    LEFT = 2  # it has left its loop
    NOTHING = 3  # its pass is over: a round that was under way when all heard of the end


class Measure(NamedTuple):
    """Batches of a rank in the mean.

    Attributes:
        load: Of a batch.
        seconds: That its computation took, without waiting for other ranks; 0: nothing was measured.
        late: From the loop's request for the batch until the device had it, without the waits for other ranks.
        loading: Seconds of it in which the host waited for the wrapped loader.
        loop: From the end of the step before until that request.
    """

    load: float = 0.0
    seconds: float = 0.0
    late: float = 0.0
    loading: float = 0.0
    loop: float = 0.0


NO_MEASURE = Measure()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Extras:
    """What is rarely part of a contribution.

    Attributes:
        template: An empty batch of the round's schema, where the ranks have not heard of that.
        shared: What the shared values of the batch are; ().
        problem: Why the costs cannot be used, or why the rank has left; empty: no reason.
        resumed: From where it goes on, in the first round of a pass.
        term_names: Of a learned cost's terms; ().
        term_rows: (batches, terms + 1) the terms of batches and the milliseconds that they took; None.
    """

    template: FlatBatch | None = None
    shared: Said = ()
    problem: str = ""
    resumed: Resumed | None = None
    term_names: tuple[str, ...] = ()
    term_rows: NDArray[np.float64] | None = None

    def pack(self) -> bytes:
        """As bytes; none where nothing is set."""
        values: dict[str, Any] = {one.name: getattr(self, one.name) for one in fields(self)}
        empty = {
            name for name, value in values.items() if value is None or (isinstance(value, str | tuple) and not value)
        }
        values = {name: value for name, value in values.items() if name not in empty}
        return pickle.dumps(values) if values else b""


NO_EXTRAS = Extras()
NO_SAMPLES = RankSamples(
    costs=np.zeros(0, np.int64), lengths=np.zeros((0, 0), np.int64), sizes=np.zeros(0, np.int64), batch_sizes=()
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Contribution:
    """What a rank says in a round.

    Attributes:
        state: Where it is in its loop.
        samples: Of its batches.
        schema: 64 bits of the hash of their schema; 0: it has none.
        shared: 64 bits of what their shared values are; 0: there are none.
        copy: 64 bits of what peers must have alike; 0: there are no peers.
        drop_last: A global batch with too few samples for all ranks is dropped.
        invalid: Its costs cannot be used.
        taken: With `State.LEFT`, batches that the loop had got.
        out_of_turn: With `State.LEFT`, it took batches in another order than it submitted them.
        measured: Its batches since the last contribution.
        extras: What is rarely there.
    """

    state: State = State.DATA
    samples: RankSamples = NO_SAMPLES
    schema: int = 0
    shared: int = 0
    copy: int = 0
    drop_last: bool = False
    invalid: bool = False
    taken: int = 0
    out_of_turn: bool = False
    measured: Measure = NO_MEASURE
    extras: Extras = field(default=NO_EXTRAS)

    def pack(self, *, arrays: bool = True) -> Bytes:
        """As bytes.

        Args:
            arrays: Also the arrays and extras; without, the header alone, as peers send it.
        """
        samples, header = self.samples, np.zeros((), HEADER)
        is_float = samples.costs.dtype.kind == "f"
        flags = _FLOAT * is_float | _MEMORY * (samples.memory is not None) | DROP_LAST * self.drop_last
        header["state"], header["num_samples"] = self.state, len(samples)
        header["flags"] = flags | INVALID * self.invalid | OUT_OF_TURN * self.out_of_turn
        header["schema"], header["shared"], header["copy"] = self.schema, self.shared, self.copy
        header["taken"], header["measured"] = self.taken, self.measured
        parts: list[bytes] = []
        if arrays:
            extras = self.extras.pack()
            header["num_batches"], header["num_fields"] = len(samples.batch_sizes), samples.lengths.shape[1]
            header["num_divisible"] = 0 if samples.divisible is None else len(samples.divisible)
            header["extras"] = len(extras)
            parts = [
                np.array(samples.batch_sizes, "<u4").tobytes(),
                samples.costs.astype("<f8" if is_float else "<i8", copy=False).tobytes(),
                samples.moving_sizes.astype("<i8", copy=False).tobytes(),
                b"" if samples.memory is None else samples.memory.astype("<f8", copy=False).tobytes(),
                b"" if samples.divisible is None else samples.divisible.astype("<f8", copy=False).tobytes(),
                samples.lengths.astype("<u4").tobytes(),
                extras,
            ]
        body = b"".join(part + bytes(-len(part) % 8) for part in parts)
        header["size"] = HEADER.itemsize + len(body)
        return np.frombuffer(header.tobytes() + body, np.uint8)


def schema_number(schema: Schema) -> int:
    """64 bits that name what batches look like."""
    return int.from_bytes(schema.hash[:8], "little")


class Contributions:
    """The contributions of all ranks to a round.

    Attributes:
        headers: (ranks,) of `HEADER`, of the ranks that balance together.
        copies: (ranks, peers) of `HEADER`, of all that train the same batches; the first column are `headers`.
    """

    def __init__(self, table: Bytes, num_peers: int = 1) -> None:
        """Reads what ranks have packed.

        Args:
            table: (ranks × peers, width) their bytes, peers of a rank side by side; behind a contribution anything.
            num_peers: Ranks that train the same batches.
        """
        self._table = table[::num_peers]
        headers = np.ascontiguousarray(table[:, : HEADER.itemsize]).view(HEADER)[:, 0]
        self.copies = headers.reshape(-1, num_peers)
        self.headers = self.copies[:, 0]
        count = {name: self.headers[name].astype(np.int64) for name in ("num_batches", "num_samples", "num_fields")}
        n = count["num_samples"]
        sizes = (
            4 * count["num_batches"], 8 * n, 8 * n, 8 * n * self.flag(_MEMORY),
            8 * WIDTH * self.headers["num_divisible"].astype(np.int64), 4 * n * count["num_fields"],
            self.headers["extras"].astype(np.int64),
        )  # fmt: skip
        self._ends, self._begins, at = {}, {}, np.full(len(n), HEADER.itemsize, np.int64)
        for name, size in zip(_PARTS, sizes, strict=True):
            self._begins[name], self._ends[name] = at, at + size
            at = at + size + -size % 8

    @classmethod
    def of(cls, contributions: Sequence[Contribution]) -> Contributions:
        """Those of ranks without peers."""
        return cls(stacked([one.pack() for one in contributions]))

    def __len__(self) -> int:
        return len(self.headers)

    def flag(self, bit: int) -> NDArray[np.bool_]:
        """(ranks,) which ranks have set a flag."""
        return (self.headers["flags"] & bit) > 0

    def ranks_in(self, state: State) -> tuple[int, ...]:
        """The ranks in a state."""
        return tuple(np.flatnonzero(self.headers["state"] == state).tolist())

    @property
    def measured(self) -> NDArray[np.float64]:
        """(ranks, 5) what each has measured; see `Measure`."""
        return np.asarray(self.headers["measured"])

    def with_extras(self) -> dict[int, Extras]:
        """The extras of the ranks that have some."""
        return {rank: self.extras_of(rank) for rank in np.flatnonzero(self.headers["extras"]).tolist()}

    def extras_of(self, rank: int) -> Extras:
        """A rank's extras."""
        data = self._table[rank, self._begins["extras"][rank] : self._ends["extras"][rank]]
        return Extras(**pickle.loads(data.tobytes())) if data.size else NO_EXTRAS

    def batch_sizes(self, num_batches: int) -> NDArray[np.int64]:
        """(ranks, num_batches) samples of each batch of a window of so many."""
        counts = self.headers["num_batches"].astype(np.int64)
        sizes = np.zeros((len(self), num_batches), np.int64)
        sizes[np.arange(num_batches) < counts[:, None]] = self._joined("batch_sizes", "<u4")
        return sizes

    def samples(self, num_batches: int, nodes: NDArray[np.int32] | None = None) -> RoundSamples:
        """The samples of all ranks.

        Args:
            num_batches: Batches of a window.
            nodes: (ranks,) host of each; None: one.
        """
        is_float, n = self.flag(_FLOAT), self.headers["num_samples"].astype(np.int64)
        has_float = bool((is_float & (n > 0)).any())
        costs = self._joined("costs", "<f8" if has_float else "<i8")
        if has_float and not is_float[n > 0].all():
            whole = np.repeat(~is_float, n)
            costs[whole] = costs[whole].view(np.int64)
        holders = np.flatnonzero(n)
        num_fields = int(self.headers["num_fields"][holders[0]]) if holders.size else 0
        divisible = None
        if (counts := self.headers["num_divisible"].astype(np.int64)).any():
            divisible = self._joined("divisible", "<f8").reshape(-1, WIDTH)
            divisible[:, 0] += np.repeat(np.cumsum(n) - n, counts)
        return RoundSamples(
            batch_sizes=self.batch_sizes(num_batches),
            costs=costs,
            lengths=self._joined("lengths", "<u4").reshape(-1, num_fields) if num_fields else _no_fields(int(n.sum())),
            sizes=self._joined("sizes", "<i8"),
            memory=self._joined("memory", "<f8") if self.flag(_MEMORY).any() else None,
            nodes=nodes,
            divisible=divisible,
        )

    def _joined(self, part: str, dtype: str) -> NDArray[Any]:
        """A part of all ranks, one after the other."""
        begins, ends = self._begins[part], self._ends[part]
        if (begins == begins[0]).all() and (ends == ends[0]).all():
            return np.ascontiguousarray(self._table[:, begins[0] : ends[0]]).reshape(-1).view(dtype)
        pieces = [row[begin:end] for row, begin, end in zip(self._table, begins.tolist(), ends.tolist(), strict=True)]
        return np.concatenate(pieces).view(dtype)


_PARTS = ("batch_sizes", "costs", "sizes", "memory", "divisible", "lengths", "extras")


def _no_fields(num_samples: int) -> NDArray[np.uint32]:
    return np.zeros((num_samples, 0), np.uint32)


def stacked(rows: Sequence[Bytes]) -> Bytes:
    """(rows, width) byte strings of different lengths."""
    table = np.zeros((len(rows), max(map(len, rows))), np.uint8)
    for row, packed in zip(table, rows, strict=True):
        row[: len(packed)] = packed
    return table
