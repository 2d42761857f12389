"""Ranks as threads of one process: all that is real but the collectives, which are matched by their order alone.

Programs that leave loops run here a hundred times as fast as on processes, so that many can be tried. What is assumed
of collectives is all that they do here: a gather gives the lead everybody's bytes, a scatter everybody the lead's, a
move the samples that others sent to this rank, and all meet whatever the other ranks started as the same number of
their communicator.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np

from benchmarks.references.redistribution import redistribute_reference
from evenkeel.partitioning.slices import Slice
from trainer_client import BalanceOptions, Balancer
from trainer_client.balancing import balancer, opening, redistribution, stream
from trainer_client.balancing.batches import FlatBatch
from trainer_client.balancing.contribution import Bytes
from trainer_client.balancing.groups import Communicators, Membership, read_membership, take_communicators
from trainer_client.balancing.kernels import _preparation
from trainer_client.balancing.redistribution import Pending


class Communicator:
    """Collectives of some ranks, matched in the order in which each rank starts them."""

    def __init__(self, num_ranks: int, seconds: float) -> None:
        self.num_ranks = num_ranks
        self._seconds = seconds
        self._started = [0] * num_ranks
        self._slots: defaultdict[int, dict[int, Any]] = defaultdict(dict)
        self._changed = threading.Condition()

    def post(self, rank: int, value: Any) -> int:
        """Starts a collective with a rank's contribution."""
        with self._changed:
            number = self._started[rank]
            self._started[rank] += 1
            self._slots[number][rank] = value
            self._changed.notify_all()
            return number

    def collect(self, number: int) -> list[Any]:
        """Everybody's contribution, once all have started it."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._slots[number]) == self.num_ranks, self._seconds):
                raise TimeoutError(f"collective {number}: only ranks {sorted(self._slots[number])} came")
            return [self._slots[number][rank] for rank in range(self.num_ranks)]

    @property
    def in_flight(self) -> int:
        """Collectives that some rank has started and not all."""
        return max(self._started) - min(self._started)


class Place(NamedTuple):
    """A rank's place in a communicator, as a process group is to a rank."""

    communicator: Communicator
    rank: int


def start(flat: FlatBatch, piece: Slice, *, group: Any, device: Any = None) -> Pending:
    """What `redistribution.start` does, where the group is one of threads."""
    if not isinstance(group, Place):
        return redistribution.start(flat, piece, group=group, device=device)
    number = group.communicator.post(group.rank, (flat, piece.destinations))

    def finish() -> FlatBatch:
        posted = group.communicator.collect(number)
        result = redistribute_reference([each for each, _ in posted], [where for _, where in posted])[group.rank]
        assert result.num_samples == int(piece.source_counts.sum()), "moves of different rounds have met"
        return result

    return Pending(finish)


# For good: threads that end what a loop has left move samples after the test that began them.
stream.start_moving = start  # type: ignore[assignment]


class ThreadCommunicators(Communicators):
    """What `Communicators` are to a stream."""

    def gather(self, row: Bytes, room: int) -> Bytes | None:
        number = self.up.post(self.rank, row)
        if not self.leads:
            return None
        rows = self.up.collect(number)
        table = np.zeros((len(rows), max(map(len, rows))), np.uint8)
        for each, sent in zip(table, rows, strict=True):
            each[: len(sent)] = sent
        return table

    def scatter(self, table: Bytes | None, room: int) -> Bytes:
        posted = self.down.collect(self.down.post(self.rank, table)) if table is None else None
        if table is not None:
            self.down.post(self.rank, table)
        sent = table if posted is None else posted[0]
        assert sent is not None, "directives of different rounds have met"
        row: Bytes = sent[self.rank]
        return row

    def set_timeout(self, timeout: timedelta) -> None:
        """They have one of their own."""


class Member(NamedTuple):
    """What is given for a process group."""

    world: World
    rank: int


class ThreadMembership(Membership):
    """A thread among those of its world."""

    world: World


class World:
    """The communicators of all streams of a program."""

    def __init__(self, num_ranks: int, seconds: float) -> None:
        self.num_ranks = num_ranks
        self._communicators: defaultdict[int, list[Communicator]] = defaultdict(
            lambda: [Communicator(num_ranks, seconds) for _ in range(3)]
        )
        self._kept: defaultdict[int, list[ThreadCommunicators]] = defaultdict(list)
        self._lock = threading.Lock()

    def balancer(self, rank: int, options: BalanceOptions) -> Balancer:
        """A rank's balancer, whose streams meet those of the other threads."""
        return Balancer.embedded(group="threads", options=options, process_group=Member(self, rank))  # type: ignore[arg-type]

    def communicators(self, rank: int, timeout: timedelta) -> ThreadCommunicators:
        """A rank's communicators of a stream: those that one has left, or new ones."""
        with self._lock:
            kept = next((each for each in self._kept[rank] if each.closed), None)
            if kept is None:
                up, down, data = self._communicators[len(self._kept[rank])]
                peers = np.arange(self.num_ranks)[:, None]
                kept = ThreadCommunicators(
                    up=up,
                    down=down,
                    data=Place(data, rank),
                    peers=peers,
                    rank=rank,
                    peer=0,  # type: ignore[arg-type]
                )
                kept.free.set()
                self._kept[rank].append(kept)
            kept.closed = False
        if not kept.free.wait(timeout.total_seconds()):
            raise TimeoutError("an earlier loop of this name has not ended")
        kept.free.clear()
        return kept

    def run(self, program: Callable[[int], Any]) -> list[Any]:
        """Runs a program on every rank; its results, or what it raised, by rank."""
        _preparation().wait(60)  # until then every sample would stay at home
        results: list[Any] = [None] * self.num_ranks

        def one(rank: int) -> None:
            try:
                results[rank] = program(rank)
            except BaseException as error:
                results[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.num_ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    @property
    def in_flight(self) -> int:
        """Collectives that not all ranks have started."""
        return sum(each.in_flight for some in self._communicators.values() for each in some)


def _membership(process_group: Any, peers: Any) -> Membership | None:
    if not isinstance(process_group, Member):
        return read_membership(process_group, peers)
    world, rank = process_group
    membership = ThreadMembership(ranks=tuple(range(world.num_ranks)), peers=(rank,), backend="gloo", rank=rank)
    object.__setattr__(membership, "world", world)
    return membership


def _communicators(membership: Membership, timeout: timedelta) -> Communicators:
    if not isinstance(membership, ThreadMembership):  # ranks that other tests fork from this process
        return take_communicators(membership, timeout)
    return membership.world.communicators(membership.rank, timeout)


opening.take_communicators = _communicators  # type: ignore[assignment]
opening.read_membership = balancer.read_membership = _membership  # type: ignore[assignment]
