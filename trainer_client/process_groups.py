"""Process groups of our own, made by their members alone."""

from __future__ import annotations

import os
import socket
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.constants import default_pg_timeout

# By default group, use and ranks, the same number on all of these ranks.
_made: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[str, tuple[int, ...]]]] = weakref.WeakKeyDictionary()


def node_name() -> str:
    """The host of this rank: `EVENKEEL_NODE`, else the host's name."""
    return os.environ.get("EVENKEEL_NODE") or socket.gethostname()


def make_group(
    ranks: Sequence[int], backend: str, timeout: timedelta | None = None, *, use: str = "", options: Any = None
) -> dist.ProcessGroup:
    """A new process group of some ranks. Collective among them; no other rank takes part.

    Not by `dist.new_group`: where only the members call it, torch names the group by how many groups a rank is in, and
    ranks of different pipeline stages are in different numbers of them; they would wait for each other under different
    names. Here the name counts the groups of these very ranks.

    Args:
        ranks: Its members, as ranks of the default process group, in the same order on all of them.
        backend: `gloo`, `nccl`, or one for each kind of device as in `cpu:gloo,cuda:nccl`.
        timeout: After which a collective of it fails; default: torch's.
        use: What it is for, the same on all of them; groups of the same ranks for other uses may be made meanwhile.
        options: Of NCCL, where that is among the backends.
    """
    world = dist.group.WORLD
    assert world is not None
    members = tuple(ranks)
    made = _made.setdefault(world, Counter())
    made[use, members] += 1
    name: Any = f"evenkeel{use}/{backend}/{'_'.join(map(str, members))}/{made[use, members]}"
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


def all_gather(output: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Gathers every rank's tensor, one after the other in the first dimension of `output`."""
    # renamed in torch 2.13
    function = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    function(output, own, group=group)
