"""Communicators of streams, kept for the next streams of the same ranks when a stream closes.

A communicator holds threads and, with NCCL, device memory, and destroying one is safe only when all its ranks do so
with nothing in flight. So a closed stream leaves its pair behind, and a stream that opens takes one if all ranks have
left it after the same number of rounds and moves, so that what one rank expects cannot meet what another starts.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist


@dataclass(slots=True)
class Communicators:
    """A pair of communicators of the same ranks.

    Attributes:
        serial: Counts the pairs of these ranks.
        control: Gloo, for agreements.
        data: The backend of the parent group, for samples.
        timeout: After which a collective of the pair fails.
        rounds: Agreed on with it so far.
        moves: Redistributions started, and ended, with it so far.
    """

    serial: int
    control: dist.ProcessGroup
    data: dist.ProcessGroup
    timeout: timedelta
    rounds: int = 0
    moves: int = 0

    @property
    def state(self) -> tuple[timedelta, int, int]:
        """What all ranks must find equal before they use it again."""
        return self.timeout, self.rounds, self.moves


@dataclass(slots=True)
class _Shelf:
    """The pairs that streams of a parent group have left on this rank, and where its ranks speak about them."""

    lobby: dist.ProcessGroup
    left: dict[int, Communicators] = field(default_factory=dict)
    made: int = 0


_shelves: weakref.WeakKeyDictionary[dist.ProcessGroup, _Shelf] = weakref.WeakKeyDictionary()
os.register_at_fork(after_in_child=_shelves.clear)


def take(parent: dist.ProcessGroup | None, timeout: timedelta) -> Communicators:
    """A pair that earlier streams have left on every rank, or a new one.

    Collective: every rank of the parent group calls it, in the same order as its other streams.

    Args:
        parent: The ranks, more than one; `None`: the default group.
        timeout: After which a collective of the pair fails; rank 0's holds for all.
    """
    group = parent if parent is not None else dist.group.WORLD
    assert group is not None
    shelf = _shelves.get(group)
    if shelf is None:
        shelf = _shelves[group] = _Shelf(lobby=_new_group(group, "gloo", timeout))
    ready: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(
        ready, (timeout, {serial: pair.state for serial, pair in shelf.left.items()}), group=shelf.lobby
    )
    timeout = ready[0][0]
    serial = _common([states for _, states in ready], timeout)
    if serial is not None:
        return shelf.left.pop(serial)
    shelf.made += 1
    return Communicators(
        serial=shelf.made,
        control=_new_group(group, "gloo", timeout),
        # "cpu:gloo,cuda:nccl" and the like serve both devices and stay as they are.
        data=_new_group(group, str(dist.get_backend(group)), timeout),
        timeout=timeout,
    )


def leave(parent: dist.ProcessGroup | None, pair: Communicators) -> None:
    """Keeps a pair for the next stream. Nothing of it may be in flight on this rank."""
    group = parent if parent is not None else dist.group.WORLD
    shelf = _shelves.get(group) if group is not None else None  # none: the job's groups have ended before
    if shelf is not None:
        shelf.left[pair.serial] = pair


def _common(states: Sequence[dict[int, tuple[timedelta, int, int]]], timeout: timedelta) -> int | None:
    """The first pair that every rank has left in the same state."""
    mine = [serial for serial, state in states[0].items() if state[0] == timeout]
    return min((s for s in mine if all(other.get(s) == states[0][s] for other in states)), default=None)


def _new_group(parent: dist.ProcessGroup, backend: str, timeout: timedelta) -> dist.ProcessGroup:
    ranks = dist.get_process_group_ranks(parent)
    # Subgroups of disjoint ranks may be created at the same time, so only the members take part.
    local = len(ranks) < dist.get_world_size()
    group: dist.ProcessGroup = dist.new_group(
        ranks=ranks, timeout=timeout, backend=backend, use_local_synchronization=local
    )
    return group
