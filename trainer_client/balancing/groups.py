"""The communicators of a stream: contributions go up to the lead, directives come down, samples move between ranks.

A communicator holds threads and, with NCCL, device memory, and ending one is safe only when all its ranks do so with
nothing in flight. So those of a stream are kept, for the next one, for as long as the default process group lives.
"""

from __future__ import annotations

import gc
import pickle
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from trainer_client.balancing.contribution import Bytes
from trainer_client.balancing.membership import Membership, check_grid
from trainer_client.process_groups import make_group

_OBJECT_ROOM = 4096
_LOOK = timedelta(seconds=0.2)


@dataclass(eq=False)
class Communicators:
    """Those of one stream."""

    up: Any  # Gloo, for contributions; used by one thread
    down: Any  # Gloo, for directives; used by one thread
    data: dist.ProcessGroup  # for samples, of the data-parallel group's backend; used in the order of the program
    peers: NDArray[np.int64]  # (ranks, peers) the job's ranks, in the order of `up`: those of a row train copies
    rank: int  # this one, among those that balance together
    peer: int  # which of a row this one is; the first contributes
    closed: bool = False  # the stream that used them has been: at the same point of the program on all ranks
    free: threading.Event = field(default_factory=threading.Event)  # set once nothing of that stream is in flight
    failed: bool = False  # a collective has; they are of no use any more, and nobody waits for one

    @property
    def leads(self) -> bool:
        """Whether this rank decides."""
        return self.rank == 0 and self.peer == 0

    def gather(self, row: Bytes, room: int) -> Bytes | None:
        """Byte strings of all ranks at the lead: (ranks × peers, width), None elsewhere. Collective on `up`.

        The first four bytes of each tell its length. What is longer than the room goes on to the lead by itself.
        """
        send = np.zeros(room, np.uint8)
        send[: len(row)] = row[:room]
        options = dist.GatherOptions()
        options.rootRank = 0
        with _explained():
            if not self.leads:
                self._wait(self.up.gather([], [torch.from_numpy(send)], options))
                if len(row) > room:
                    self.up.send([torch.from_numpy(row[room:].copy())], 0, 0).wait()
                return None
            table = np.empty((self.peers.size, room), np.uint8)
            self._wait(self.up.gather([list(torch.from_numpy(table).unbind())], [torch.from_numpy(send)], options))
            sizes = _sizes(table)
            if int(sizes.max()) <= room:
                return table
            whole = np.zeros((self.peers.size, int(sizes.max())), np.uint8)
            whole[:, :room] = table
            whole[0, : len(row)] = row
            for rank in np.flatnonzero(sizes > room).tolist():
                if rank:
                    rest = np.empty(int(sizes[rank]) - room, np.uint8)
                    self.up.recv([torch.from_numpy(rest)], rank, 0).wait()
                    whole[rank, room : sizes[rank]] = rest
            return whole

    def scatter(self, table: Bytes | None, room: int) -> Bytes:
        """A row of the lead's table for each rank, the same for its peers; otherwise as `gather`. On `down`."""
        mine = np.empty(room, np.uint8)
        options = dist.ScatterOptions()
        options.rootRank = 0
        with _explained():
            if table is None:
                self._wait(self.down.scatter([torch.from_numpy(mine)], [], options))
                size = int(mine[:4].view("<u4")[0])
                if size <= room:
                    return mine
                rest = np.empty(size - room, np.uint8)
                self.down.recv([torch.from_numpy(rest)], 0, 0).wait()
                return np.concatenate([mine, rest])
            num_peers, sizes = self.peers.shape[1], _sizes(table)
            sent = np.zeros((len(table), room), np.uint8)
            sent[:, : min(room, table.shape[1])] = table[:, :room]
            rows = list(torch.from_numpy(np.repeat(sent, num_peers, axis=0)).unbind())
            self._wait(self.down.scatter([torch.from_numpy(mine)], [rows], options))
            for rank in np.flatnonzero(sizes > room).tolist():
                beyond = torch.from_numpy(table[rank, room : sizes[rank]].copy())
                for at in range(max(1, rank * num_peers), (rank + 1) * num_peers):
                    self.down.send([beyond], at, 0).wait()
            lead: Bytes = table[0]
            return lead

    def gather_objects(self, value: Any) -> list[Any] | None:
        """The values of all ranks and their peers at the lead; None elsewhere. Collective on `up`."""
        table = self.gather(_packed(value), _OBJECT_ROOM)
        return None if table is None else [_unpacked(row) for row in table]

    def broadcast_object(self, value: Any) -> Any:
        """The lead's value. Collective on `down`."""
        table = np.tile(_packed(value), (len(self.peers), 1)) if self.leads else None
        return _unpacked(self.scatter(table, _OBJECT_ROOM))

    def set_timeout(self, timeout: timedelta) -> None:
        """After which a collective fails."""
        for group in (self.up, self.down, self.data):
            dist.distributed_c10d._set_pg_timeout(timeout, group)

    def release(self) -> None:
        """Leaves them to the next stream."""
        self.closed = True
        self.free.set()

    def _wait(self, work: dist.Work) -> None:
        """Waits for a collective, by short waits, since one that has failed elsewhere ends none that is under way."""
        while True:
            try:
                work.wait(_LOOK)
                return
            except RuntimeError:
                if work.is_completed():  # failed, or done just after that wait: the next one tells
                    work.wait()
                    return
            if self.failed:
                raise RuntimeError("another collective or the move of a batch has failed, and with it this one")


