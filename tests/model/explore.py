"""Visits every state that a world can reach."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.model.world import Size, State, World


class ViolationError(AssertionError):
    """Something that must hold does not; the message holds the events that lead there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explored:
    """How much there was.

    Attributes:
        states: Distinct states.
        events: Transitions between them; votes that lead to the same are one.
        ends: States in which the job was over on all ranks.
        verdicts: (round, mode, reason) that occurred.
    """

    states: int
    events: int
    ends: int
    verdicts: frozenset[tuple[int, str, str]]


def explore(size: Size, tell: Callable[[int], None] = lambda _states: None, *, symmetric: bool = True) -> Explored:
    """Depth first, every state once.

    Args:
        size: Of the world.
        tell: Is told now and then how many states there are so far.
        symmetric: Visit one of the states that differ only in which rank is which.

    Raises:
        ViolationError: If an invariant fails in a state, or nothing can happen from it although the job is not over; at
            the first such state. Every event either sends, decides or agrees on something for the first time, so
            there are no cycles: a job that can always go on ends.
    """
    world = World(size, symmetric=symmetric)
    first = world.first()
    seen = {world.key(first)}
    came: list[tuple[int, str]] = [(0, "")]
    stack: list[tuple[int, State]] = [(0, first)]
    events = ends = 0
    while stack:
        number, state = stack.pop()
        try:
            world.check(state)
            ended = world.ended(state)
            ends += ended
            moves = 0
            for event, after in [] if ended else world.successors(state):
                moves += 1
                key = world.key(after)
                if key in seen:
                    continue
                seen.add(key)
                stack.append((len(came), after))
                came.append((number, event))
                if len(came) % 10_000 == 0:
                    tell(len(came))
            assert ended or moves, "nothing can happen, and the job is not over"
            events += moves
        except AssertionError as error:
            path = [f"{error}"]
            while number:
                number, event = came[number]
                path.append(event)
            raise ViolationError("\n after ".join(path)) from error
    verdicts = frozenset((number, mode.value, reason) for number, mode, reason in world.agreements.verdicts)
    return Explored(states=len(seen), events=events, ends=ends, verdicts=verdicts)
