"""Communicators of streams, kept for the next streams of the same ranks when a stream closes.

A communicator holds threads and, with NCCL, device memory, and destroying one is safe only when all its ranks do so
with nothing in flight. So a closed stream leaves its pair behind, and a stream that opens takes one if all ranks have
left it after the same number of rounds and moves, so that what one rank expects cannot meet what another starts.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from trainer_client.balancing.membership import Membership, check_grid
from trainer_client.balancing.peers import PeerGroup
from trainer_client.process_groups import make_group


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
