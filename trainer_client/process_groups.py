"""Process groups of our own, made by their members alone."""

from __future__ import annotations

import os
import secrets
import socket
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.constants import default_pg_timeout

# By default group, use and ranks: names of groups to come, the same on all of these ranks.
_names: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, tuple[int, ...]], Iterator[str]]] = (
    weakref.WeakKeyDictionary()
)


def node_name() -> str:
    """The host of this rank: `EVENKEEL_NODE`, else the host's name."""
    return os.environ.get("EVENKEEL_NODE") or socket.gethostname()


def make_group(
    ranks: Sequence[int], backend: str, timeout: timedelta | None = None, *, use: str = "", options: Any = None
) -> dist.ProcessGroup:
    """A new process group of some ranks. Collective among them; no other rank takes part.

    Not by `dist.new_group`: where only the members call it, torch names the group by how many groups a rank is in, and
    ranks of different pipeline stages are in different numbers of them; they would wait for each other under different
    names. Here the name counts the groups of these very ranks, after a word that they agree on (`_agreed`).

    Args:
        ranks: Its members, as ranks of the default process group, in the same order on all of them.
        backend: `gloo`, `nccl`, or one for each kind of device as in `cpu:gloo,cuda:nccl`.
        timeout: After which a collective of it fails, and a member that does not come is named; Gloo waits five times
            as long for one that ends while they connect. Default: torch's.
        use: What it is for, the same on all of them; groups of the same ranks for other uses may be made meanwhile.
        options: Of NCCL, where that is among the backends.

    Raises:
        RuntimeError: If not all of them have come within the timeout.
    """
    world = dist.group.WORLD
    assert world is not None
    members = tuple(ranks)
    names = _names.setdefault(world, {})
    if (use, members) not in names:
        agreed = _agreed(f"evenkeel{use}", members, timeout or default_pg_timeout)
        names[use, members] = (f"{agreed}/{number}" for number in count(1))
    name: Any = next(names[use, members])
    with _apart(world) if len(members) < dist.get_world_size() else nullcontext():
        group: dist.ProcessGroup
        group, _ = distributed_c10d._new_process_group_helper(
            len(members),
            members.index(dist.get_rank()),
            list(members),
            dist.Backend(backend),
            distributed_c10d._get_default_store(),
            group_name=name,
            backend_options=options,
            timeout=timeout or default_pg_timeout,
        )
    distributed_c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(members)}
    return group


def _agreed(use: str, members: tuple[int, ...], timeout: timedelta) -> str:
    """A name that the members share and that nobody has used before, found through the store.

    The store may be older than this process: torchrun's agent keeps it over restarts with a fixed `--master-port`, and
    with it the addresses of the dead, which Gloo would take for those of its members. The count of restarts does not
    tell attempts apart, as agents of one job count differently. So every rank draws a number: a member writes its own
    and waits for an answer to that very number, which holds the first member's.
    """
    store = distributed_c10d._get_default_store()
    mine, first = dist.get_rank(), members[0]
    folder, number = f"{use}/{'_'.join(map(str, members))}", secrets.token_hex(8)
    deadline = time.monotonic() + timeout.total_seconds()
    if mine != first:
        store.set(f"{folder}/{mine}", number)
        answer = f"{folder}/{mine}/{number}"
        _wait(lambda: () if store.check([answer]) else (first,), deadline, folder, timeout)
        number = store.get(answer).decode()
        store.set(f"{folder}/{mine}/{number}", number)
        return f"{folder}/{number}"
    answered: dict[int, str | None] = {}

    def missing() -> Sequence[int]:
        late = [rank for rank in members[1:] if not store.check([f"{folder}/{rank}/{number}"])]
        for rank in late:
            asked = store.get(f"{folder}/{rank}").decode() if store.check([f"{folder}/{rank}"]) else None
            if asked != answered.get(rank):  # what a dead attempt has asked is overwritten by the living rank
                store.set(f"{folder}/{rank}/{asked}", number)
                answered[rank] = asked
        return late

    _wait(missing, deadline, folder, timeout)
    return f"{folder}/{number}"


def _wait(missing: Callable[[], Sequence[int]], deadline: float, name: str, timeout: timedelta) -> None:
    """Asks until no rank is missing. By short questions, since one that waits would keep other threads off the store.

    Raises:
        RuntimeError: If that does not come by the deadline.
    """
    pause = 0.001
    while late := missing():
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"ranks {', '.join(map(str, late[:8]))}{', …' if len(late) > 8 else ''} did not come to the process "
                f"group {name} within {timeout.total_seconds():g} s"
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.05)


@contextmanager
def _apart(world: dist.ProcessGroup) -> Iterator[None]:
    """Keeps NCCL from splitting the communicator of all ranks, in which all of them would have to take part.

    It does so where the default group is bound to a device, as by `init_process_group(device_id=…)`.
    """
    bound = world.bound_device_id
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = bound


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """How long a group's collectives may take; None, the backend's default, where it does not tell."""
    for device in ("cuda", "cpu"):
        try:
            timeout = group._get_backend(torch.device(device)).options._timeout
        except (RuntimeError, AttributeError):
            continue
        assert isinstance(timeout, timedelta)
        return timeout
    return None
