"""Ranks as threads of one process: all that is real but the collectives, which are matched by their order alone.

Programs that leave loops run here a hundred times as fast as on processes, so that many can be tried. What is assumed
of collectives is all that they do here: an all-gather gives every rank the same list, a move the samples that others
sent to this rank, and both meet whatever the other ranks started as the same number of their communicator.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from trainer_client.balancing.votes import Vote

from benchmarks.references.redistribution import redistribute_reference
from evenkeel.partitioning.slices import Slice
from trainer_client import BalanceOptions, Balancer
from trainer_client.balancing import passes, redistribution
from trainer_client.balancing.batches import FlatBatch
from trainer_client.balancing.kernels import _preparation
from trainer_client.balancing.redistribution import Pending
from trainer_client.balancing.stream import BatchStream


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
passes.start = start  # type: ignore[assignment]


class ThreadGroups:
    """What `Groups` is to a stream."""

    peers = None
    leads = True
    needs_gpu = False

    def __init__(self, rank: int, control: Communicator, data: Communicator) -> None:
        self.rank, self.world_size = rank, control.num_ranks
        self.control, self.data = control, Place(data, rank)

    @property
    def leaders(self) -> ThreadGroups:
        return self

    def led(self, work: Callable[[], Any]) -> Any:
        return work()

    def broadcast(self, value: Any) -> Any:
        return self.gather_objects(value)[0]

    def gather_objects(self, value: Any) -> list[Any]:
        return self.control.collect(self.control.post(self.rank, value))

    def gather_votes(self, vote: Vote) -> list[Vote]:
        return [Vote.unpack(row) for row in self.gather_objects(vote.pack())]

    def gather_bytes(self, own: bytes | NDArray[np.uint8], sizes: list[int]) -> list[bytes]:
        rows = self.gather_objects(bytes(own))
        assert [len(row) for row in rows] == list(sizes)
        return rows

    def leave(self, rounds: int, moves: int) -> None:
        """Nothing is kept."""


class ThreadBalancer(Balancer):
    """A rank's balancer, whose streams meet those of the other threads of a world."""

    world: World
    rank: int

    def stream(self, loader: str = "train") -> BatchStream:
        """As of any balancer, with the communicators of its world."""
        found = super().stream(loader)
        if found._groups is None:
            found._groups = self.world.groups(self.rank, loader)  # type: ignore[assignment]
        return found


class World:
    """The communicators of all streams of a program."""

    def __init__(self, num_ranks: int, seconds: float) -> None:
        self.num_ranks = num_ranks
        self._pairs: defaultdict[str, tuple[Communicator, Communicator]] = defaultdict(
            lambda: (Communicator(num_ranks, seconds), Communicator(num_ranks, seconds))
        )
        self._lock = threading.Lock()

    def balancer(self, rank: int, options: BalanceOptions) -> Balancer:
        """A rank's balancer, whose streams meet those of the other threads."""
        balancer = ThreadBalancer.embedded(options=options)
        assert isinstance(balancer, ThreadBalancer)
        balancer.world, balancer.rank = self, rank
        return balancer

    def groups(self, rank: int, loader: str) -> ThreadGroups:
        """A rank's communicators of a stream."""
        with self._lock:
            return ThreadGroups(rank, *self._pairs[loader])

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
        return sum(each.in_flight for pair in self._pairs.values() for each in pair)
