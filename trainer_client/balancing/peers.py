"""Ranks that train the same batches: one of them, their leader, decides, and the others do as it does.

Ranks of tensor, pipeline or context parallelism hold copies of one batch. Only the leader takes part in the agreement
of its data-parallel group; what came of it, an error included, it hands to its peers, which move their copies alike.
"""

from __future__ import annotations

import hashlib
import pickle
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch

from evenkeel.partitioning.samples import Lengths
from trainer_client.balancing.batches import FlatBatch
from trainer_client.process_groups import make_group

T = TypeVar("T")

_TWIN = struct.Struct("<QQQQQ16s")


class PeersDifferError(ValueError):
    """Ranks that were said to train the same batches hold different ones."""


class PeerGroup:
    """A communicator of ranks that train the same batches; used by one thread.

    It is of Gloo, and used below `torch.distributed`, whose roots are ranks of the default group.
    """

    def __init__(self, ranks: Sequence[int], own: int, timeout: timedelta) -> None:
        """Meets the peers. Collective among them.

        Args:
            ranks: All of them, as ranks of the default process group; the first leads.
            own: This rank.
            timeout: After which a collective fails.
        """
        self.ranks = tuple(ranks)
        self.place = self.ranks.index(own)
        self._group: Any = make_group(self.ranks, "gloo", timeout)

    @property
    def leads(self) -> bool:
        """Whether this rank decides for its peers."""
        return self.place == 0

    def gather(self, own: bytes) -> list[bytes]:
        """Every peer's bytes, which are of one length."""
        table = torch.empty((len(self.ranks), len(own)), dtype=torch.uint8, device="cpu")
        send = torch.from_numpy(np.frombuffer(own, dtype=np.uint8).copy())
        self._group.allgather([list(table.unbind())], [send]).wait()
        return [row.numpy().tobytes() for row in table]

    def gather_objects(self, own: T) -> list[T]:
        """Every peer's value."""
        packed = pickle.dumps(own)
        sizes = [int.from_bytes(row, "little") for row in self.gather(len(packed).to_bytes(8, "little"))]
        rows = self.gather(packed.ljust(max(sizes), b"\0"))
        return [pickle.loads(row[:size]) for row, size in zip(rows, sizes, strict=True)]

    def led(self, work: Callable[[], T]) -> T:
        """What `work` gives on the leader, on all peers; what it raises is raised on all of them."""
        if not self.leads:
            result, error = pickle.loads(self._from_leader(b""))
        else:
            result, error = None, None
            try:
                result = work()
            except BaseException as raised:
                error = raised
            self._from_leader(_packed(result, error))
        if error is not None:
            raise error
        value: T = result
        return value

    def _from_leader(self, packed: bytes) -> bytes:
        size = torch.tensor([len(packed)], dtype=torch.int64, device="cpu")
        self._group.broadcast(size, 0).wait()
        data = np.zeros(int(size), dtype=np.uint8)
        if self.leads:
            data[:] = np.frombuffer(packed, dtype=np.uint8)
        self._group.broadcast(torch.from_numpy(data), 0).wait()
        return data.tobytes()


def _packed(result: Any, error: BaseException | None) -> bytes:
    try:
        packed = pickle.dumps((result, error))
        pickle.loads(packed)  # an error may need other arguments than it keeps
    except Exception:
        if error is None:
            raise
        return pickle.dumps((None, RuntimeError(f"{type(error).__name__}: {error}")))
    return packed


@dataclass(frozen=True, slots=True, kw_only=True)
class Twin:
    """What must be the same on all ranks that train the same batches.

    Attributes:
        round: The round.
        samples: Samples submitted.
        exhausted: The rank's data has ended.
        schema: 64 bits of the hash of the batch's schema.
        digest: Of the lengths, and in a stream's first round of all values on the host.
        left: Instead of submitting a round, the rank has left its loop; then its peers leave theirs.
        out_of_turn: It took batches in another order than it submitted them.
        taken: Batches that the loop had got.
    """

    round: int
    samples: int = 0
    exhausted: bool = False
    schema: int = 0
    digest: bytes = field(repr=False, default=b"")
    left: bool = False
    out_of_turn: bool = False
    taken: int = 0

    @classmethod
    def of(cls, number: int, flats: Sequence[FlatBatch], lengths: Lengths, *, exhausted: bool, values: bool) -> Twin:
        """That of a round.

        Args:
            number: The round.
            flats: Its batches.
            lengths: (n, jagged fields) values of each jagged field.
            exhausted: The rank's data has ended.
            values: Whether to look at the values too.
        """
        digest = hashlib.blake2b(np.ascontiguousarray(lengths).tobytes(), digest_size=16)
        for flat in flats if values else ():
            for tensor in flat.tensors:
                if tensor.device.type == "cpu":
                    plain = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
                    digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)
        schema = int.from_bytes(flats[0].schema.hash[:8], "little")
        return cls(round=number, samples=len(lengths), exhausted=exhausted, schema=schema, digest=digest.digest())

    @classmethod
    def of_leaving(cls, number: int, *, taken: int, out_of_turn: bool) -> Twin:
        """That of a rank that has left its loop."""
        return cls(round=number, left=True, out_of_turn=out_of_turn, taken=taken)

    def meet(self, peers: PeerGroup, *, compiling: bool) -> tuple[Twin, str, bool]:
        """What the peers do. Collective.

        Args:
            peers: All of them.
            compiling: This rank's kernels are still being compiled.

        Returns:
            What the first of them says that has left, else what the leader says; how the others' batches differ from
            its, for people, empty if they do not; and whether any of them is compiling.
        """
        flags = self.exhausted | self.left << 1 | self.out_of_turn << 2 | compiling << 3
        packed = peers.gather(_TWIN.pack(self.round, self.samples, flags, self.schema, self.taken, self.digest))
        rows = [_TWIN.unpack(row) for row in packed]
        waits = any(flags & 8 for _, _, flags, *_ in rows)
        twins = [
            Twin(
                round=number, samples=samples, exhausted=bool(flags & 1), schema=schema, digest=digest,
                left=bool(flags & 2), out_of_turn=bool(flags & 4), taken=taken,
            )
            for number, samples, flags, schema, taken, digest in rows
        ]  # fmt: skip
        for twin in sorted(twins, key=lambda twin: not twin.out_of_turn):
            if twin.left:
                return twin, "", waits
        for rank, twin in zip(peers.ranks, twins, strict=True):
            if twin != twins[0]:
                differ = (
                    f"rank {rank} {_difference(twins[0], twin, peers.ranks[0])}, and the two were said to train the "
                    "same batches (by peers, or by a dimension of the mesh that is not process_group's); let them load "
                    "the same samples in the same order, as by mesh['dp'].get_local_rank(); if they train different "
                    "ones, balance over them too, or pass process_group=mesh['dp'].get_group()"
                )
                return twins[0], differ, waits
        return twins[0], "", waits


def _difference(leader: Twin, other: Twin, leading_rank: int) -> str:
    if other.round != leader.round:
        return f"is in round {other.round} where rank {leading_rank} is in {leader.round}"
    if other.exhausted != leader.exhausted:
        ended, more = ("has no", "has one") if other.exhausted else ("has another", "has none")
        return f"{ended} batch in round {leader.round} where rank {leading_rank} {more}"
    if other.samples != leader.samples:
        return f"has {other.samples} samples in round {leader.round} where rank {leading_rank} has {leader.samples}"
    if other.schema != leader.schema:
        return f"has batches of other fields or dtypes than rank {leading_rank} in round {leader.round}"
    return f"has other samples than rank {leading_rank} in round {leader.round}"