def _sizes(table: Bytes) -> NDArray[np.uint32]:
    return table[:, :4].copy().view("<u4")[:, 0]


def _packed(value: Any) -> Bytes:
    data = pickle.dumps(value)
    return np.frombuffer((8 + len(data)).to_bytes(8, "little") + data, np.uint8)


def _unpacked(row: Bytes) -> Any:
    return pickle.loads(row[8 : int(row[:4].view("<u4")[0])].tobytes())


_kept: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Membership, list[Communicators]]] = weakref.WeakKeyDictionary()
_grids: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Membership, NDArray[np.int64]]] = weakref.WeakKeyDictionary()
_taking = threading.Lock()  # by streams that open after each other, of which one may have been interrupted


def take_communicators(membership: Membership, timeout: timedelta) -> Communicators:
    """Those that a closed stream has left, or new ones. Collective: all ranks and their peers call it.

    Not those of a stream of this name: ranks that begin different loaders meet, and hear of it.

    Raises:
        ValueError: If the ranks and their peers are not those of one grid; on all ranks.
        RuntimeError: If not all of them come within the timeout.
        TimeoutError: If the stream that was closed does not end within it.
    """
    world = dist.group.WORLD
    assert world is not None
    gc.collect()  # streams dropped in cycles are closed by now on all ranks, not when each happens to collect them
    with _taking:
        kept = _kept.setdefault(world, {}).setdefault(membership, [])
        existing = next((one for one in kept if one.closed), None)
        if existing is not None:
            if not existing.free.wait(timeout.total_seconds()):
                raise TimeoutError("an earlier loop, whose balancer was closed, has not ended on all ranks")
            if not existing.failed:
                existing.closed = False
                existing.free.clear()
                return existing
            kept.remove(existing)
        kept.append(_make(membership, timeout))
        return kept[-1]


def _make(membership: Membership, timeout: timedelta) -> Communicators:
    with _explained():
        peers = _grid(membership, timeout)
        everyone = tuple(peers.ravel().tolist())
        return Communicators(
            up=make_group(everyone, "gloo", timeout, use="/up"),
            down=make_group(everyone, "gloo", timeout, use="/down"),
            data=make_group(membership.ranks, membership.backend, timeout, use="/data"),
            peers=peers,
            rank=membership.ranks.index(membership.rank),
            peer=membership.peers.index(membership.rank),
        )


def _grid(membership: Membership, timeout: timedelta) -> NDArray[np.int64]:
    """(ranks, peers) all ranks of the job that are in a stream; checked on all of them alike."""
    world = dist.group.WORLD
    assert world is not None
    grids = _grids.setdefault(world, {})
    if membership not in grids:
        column = make_group(membership.ranks, "gloo", timeout, use="/ranks")
        row = make_group(membership.peers, "gloo", timeout, use="/peers") if len(membership.peers) > 1 else None
        of_ranks = _all_gathered(column, membership.peers)
        problem = check_grid(membership, of_ranks, _all_gathered(row, membership.ranks))
        problem = next(filter(None, _all_gathered(column, problem)), "")
        if problem := next(filter(None, _all_gathered(row, problem)), ""):
            raise ValueError(problem)
        grids[membership] = np.array(of_ranks, np.int64)
    return grids[membership]


def _all_gathered(group: dist.ProcessGroup | None, value: Any) -> list[Any]:
    values: list[Any] = [value]
    if group is not None:
        values *= group.size()
        dist.all_gather_object(values, value, group=group)
    return values


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
