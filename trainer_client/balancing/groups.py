"""The stream's own process groups and the few collectives of its control side."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from evenkeel.partitioning.slices import Slice
from trainer_client.balancing.batches import FlatBatch
from trainer_client.balancing.communicators import Communicators, leave, take
from trainer_client.balancing.membership import Membership, Ranks, read_membership
from trainer_client.balancing.peers import PeerGroup
from trainer_client.balancing.redistribution import Pending, start
from trainer_client.balancing.votes import Vote
from trainer_client.process_groups import all_gather

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Groups:
    """The ranks that balance together, and two communicators of the stream's own.

    `control` (Gloo) carries the agreements and is used by the stream's worker thread only, after the stream has opened;
    `data` (the backend of the parent group) moves samples and is used by the training thread only. Both are None in a
    world of one rank, which has no collectives at all.

    Of the ranks that train the same batches only the leader speaks to the leaders of others, over `control`. The
    collectives here are those of all ranks: what comes of them among the leaders is told to their peers. `leaders` are
    the same without that, for what leaders do by themselves.
    """

    rank: int
    world_size: int
    membership: Membership | None = None
    pair: Communicators | None = None
    peers: PeerGroup | None = None

    @property
    def control(self) -> dist.ProcessGroup | None:
        """Carries the agreements."""
        return None if self.pair is None else self.pair.control

    @property
    def data(self) -> dist.ProcessGroup | None:
        """Moves the samples."""
        return None if self.pair is None else self.pair.data

    @property
    def needs_gpu(self) -> bool:
        """Whether the ranks can exchange tensors of GPUs only, as NCCL alone can."""
        return self.membership is not None and self.membership.backend == "nccl"

    @property
    def leads(self) -> bool:
        """Whether this rank takes part in agreements: it has no peers, or decides for them."""
        return self.peers is None or self.peers.leads

    @property
    def leaders(self) -> Groups:
        """The collectives of the ranks that lead, of which their peers hear nothing."""
        return replace(self, peers=None)

    @classmethod
    def create(cls, process_group: Ranks | None, timeout: timedelta, peers: Ranks | None = None) -> Groups:
        """The communicators of a new stream. Collective: every rank and its peers call it, in the same order.

        Args:
            process_group: The data-parallel group that balances together; `None`: the default group, or one rank alone
                when torch.distributed is not initialised.
            timeout: After which a collective of the new groups fails.
            peers: The ranks that train the same batches; see `read_membership`.

        Raises:
            ValueError: If it is not clear who balances with whom.
        """
        membership = read_membership(process_group, peers)
        if membership is None or len(membership.ranks) == 1:
            return cls(
                rank=0, world_size=1, membership=membership
            )  # peers need not ask each other where nothing is decided
        pair = take(membership, timeout)
        return cls(
            rank=membership.ranks.index(membership.own),
            world_size=len(membership.ranks),
            membership=membership,
            pair=pair,
            peers=pair.peers,
        )

    def start(self, flat: FlatBatch, piece: Slice, *, moved: bool, device: torch.device | str | None) -> Pending:
        """Starts to move a batch's samples as its slice of the plan says; collective if samples are `moved` at all."""
        return start(flat, piece, group=self.data if moved else None, device=device)

    def leave(self, rounds: int, moves: int) -> None:
        """Keeps the communicators for the next stream of these ranks. Nothing of theirs may be in flight on this rank.

        Args:
            rounds: The stream agreed on.
            moves: The stream has started and ended.
        """
        if self.pair is not None and self.membership is not None:
            self.pair.rounds += rounds
            self.pair.moves += moves
            leave(self.membership, self.pair)

    def led(self, work: Callable[[], T]) -> T:
        """What `work` gives on the ranks that lead, on their peers too; what it raises is raised on them as well."""
        return work() if self.peers is None else self.peers.led(work)

    def broadcast(self, value: T) -> T:
        """Rank 0's value, on every rank."""
        if self.control is None:
            return value

        def send() -> T:
            box: list[Any] = [value]
            with _explained():
                dist.broadcast_object_list(box, group=self.control, group_src=0)
            result: T = box[0]
            return result

        return self.led(send)

    def gather_objects(self, value: T) -> list[T]:
        """The value of every rank that leads, by rank."""
        if self.control is None:
            return [value]

        def gather() -> list[T]:
            values: list[Any] = [None] * self.world_size
            with _explained():
                dist.all_gather_object(values, value, group=self.control)
            return values

        return self.led(gather)

    def gather_votes(self, vote: Vote) -> list[Vote]:
        """Every rank's vote, by rank."""
        packed = vote.pack()  # of equal length on all ranks: their windows are those of rank 0's options
        rows = self.gather_bytes(packed, [len(packed)] * self.world_size)
        return [Vote.unpack(row) for row in rows]

    def gather_bytes(self, own: bytes | NDArray[np.uint8], sizes: Sequence[int]) -> list[bytes]:
        """All-gathers byte strings of known sizes, padded to the longest.

        Args:
            own: This rank's bytes.
            sizes: Number of bytes of each rank, known to all.
        """
        if self.control is None:
            return [bytes(own)]
        width = max(sizes)
        if width == 0:
            return [b""] * self.world_size
        # Arrays of numpy's, since every operation of torch passes the interpreter's lock on and waits to get it back.
        send = np.zeros(width, dtype=np.uint8)
        send[: len(own)] = np.frombuffer(own, dtype=np.uint8)
        table = np.empty((self.world_size, width), dtype=np.uint8)
        with _explained():
            all_gather(torch.from_numpy(table.reshape(-1)), torch.from_numpy(send), self.control)
        return [table[rank, :size].tobytes() for rank, size in enumerate(sizes)]


def node_name() -> str:
    """The host of this rank: `EVENKEEL_NODE`, else the host's name."""
    return os.environ.get("EVENKEEL_NODE") or socket.gethostname()


@contextmanager
def _explained() -> Iterator[None]:
    """Adds to the error of a collective what else than the network it may come from."""
    try:
        yield
    except RuntimeError as error:
        error.add_note(
            "The ranks that balance together could not agree: another rank has ended or failed, as its own log says, "
            "or did not begin this loop within BalanceOptions.group_timeout; all ranks run the same loops in the same "
            "order."
        )
        raise
