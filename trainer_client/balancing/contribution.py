"""What a rank contributes to a round: one NumPy header, then arrays; written and read here and nowhere else.

    header | batch_sizes u4 | costs i8 or f8 | sizes i8 | memory f8 | users u4 | divisible f8 | lengths u4 | extras

Each part begins at a multiple of 8 bytes. `Extras`, pickled, is what is rarely there. Ranks that train copies of a
batch (peers) send the header alone, by which the lead sees that their copies are the same.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.rounds import RankSamples, RoundSamples
from evenkeel.partitioning.splits import WIDTH
from trainer_client.balancing.groups import Bytes

if TYPE_CHECKING:
    from trainer_client.balancing.batches import FlatBatch, Schema
    from trainer_client.balancing.batches.schema import SharedValues
    from trainer_client.balancing.resume import Resumed

_PARTS = ("batch_sizes", "costs", "sizes", "memory", "users", "divisible", "lengths", "extras")
_HEADER = np.dtype(
    [
        ("size", "<u4"),  # bytes in all
        ("state", "u1"),
        ("flags", "u1"),
        ("num_batches", "<u2"),
        ("num_samples", "<u4"),
        ("num_fields", "<u4"),
        ("parts", "<u4", (len(_PARTS),)),  # bytes of each
        ("schema", "<u8"),
        ("shared", "<u8"),
        ("copy", "<u8"),
        ("taken", "<i8"),
        ("measured", "<f8", (5,)),
    ]
)
_FLOAT, _MEMORY, DROP_LAST, INVALID, OUT_OF_ORDER, USERS = 1, 2, 4, 8, 16, 32  # flags


class State(IntEnum):
    """Where a rank is in its loop."""

    DATA = 0
    EXHAUSTED = 1  # its data has ended; it takes part as long as others have some
    LEFT = 2  # it has left its loop
    NOTHING = 3  # its pass is over: a round that was under way when all heard of the end


class Measure(NamedTuple):
    """Batches of a rank in the mean."""

    load: float = 0.0
    seconds: float = 0.0  # that its computation took, without waiting for other ranks; 0: nothing was measured
    late: float = 0.0  # from the loop's request until the device had the batch, without the waits for other ranks
    loading: float = 0.0  # of it, in which the host waited for the wrapped loader
    loop: float = 0.0  # from the end of the step before until that request


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Extras:
    """What is rarely part of a contribution."""

    template: FlatBatch | None = None  # an empty batch of the round's schema, where the ranks have not heard of that
    shared: SharedValues = ()  # what the shared values of the batch are
    problem: str = ""  # why the costs cannot be used, or why the rank has left
    resumed: Resumed | None = None  # from where it goes on, in the first round of a pass
    term_names: tuple[str, ...] = ()  # of a learned cost's terms
    term_rows: NDArray[np.float64] | None = None  # (batches, terms + 1) terms of batches and milliseconds they took


NO_EXTRAS, NO_MEASURE = Extras(), Measure()
NO_SAMPLES = RankSamples(
    costs=np.zeros(0, np.int64), lengths=np.zeros((0, 0), np.int64), sizes=np.zeros(0, np.int64), batch_sizes=()
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Contribution:
    """What a rank contributes to a round."""

    state: State = State.DATA
    samples: RankSamples = NO_SAMPLES
    schema: int = 0  # 64 bits of the hash of the batches' schema; 0: there is none
    shared: int = 0  # 64 bits of what their shared values are; 0: there are none
    copy: int = 0  # 64 bits of what peers must have alike; 0: there are no peers
    drop_last: bool = False  # a global batch with too few samples for all ranks is dropped
    invalid: bool = False  # its costs cannot be used
    taken: int = 0  # with `State.LEFT`, batches that the loop had got
    out_of_order: bool = False  # with `State.LEFT`, it took batches in another order than it submitted them
    measured: Measure = NO_MEASURE  # its batches since the last contribution
    extras: Extras = NO_EXTRAS

    def pack(self, *, arrays: bool = True) -> Bytes:
        """As bytes; without the arrays and extras for peers, who send the header alone."""
        samples, header = self.samples, np.zeros((), _HEADER)
        is_float = samples.costs.dtype.kind == "f"
        flags = _FLOAT * is_float | _MEMORY * (samples.memory is not None) | DROP_LAST * self.drop_last
        flags |= INVALID * self.invalid | OUT_OF_ORDER * self.out_of_order | USERS * (samples.users is not None)
        header["flags"], header["num_samples"] = flags, len(samples)
        for name in ("state", "schema", "shared", "copy", "taken", "measured"):
            header[name] = getattr(self, name)
        parts: list[bytes] = []
        if arrays:
            header["num_batches"], header["num_fields"] = len(samples.batch_sizes), samples.lengths.shape[1]
            parts = [
                np.array(samples.batch_sizes, "<u4").tobytes(),
                samples.costs.astype("<f8" if is_float else "<i8", copy=False).tobytes(),
                samples.moving_sizes.astype("<i8", copy=False).tobytes(),
                b"" if samples.memory is None else samples.memory.astype("<f8", copy=False).tobytes(),
                b"" if samples.users is None else samples.users.astype("<u4", copy=False).tobytes(),
                b"" if samples.divisible is None else samples.divisible.astype("<f8", copy=False).tobytes(),
                samples.lengths.astype("<u4").tobytes(),
                pack_changed(self.extras),
            ]
            header["parts"] = [len(part) for part in parts]
        body = b"".join(part + bytes(-len(part) % 8) for part in parts)
        header["size"] = _HEADER.itemsize + len(body)
        return np.frombuffer(bytearray(header.tobytes() + body), np.uint8)


def pack_changed(value: Any) -> bytes:
    """The attributes of a dataclass that are not their defaults, pickled; nothing where all are."""
    changed = {one.name: there for one in fields(value) if (there := getattr(value, one.name)) is not one.default}
    return pickle.dumps(changed) if changed else b""


def schema_number(schema: Schema) -> int:
    """64 bits that name what batches look like."""
    return int.from_bytes(schema.hash[:8], "little")


class Contributions:
    """The contributions of all ranks to a round."""

    def __init__(self, table: Bytes, num_peers: int = 1) -> None:
        """Reads (ranks × peers, width) what ranks have packed, peers of a rank side by side; behind each anything."""
        self._table = table[::num_peers]
        headers = np.ascontiguousarray(table[:, : _HEADER.itemsize]).view(_HEADER)[:, 0]
        self.copies = headers.reshape(-1, num_peers)  # (ranks, peers) of all that train the same batches
        self.headers = self.copies[:, 0]  # (ranks,) of those that balance together
        self.flags = int(np.bitwise_or.reduce(self.headers["flags"]))  # that any of them has set
        self.num_batches = max(1, int(self.headers["num_batches"].max()))  # of the round
        self._counts = self.headers["num_samples"].astype(np.int64)
        self.with_samples: list[int] = np.flatnonzero(self._counts).tolist()  # ranks
        self.schema = int(self.headers["schema"][self.with_samples[0]]) if self.with_samples else 0
        sizes = self.headers["parts"].astype(np.int64).T
        padded = sizes + -sizes % 8
        begins = _HEADER.itemsize + np.cumsum(padded, axis=0) - padded
        self._begins = dict(zip(_PARTS, begins, strict=True))  # (ranks,) of each part
        self._ends = dict(zip(_PARTS, begins + sizes, strict=True))
        self.extras: dict[int, Extras] = {  # of the ranks that have some
            rank: Extras(**pickle.loads(self._bytes("extras", rank).tobytes()))
            for rank in np.flatnonzero(sizes[-1]).tolist()
        }

    @classmethod
    def of(cls, contributions: Sequence[Contribution]) -> Contributions:
        """Those of ranks without peers."""
        rows = [one.pack() for one in contributions]
        table = np.zeros((len(rows), max(map(len, rows))), np.uint8)
        for row, packed in zip(table, rows, strict=True):
            row[: len(packed)] = packed
        return cls(table)

    def __len__(self) -> int:
        return len(self.headers)

    def flag(self, bit: int) -> NDArray[np.bool_]:
        """(ranks,) which ranks have set a flag."""
        return (self.headers["flags"] & bit) > 0

    @cached_property
    def batch_sizes(self) -> NDArray[np.int64]:
        """(ranks, batches) samples of each batch of the round."""
        counts = self.headers["num_batches"].astype(np.int64)
        sizes = np.zeros((len(self), self.num_batches), np.int64)
        sizes[np.arange(self.num_batches) < counts[:, None]] = self._joined("batch_sizes", "<u4")
        return sizes

    def samples(self, nodes: NDArray[np.int32] | None = None) -> RoundSamples:
        """The samples of all ranks, given (ranks,) their hosts."""
        n, is_float, named = self._counts, self.flag(_FLOAT), self.flag(USERS)
        has_float = bool((is_float & (n > 0)).any())
        costs = self._joined("costs", "<f8" if has_float else "<i8")
        if has_float and not is_float[n > 0].all():
            whole = np.repeat(~is_float, n)
            costs[whole] = costs[whole].view(np.int64)
        fields = self.headers["num_fields"]
        num_fields = int(fields[self.with_samples[0]] if self.with_samples else fields.max())
        lengths = self._joined("lengths", "<u4")
        divisible = None
        counts = (self._ends["divisible"] - self._begins["divisible"]) // (8 * WIDTH)
        if counts.any():
            divisible = self._joined("divisible", "<f8").reshape(-1, WIDTH)
            divisible[:, 0] += np.repeat(np.cumsum(n) - n, counts)
        return RoundSamples(
            batch_sizes=self.batch_sizes, costs=costs, lengths=lengths.reshape(int(n.sum()), num_fields),
            sizes=self._joined("sizes", "<i8"), nodes=nodes, divisible=divisible,
            memory=self._joined("memory", "<f8") if self.flag(_MEMORY).any() else None,
            users=self._joined("users", "<u4") if named.any() and (named | (n == 0)).all() else None,
        )  # fmt: skip

    def _bytes(self, part: str, rank: int) -> Bytes:
        return self._table[rank, self._begins[part][rank] : self._ends[part][rank]]

    def _joined(self, part: str, dtype: str) -> NDArray[Any]:
        """A part of all ranks, one after the other."""
        begins, ends = self._begins[part], self._ends[part]
        if (begins == begins[0]).all() and (ends == ends[0]).all():  # the loop below takes long for 1,000 ranks
            return np.ascontiguousarray(self._table[:, begins[0] : ends[0]]).reshape(-1).view(dtype)
        return np.concatenate([self._bytes(part, rank) for rank in range(len(self))]).view(dtype)
