"""The stream's own process groups and the few collectives of its control side."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from trainer_client.balancing.communicators import Communicators, leave, take
from trainer_client.balancing.votes import Vote
from trainer_client.redistribution.select import all_gather

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Groups:
    """The ranks that balance together, and two communicators of the stream's own.

    `control` (Gloo) carries the agreements and is used by the stream's worker thread only, after the stream has opened;
    `data` (the backend of the parent group) moves samples and is used by the training thread only. Both are None in a
    world of one rank, which has no collectives at all.
    """

    rank: int
    world_size: int
    parent: dist.ProcessGroup | None = None
    pair: Communicators | None = None

    @property
    def control(self) -> dist.ProcessGroup | None:
        """Carries the agreements."""
        return None if self.pair is None else self.pair.control

    @property
    def data(self) -> dist.ProcessGroup | None:
        """Moves the samples."""
        return None if self.pair is None else self.pair.data

    @classmethod
    def create(cls, parent: dist.ProcessGroup | None, timeout: timedelta) -> Groups:
        """The communicators of a new stream. Collective: every rank of the parent group calls it, in the same order.

        Args:
            parent: The data-parallel group that balances together; `None`: the default group, or one rank alone when
                torch.distributed is not initialised.
            timeout: After which a collective of the new groups fails.
        """
        if not (dist.is_available() and dist.is_initialized()):
            return cls(rank=0, world_size=1)
        world_size = dist.get_world_size(parent)
        if world_size == 1:
            return cls(rank=0, world_size=1)
        return cls(rank=dist.get_rank(parent), world_size=world_size, parent=parent, pair=take(parent, timeout))

    def leave(self, rounds: int, moves: int) -> None:
        """Keeps the communicators for the next stream of these ranks. Nothing of theirs may be in flight on this rank.

        Args:
            rounds: The stream agreed on.
            moves: The stream has started and ended.
        """
        if self.pair is not None:
            self.pair.rounds += rounds
            self.pair.moves += moves
            leave(self.parent, self.pair)

    def broadcast(self, value: T) -> T:
        """Rank 0's value, on every rank."""
        if self.control is None:
            return value
        box: list[Any] = [value]
        dist.broadcast_object_list(box, group=self.control, group_src=0)
        result: T = box[0]
        return result

    def gather_objects(self, value: T) -> list[T]:
        """Every rank's value, by rank."""
        if self.control is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.control)
        return values

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
        all_gather(torch.from_numpy(table.reshape(-1)), torch.from_numpy(send), self.control)
        return [table[rank, :size].tobytes() for rank, size in enumerate(sizes)]


def node_name() -> str:
    """The host of this rank: `EVENKEEL_NODE`, else the host's name."""
    return os.environ.get("EVENKEEL_NODE") or socket.gethostname()
