"""Which ranks balance together, and their communicators: contributions go up to the lead, directives come down.

A communicator holds threads and, with NCCL, device memory, and ending one is safe only when all its ranks do so with
nothing in flight. So those of a stream are kept, for the next one, for as long as the default process group lives.
"""

from __future__ import annotations

import gc
import pickle
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.device_mesh import DeviceMesh

from trainer_client.process_groups import make_group

Ranks: TypeAlias = dist.ProcessGroup | DeviceMesh
Bytes: TypeAlias = NDArray[np.uint8]
_ROOM = 1 << 14  # bytes that are received at once; of rows, most have less
_CPU = torch.device("cpu")
_AT_ONCE = timedelta(milliseconds=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """A rank among the ranks of its job; all numbers are those of the default process group."""

    ranks: tuple[int, ...]  # that balance together, ascending, this one among them: a data-parallel group
    peers: tuple[int, ...]  # that train the same batches, in the order of their group or mesh; the first contributes
    backend: str  # of the data-parallel group
    rank: int  # this one
    group_name: str = "default"  # what the service calls these ranks unless the user does

    @property
    def place(self) -> tuple[int, int]:
        """This rank among those that balance together, and how many they are."""
        return self.ranks.index(self.rank), len(self.ranks)


def read_membership(process_group: Ranks | None, peers: Ranks | None) -> Membership:
    """The ranks that a user's process groups or meshes mean, see `Balancer`; one where there is no process group.

    Without `process_group` all ranks balance. Without `peers`, those of the other dimensions of the mesh that it was
    cut from train the same batches; without a mesh, no others. `ValueError` where it is unclear who balances with whom.
    """
    if not (dist.is_available() and dist.is_initialized()):
        if process_group is None and peers is None:
            return Membership(ranks=(0,), peers=(0,), backend="", rank=0)
        raise ValueError("process_group is given, but torch.distributed is not initialised; initialise it first")
    rank = dist.get_rank()
    if process_group is None:
        if peers is not None:
            raise ValueError("peers is given without process_group; pass the data-parallel group too, as mesh['dp']")
        everyone = tuple(range(dist.get_world_size()))
        return Membership(ranks=everyone, peers=(rank,), backend=_backend(dist.group.WORLD), rank=rank)
    if (
        isinstance(process_group, DeviceMesh)
        and process_group.ndim > 1
        and process_group._get_root_mesh() is process_group
    ):
        names = process_group.mesh_dim_names
        example = f"mesh[{names[0]!r}]" if names else "a mesh with mesh_dim_names, cut as mesh['dp']"
        several = f", or mesh[{', '.join(map(repr, names[:-1]))}] for several" if names and len(names) > 2 else ""
        raise ValueError(
            f"process_group is a mesh of the dimensions {_dims(process_group)}; say which of them hold different "
            f"batches: pass {example}{several}, or leave process_group out if all ranks load batches of their own"
        )
    ranks = _ranks("process_group", process_group, rank)
    if peers is not None:
        same = _ranks("peers", peers, rank)
    elif isinstance(process_group, DeviceMesh):
        same = _other_dimensions(process_group, rank)
    else:
        same = (rank,)
    both = sorted(set(ranks) & set(same) - {rank})
    if both:
        raise ValueError(
            f"ranks {both} are in both process_group and peers; peers train the same batches as this rank, those of "
            "process_group others"
        )
    one = process_group.get_group(0) if isinstance(process_group, DeviceMesh) else process_group
    name = "default" if len(ranks) * len(same) == dist.get_world_size() else f"from-rank-{min(ranks)}"
    return Membership(ranks=tuple(sorted(ranks)), peers=same, backend=_backend(one), rank=rank, group_name=name)


def _ranks(field: str, value: Any, rank: int) -> tuple[int, ...]:
    if isinstance(value, DeviceMesh):
        ranks = tuple(value.mesh.flatten().tolist())
    elif isinstance(value, dist.ProcessGroup):
        ranks = tuple(dist.get_process_group_ranks(value))
    else:
        raise ValueError(
            f"{field} is {value!r}; pass a process group that this rank is in, or dimensions of a DeviceMesh"
        )
    if rank not in ranks:
        raise ValueError(f"{field} has the ranks {list(ranks)}, and this is rank {rank}; pass the group that it is in")
    return ranks


def _other_dimensions(mesh: DeviceMesh, rank: int) -> tuple[int, ...]:
    """The ranks that differ from this one only in dimensions that `mesh` was not cut from."""
    root: DeviceMesh = mesh._get_root_mesh()
    if root is mesh or root.size() == mesh.size():
        return (rank,)
    names, all_names = mesh.mesh_dim_names or (), root.mesh_dim_names or ()
    if not names or not set(names) <= set(all_names):
        raise ValueError(
            f"process_group is a mesh of the dimensions {_dims(mesh)}, and it cannot be told which other ranks train "
            "the same batches; pass them as peers, such as peers=mesh['tp'], or process_group=mesh.get_group() if none "
            "does"
        )
    coordinate = root.get_coordinate()
    assert coordinate is not None
    at = tuple(index if name in names else slice(None) for name, index in zip(all_names, coordinate, strict=True))
    return tuple(root.mesh[at].flatten().tolist())


def _dims(mesh: DeviceMesh) -> str:
    names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
    return ", ".join(f"{name} ({size})" for name, size in zip(names, mesh.mesh.shape, strict=True))


def _backend(group: dist.ProcessGroup | None) -> str:
    # "cpu:gloo,cuda:nccl" and the like serve both devices and stay as they are.
    return str(dist.get_backend(group))


@dataclass(eq=False)
class Communicators:
    """Those of one stream; a rank alone has none to speak of.

    Rows go from rank to rank, not by Gloo's `gather` and `scatter`: threads of Gloo's own do these, and each hand-over
    costs a small message more than its way does. In one communicator rows arrive in the order in which they were sent.
    """

    up: Any  # Gloo, for contributions; used by one thread
    down: Any  # Gloo, for directives; used by one thread
    data: dist.ProcessGroup | None  # for samples; of the data-parallel group's backend, in the order of the program
    peers: NDArray[np.int64]  # (ranks, peers) the job's ranks, in the order of `up`: those of a row train copies
    rank: int  # this one, among those that balance together
    peer: int  # which of a row this one is; the first contributes
    timeout: timedelta = timedelta(0)  # for which a rank is waited for
    closed: bool = False  # the stream that used them has been: at the same point of the program on all ranks
    free: threading.Event = field(default_factory=threading.Event)  # set once nothing of that stream is in flight
    failed: bool = False  # a collective has; they are of no use any more, and nobody waits for one
    _sent: deque[list[dist.Work]] = field(default_factory=deque)  # of rows that the lead may not have taken yet

    @property
    def leads(self) -> bool:
        """Whether this rank decides."""
        return self.rank == 0 and self.peer == 0

    def send(self, row: Bytes) -> None:
        """Sends a byte string, whose first four bytes tell its length, to the lead, which gathers it. On `up`.

        Waits for nobody; see `flush`.
        """
        with explained():
            self._sent.append([self.up.send([part], 0, 0) for part in _parts(row)])

    def flush(self, rows: int = 0) -> None:
        """Waits until the lead has taken what this rank has sent, but for so many rows."""
        with explained():
            while len(self._sent) > rows:
                for work in self._sent.popleft():
                    work.wait(self.timeout)

    def gather(self, row: Bytes) -> Bytes:
        """(ranks × peers, width) the byte strings of all ranks, at the lead, whose own is `row`; then anything."""
        ranks = self.peers.ravel().tolist()
        table = np.empty((len(ranks), max(_ROOM, len(row))), np.uint8)
        table[0, : len(row)] = row
        rows = torch.from_numpy(table[:, :_ROOM]).unbind()
        with explained():
            works = [self.up.recv([rows[at]], at, 0) for at in range(1, len(rows))]
        for rank, work in zip(ranks[1:], works, strict=True):
            with explained(f"rank {rank}"):
                work.wait(self.timeout)
        sizes = table[:, :4].copy().view("<u4")[:, 0]
        if (width := int(sizes.max())) > table.shape[1]:
            table = np.concatenate([table, np.empty((len(table), width - table.shape[1]), np.uint8)], axis=1)
        for at in (np.flatnonzero(sizes[1:] > _ROOM) + 1).tolist():
            with explained(f"rank {ranks[at]}"):
                self.up.recv([torch.from_numpy(table[at, _ROOM : sizes[at]])], at, 0).wait(self.timeout)
        return table

    def scatter(self, table: Bytes | None) -> Bytes:
        """A row of the lead's table for each rank, the same for its peers; None elsewhere. Collective on `down`."""
        with explained():
            if table is None:
                row = np.empty(_ROOM, np.uint8)
                self.down.recv([torch.from_numpy(row)], 0, 0).wait(self.timeout)
                if (size := int(row[:4].view("<u4")[0])) > _ROOM:
                    row = np.concatenate([row, np.empty(size - _ROOM, np.uint8)])
                    self.down.recv([torch.from_numpy(row[_ROOM:])], 0, 0).wait(self.timeout)
                return row
            num_peers = self.peers.shape[1]
            sent = [
                self.down.send([part], at, 0)
                for at in range(1, self.peers.size)
                for part in _parts(table[at // num_peers])
            ]
            for work in sent:
                work.wait(self.timeout)
            lead: Bytes = table[0]
            return lead

    def gather_objects(self, value: Any) -> list[Any] | None:
        """The values of all ranks and their peers at the lead; None elsewhere. Collective on `up`."""
        if self.up is None:
            return [value]
        if self.leads:
            return [_unpacked(row) for row in self.gather(_packed(value))]
        self.send(_packed(value))
        return None

    def broadcast_object(self, value: Any) -> Any:
        """The lead's value. Collective on `down`."""
        if self.up is None:
            return value
        table = np.tile(_packed(value), (len(self.peers), 1)) if self.leads else None
        return _unpacked(self.scatter(table))

    def set_timeout(self, timeout: timedelta) -> None:
        """After which a collective fails."""
        self.timeout = timeout
        dist.distributed_c10d._set_pg_timeout(timeout, self.data)

    def fail(self) -> None:
        """Ends all that is under way between the ranks, here and on the others."""
        if self.failed or self.up is None:
            return
        self.failed = True
        for group in (self.up, self.down):
            with suppress(RuntimeError):  # by which Gloo gives up its connections
                group.recv([torch.empty(1, dtype=torch.uint8)], 0 if self.rank or self.peer else 1, 1).wait(_AT_ONCE)

    def release(self) -> None:
        """Leaves them to the next stream."""
        self.closed = True
        self.free.set()


def _parts(row: Bytes) -> list[torch.Tensor]:
    """A byte string as it is sent: what fits where nobody knows its length yet, and the rest."""
    size, whole = int(row[:4].view("<u4")[0]), torch.from_numpy(row)
    return [whole[:size]] if size <= _ROOM else [whole[:_ROOM], whole[_ROOM:size]]


def _packed(value: Any) -> Bytes:
    data = pickle.dumps(value)
    return np.frombuffer(bytearray((8 + len(data)).to_bytes(8, "little") + data), np.uint8)


def _unpacked(row: Bytes) -> Any:
    return pickle.loads(row[8 : int(row[:4].view("<u4")[0])].tobytes())


_kept: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Membership, list[Communicators]]] = weakref.WeakKeyDictionary()
_taking = threading.Lock()  # by streams that open after each other, of which one may have been interrupted


def take_communicators(membership: Membership | None, timeout: timedelta) -> Communicators:
    """Those that a closed stream has left, or new ones; None is a rank alone. Collective: all ranks and peers call it.

    Not those of a stream of this name: ranks that begin different loaders meet, and hear of it. `ValueError` on all
    ranks if they and their peers are not those of one grid.
    """
    if membership is None:
        return Communicators(up=None, down=None, data=None, peers=np.zeros((1, 1), np.int64), rank=0, peer=0)
    world = dist.group.WORLD
    assert world is not None
    gc.collect()  # streams dropped in cycles are closed by now on all ranks, not when each happens to collect them
    with _taking:
        kept = _kept.setdefault(world, {}).setdefault(membership, [])
        peers = kept[0].peers if kept else None
        existing = next((one for one in kept if one.closed), None)
        if existing is not None:
            if not existing.free.wait(timeout.total_seconds()):
                raise TimeoutError("an earlier loop, whose balancer was closed, has not ended on all ranks")
            if not existing.failed:
                existing.closed = False
                existing.free.clear()
                return existing
            kept.remove(existing)
        kept.append(_make(membership, timeout, peers))
        return kept[-1]


def _make(membership: Membership, timeout: timedelta, peers: NDArray[np.int64] | None) -> Communicators:
    with explained():
        peers = _grid(membership, timeout) if peers is None else peers
        everyone = tuple(peers.ravel().tolist())
        return Communicators(
            up=make_group(everyone, "gloo", timeout, use="/up")._get_backend(_CPU),
            down=make_group(everyone, "gloo", timeout, use="/down")._get_backend(_CPU),
            data=make_group(membership.ranks, membership.backend, timeout, use="/data"),
            peers=peers,
            rank=membership.place[0],
            peer=membership.peers.index(membership.rank),
            timeout=timeout,
        )


def _check_grid(mine: Membership, peers_of_ranks: list[tuple[int, ...]], ranks_of_peers: list[tuple[int, ...]]) -> str:
    """What is wrong if data-parallel groups and peers do not cross like rows and columns of one grid; empty: nothing.

    Given are `peers` of each of `mine.ranks`, and `ranks` of each of `mine.peers`.
    """
    if len({len(peers) for peers in peers_of_ranks}) == 1:
        across = [tuple(peers[at] for peers in peers_of_ranks) for at in range(len(mine.peers))]
        if across == ranks_of_peers:
            return ""
    return (
        f"process_group and peers of rank {mine.rank} do not fit those of others: it balances with {list(mine.ranks)}, "
        f"which have the peers {list(map(list, peers_of_ranks))}, while its own peers {list(mine.peers)} balance with "
        f"{list(map(list, ranks_of_peers))}; pass two dimensions of one mesh on all ranks, such as mesh['dp'] and "
        "mesh['tp']"
    )


def _grid(membership: Membership, timeout: timedelta) -> NDArray[np.int64]:
    """(ranks, peers) all ranks of the job that are in a stream; checked on all of them alike."""
    column = make_group(membership.ranks, "gloo", timeout, use="/ranks")
    row = make_group(membership.peers, "gloo", timeout, use="/peers") if len(membership.peers) > 1 else None
    of_ranks = _all_gathered(column, membership.peers)
    problem = _check_grid(membership, of_ranks, _all_gathered(row, membership.ranks))
    problem = next(filter(None, _all_gathered(column, problem)), "")
    if problem := next(filter(None, _all_gathered(row, problem)), ""):
        raise ValueError(problem)
    return np.array(of_ranks, np.int64)


def _all_gathered(group: dist.ProcessGroup | None, value: Any) -> list[Any]:
    values: list[Any] = [value]
    if group is not None:
        values *= group.size()
        dist.all_gather_object(values, value, group=group)
    return values


_OTHERS = (
    "The ranks that balance together could not go on: {} has ended or failed, as its own log says, or did not begin "
    "this loop within BalanceOptions.group_timeout; all ranks run the same loops in the same order. Start the job "
    "again from its last checkpoint."
)
_WORKER_DIED = (
    "A worker of this rank's DataLoader died while the ranks that balance together met, often because the "
    "machine had no memory left; the other ranks wait for this one until BalanceOptions.group_timeout, unless its "
    "process ends. Let it end, and start the job again with fewer workers, or with less that each of them holds."
)


@contextmanager
def explained(who: str = "another rank") -> Iterator[None]:
    """Says of a collective that has failed what else than the network it may come from."""
    try:
        yield
    except RuntimeError as error:
        text = _WORKER_DIED if str(error).startswith("DataLoader worker") else _OTHERS.format(who)
        raise RuntimeError(f"{text} ({error})") from error
