"""The stream's own process groups and the few collectives of its control side.

A communicator holds threads and, with NCCL, device memory, and destroying one is safe only when all its ranks do so
with nothing in flight. So a closed stream leaves its pair behind, and a stream that opens takes one if all ranks have
left it after the same number of rounds and moves, so that what one rank expects cannot meet what another starts.

"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from trainer_client.balancing.membership import Membership, Ranks, check_grid, read_membership
from trainer_client.balancing.peers import PeerGroup
from trainer_client.balancing.votes import Vote
from trainer_client.process_groups import all_gather, make_group


@dataclass(slots=True)
class Communicators:
    """A pair of communicators of the same ranks, and one of their peers where they have any.

    Attributes:
        serial: Counts the pairs of these ranks.
        control: Gloo, for agreements.
        data: The backend of the data-parallel group, for samples.
        peers: Between the ranks that train the same batches; None if each trains its own.
        timeout: After which a collective of the pair fails.
        rounds: Agreed on with it so far.
        moves: Redistributions started, and ended, with it so far.
    """

    serial: int
    control: dist.ProcessGroup
    data: dist.ProcessGroup
    peers: PeerGroup | None
    timeout: timedelta
    rounds: int = 0
    moves: int = 0

    @property
    def state(self) -> tuple[timedelta, int, int]:
        """What all ranks must find equal before they use it again."""
        return self.timeout, self.rounds, self.moves


@dataclass(slots=True)
class _Shelf:
    """The pairs that streams of the same ranks have left on this rank, and where the ranks speak about them."""

    lobby: dist.ProcessGroup
    peers: PeerGroup | None
    left: dict[int, Communicators] = field(default_factory=dict)
    made: int = 0


# Stays in a child of `fork`, which has none of the threads that the end of a communicator waits for.
_shelves: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Membership, _Shelf]] = weakref.WeakKeyDictionary()


def take(membership: Membership, timeout: timedelta) -> Communicators:
    """A pair that earlier streams have left on every rank, or a new one.

    Collective: every one of the ranks, and of their peers, calls it, in the same order as its other streams.

    Args:
        membership: The ranks, more than one.
        timeout: After which a collective of the pair fails; rank 0's holds for all.

    Raises:
        ValueError: If the ranks and their peers are not those of one grid.
    """
    shelf = _shelf(membership, timeout)
    ready: list[Any] = [None] * len(membership.ranks)
    dist.all_gather_object(
        ready, (timeout, {serial: pair.state for serial, pair in shelf.left.items()}), group=shelf.lobby
    )
    states = [states for _, states in ready]
    timeout = ready[0][0]
    if shelf.peers is not None:
        timeout = shelf.peers.led(lambda: timeout)
        states = shelf.peers.gather_objects(_alike(states))
    serial = _common(states, timeout)
    if serial is not None:
        return shelf.left.pop(serial)
    shelf.made += 1
    return Communicators(
        serial=shelf.made,
        control=make_group(membership.ranks, "gloo", timeout),
        data=make_group(membership.ranks, membership.backend, timeout),
        peers=_peer_group(membership, timeout),
        timeout=timeout,
    )


def leave(membership: Membership, pair: Communicators) -> None:
    """Keeps a pair for the next stream. Nothing of it may be in flight on this rank."""
    group = dist.group.WORLD
    shelf = _shelves.get(group, {}).get(membership) if group is not None else None  # none: the job's groups have ended
    if shelf is not None:
        shelf.left[pair.serial] = pair


def _shelf(membership: Membership, timeout: timedelta) -> _Shelf:
    world = dist.group.WORLD
    assert world is not None
    shelves = _shelves.setdefault(world, {})
    if membership not in shelves:
        shelf = _Shelf(lobby=make_group(membership.ranks, "gloo", timeout), peers=_peer_group(membership, timeout))
        _check(membership, shelf)
        shelves[membership] = shelf
    return shelves[membership]


def _check(membership: Membership, shelf: _Shelf) -> None:
    """Checks on all ranks alike that they and their peers cross like rows and columns."""
    of_ranks: list[Any] = [None] * len(membership.ranks)
    dist.all_gather_object(of_ranks, membership.peers, group=shelf.lobby)
    of_peers = [membership.ranks] if shelf.peers is None else shelf.peers.gather_objects(membership.ranks)
    problems: list[Any] = [None] * len(membership.ranks)
    dist.all_gather_object(problems, check_grid(membership, of_ranks, of_peers), group=shelf.lobby)
    if shelf.peers is not None:
        problems = [problem for column in shelf.peers.gather_objects(problems) for problem in column]
    if any(problems):
        raise ValueError(next(filter(None, problems)))


States = dict[int, tuple[timedelta, int, int]]


def _alike(states: Sequence[States]) -> States:
    """The pairs that every rank has left in the same state."""
    return {serial: state for serial, state in states[0].items() if all(s.get(serial) == state for s in states)}


def _common(states: Sequence[States], timeout: timedelta) -> int | None:
    """The first pair that every rank has left in the same state."""
    return min((serial for serial, state in _alike(states).items() if state[0] == timeout), default=None)


def _peer_group(membership: Membership, timeout: timedelta) -> PeerGroup | None:
    return PeerGroup(membership.peers, membership.own, timeout) if len(membership.peers) > 1 else None


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
        with _explained():
            pair = take(membership, timeout)
        return cls(
            rank=membership.ranks.index(membership.own),
            world_size=len(membership.ranks),
            membership=membership,
            pair=pair,
            peers=pair.peers,
        )

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


_OTHERS = (
    "The ranks that balance together could not agree: another rank has ended or failed, as its own log says, "
    "or did not begin this loop within BalanceOptions.group_timeout; all ranks run the same loops in the same "
    "order."
)
_WORKER_DIED = (
    "A worker of this rank's DataLoader died while the ranks that balance together agreed, often because the "
    "machine had no memory left; the other ranks wait for this one until BalanceOptions.group_timeout, unless its "
    "process ends. Let it end, and start the job again with fewer workers, or with less that each of them holds."
)


@contextmanager
def _explained() -> Iterator[None]:
    """Adds to the error of a collective what else than the network it may come from."""
    try:
        yield
    except RuntimeError as error:
        error.add_note(_WORKER_DIED if str(error).startswith("DataLoader worker") else _OTHERS)
        raise
