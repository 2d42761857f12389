"""A small world of the protocol: every order in which its threads can take their steps, with the real decisions.

Each rank has a loop that submits, some thread that contributes and one that follows directives; the lead has one that
gathers. What they do is a step of the real `Clock` and of the real `decide`; collectives and queues are modelled, as
anything may overtake anything else but in one communicator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

import numpy as np

from evenkeel.partitioning.rounds import RankSamples
from trainer_client.balancing.contribution import Contribution, Contributions, State
from trainer_client.balancing.decide import Decision, Rules, decide
from trainer_client.balancing.report import Mode
from trainer_client.balancing.rounds import Clock

T = TypeVar("T")
UNTIL = "until"


def _copied(one: T, **changes: Any) -> T:
    """As `dataclasses.replace`, which takes most of the time of a visit."""
    made = object.__new__(type(one))
    vars(made).update(vars(one), **changes)
    return made


@dataclass(frozen=True, slots=True)
class Program:
    """What a rank does in one pass."""

    batches: int  # that it has
    leaves: int | None = None  # after how many batches it leaves its loop; None: at the end


Item = tuple[int, State]
"""Pass, and what is contributed."""


@dataclass
class Rank:
    """A rank's loop and its threads."""

    clock: Clock  # of its rounds
    pass_index: int = 0  # which of its programs it is in
    pass_number: int | None = None  # of that pass, as the clock has counted it; None before its first submission
    submitted: int = 0  # items of this pass
    taken: int = 0  # of this pass
    left: bool = False  # it has left its loop, and waits for the end
    # rounds whose batches it has trained, of all passes, with what it contributed to each
    trained: tuple[tuple[int, State], ...] = ()
    queue: tuple[tuple[str, int] | Item, ...] = ()  # items, and ends of void rounds, that nobody has looked at
    to_gather: tuple[tuple[int, Item | None], ...] = ()  # (number, item) of rounds that the lead has not gathered
    sent: tuple[tuple[int, Item | None], ...] = ()  # (number, item) that the thread which follows has not looked at
    in_flight: tuple[int, ...] = ()  # items of this pass whose directives the loop has not seen, by submission
    arrived: tuple[tuple[int, bool], ...] = ()  # (round, whether it ended the pass), not seen by the loop yet
    gathers: int = 0  # contributions sent: the same one on all ranks is the same round
    number: int = -1  # of its state; -1 where that is not known

    def key(self, numbers: dict[tuple[object, ...], int]) -> int:
        """What tells states apart, as a number: worlds share ranks that have taken no step, which are asked once."""
        if self.number >= 0:
            return self.number
        clock = self.clock
        key = (
            clock.next_up, clock.done, clock.void_until, clock.pass_number, self.pass_index, self.pass_number,
            self.submitted, self.taken, self.left, self.trained, self.queue, self.to_gather, self.sent, self.in_flight,
            self.arrived,
        )  # fmt: skip
        self.number = numbers.setdefault(key, len(numbers))
        return self.number


@dataclass
class World:
    """All ranks, and what has passed between them."""

    programs: tuple[tuple[Program, ...], ...]  # of each rank, by pass
    ranks: list[Rank]  # their states
    decides: Callable[[tuple[State, ...]], Decision]
    # by round, what each rank has contributed
    contributed: dict[int, tuple[Item | None, ...]] = field(default_factory=dict)
    directives: dict[int, Decision] = field(default_factory=dict)  # by round, what the lead has sent
    decided: dict[int, Decision] = field(default_factory=dict)
    failures: int = 0  # rounds that the lead may still fail to plan, so that all ranks raise

    def key(self, numbers: dict[tuple[object, ...], int]) -> tuple[object, ...]:
        """What tells states apart; each state of a rank has its number."""
        return (
            *(rank.key(numbers) for rank in self.ranks), frozenset(self.contributed.items()),
            *(frozenset((n, one.mode, one.last) for n, one in of.items()) for of in (self.directives, self.decided)),
            self.failures,
        )  # fmt: skip

    def copy(self, index: int) -> World:
        """One in which a rank can take a step; all else is shared, and replaced where it changes."""
        ranks = [*self.ranks]
        ranks[index] = _copied(ranks[index], number=-1)
        return _copied(self, ranks=ranks)

    @property
    def over(self) -> bool:
        """Whether all ranks are through with all of their passes, and nothing is under way."""
        return all(
            rank.pass_index == len(self.programs[0]) and not (rank.queue or rank.to_gather or rank.sent)
            for rank in self.ranks
        )

    def check(self) -> None:
        """What must hold in every state."""
        shortest = min(len(rank.trained) for rank in self.ranks)
        rounds = {tuple(number for number, _ in rank.trained[:shortest]) for rank in self.ranks}
        assert len(rounds) == 1, "ranks train different rounds"
        for rank in self.ranks:
            assert rank.gathers == rank.clock.next_up, "a rank takes another rank's round for its own"
        for number, items in self.contributed.items():
            passes = {item[0] for item in items if item is not None and item[0] >= 0}
            takes_place = number in self.directives
            assert not takes_place or len(passes) == 1, f"round {number} is of different passes: {items}"

    def successors(self) -> Iterator[tuple[str, World]]:
        """Every step that some thread can take, and the world after it; one alone where it commutes with all others."""
        for index, rank in enumerate(self.ranks):
            if rank.arrived:  # whatever else happens, before or after: the loop sees it, and cannot leave before
                after = self.copy(index)
                _loop(after, index)
                yield f"loop of rank {index}", after
                return
        if self.ranks[0].to_gather and _gather(after := self.copy(0)):  # what comes of it is seen in later steps only
            yield "gather", after
            return
        for index in range(len(self.ranks)):
            for name, step in (("loop", _loop), ("leave", _leave), ("up", _up), ("down", _down)):
                after = self.copy(index)
                if step(after, index):
                    yield f"{name} of rank {index}", after
        if self.failures:
            pending = [number for number in self.decided if number not in self.directives]
            for number in pending[:1]:
                if self.decided[number].mode is not Mode.END:
                    failed = Decision(mode=Mode.END, error=RuntimeError("a plan failed"))
                    after = _copied(self, failures=self.failures - 1, decided={**self.decided, number: failed})
                    yield f"round {number} fails", after


def _loop(world: World, index: int) -> bool:
    """The training thread submits, or sees a directive."""
    rank = world.ranks[index]
    if rank.pass_index == len(world.programs[index]):
        return False
    program = world.programs[index][rank.pass_index]
    if rank.pass_number is None:
        rank.pass_number = rank.clock.pass_number
    if rank.arrived:  # in the order of submission
        (number, ends), *rest = rank.arrived
        rank.arrived, rank.in_flight = tuple(rest), rank.in_flight[1:]
        if ends:
            rank.pass_index, rank.pass_number = rank.pass_index + 1, None
            rank.submitted = rank.taken = 0
            rank.left, rank.in_flight, rank.arrived = False, (), ()
        else:
            state = State.DATA if rank.taken < program.batches else State.EXHAUSTED
            rank.taken += 1
            rank.trained = (*rank.trained, (number, state))
        return True
    if rank.left:
        return False
    if len(rank.in_flight) < rank.clock.depth:
        state = State.DATA if rank.submitted < program.batches else State.EXHAUSTED
        rank.queue = (*rank.queue, (rank.pass_number, state))
        rank.in_flight = (*rank.in_flight, rank.submitted)
        rank.submitted += 1
        return True
    return False


def _leave(world: World, index: int) -> bool:
    """The training thread leaves its loop, at any time from the batch on after which its program says so."""
    rank = world.ranks[index]
    if rank.left or rank.pass_index == len(world.programs[index]):
        return False
    program = world.programs[index][rank.pass_index]
    if program.leaves is None or rank.taken < program.leaves or rank.arrived:
        return False
    if rank.pass_number is None:
        rank.pass_number = rank.clock.pass_number
    rank.left = True
    rank.queue = (*rank.queue, (rank.pass_number, State.LEFT))
    rank.in_flight = (*rank.in_flight, rank.submitted)
    return True


def _up(world: World, index: int) -> bool:
    """Whoever contributes."""
    rank = world.ranks[index]
    if not rank.queue:
        return False
    head, *rest = rank.queue
    if head[0] == UNTIL:
        if rank.clock.next_up >= head[1]:
            rank.queue = tuple(rest)
            return True
        _contribute(world, index, None)
        return True
    if rank.clock.is_over(head[0]):
        rank.queue, rank.arrived = tuple(rest), _arrived(rank, head, -1, ends=True)
        return True
    if not rank.clock.is_free:
        return False
    _contribute(world, index, head)
    rank.queue = tuple(rest)
    return True


def _contribute(world: World, index: int, item: Item | None) -> None:
    rank = world.ranks[index]
    rank.clock = copy(rank.clock)
    number = rank.clock.contributed()
    items = list(world.contributed.get(number, (None,) * len(world.ranks)))
    items[index] = item if item is not None else (-1, State.NOTHING)
    world.contributed = {**world.contributed, number: tuple(items)}
    rank.gathers += 1
    if index == 0:
        rank.to_gather = (*rank.to_gather, (number, item))
    else:
        rank.sent = (*rank.sent, (number, item))


def _gather(world: World) -> bool:
    """The lead's thread that waits for the contributions of all."""
    rank = world.ranks[0]
    if not rank.to_gather:
        return False
    first, *rest = rank.to_gather
    states = tuple(one[1] for one in world.contributed[first[0]] if one is not None)
    if len(states) < len(world.ranks):
        return False
    rank.to_gather, rank.sent = tuple(rest), (*rank.sent, first)
    if rank.clock.takes_place(first[0]):
        world.decided = {**world.decided, first[0]: world.decides(states)}
    return True


def _down(world: World, index: int) -> bool:
    """The thread that follows directives; the lead's sends them."""
    rank = world.ranks[index]
    if not rank.sent:
        return False
    (number, item), *rest = rank.sent
    if not rank.clock.takes_place(number):
        rank.sent = tuple(rest)
        if item is not None:
            rank.arrived = _arrived(rank, item, number, ends=True)
        return True
    if index == 0:
        world.directives = {**world.directives, number: world.decided[number]}
    if number not in world.directives:
        return False
    decision, rank.sent = world.directives[number], tuple(rest)
    rank.clock = copy(rank.clock)
    rank.clock.directed(number, ends=decision.ends)
    if decision.ends:
        rank.queue = (*rank.queue, (UNTIL, rank.clock.void_until))
    if item is not None:
        rank.arrived = _arrived(rank, item, number, ends=decision.mode is Mode.END)
    return True


def _arrived(rank: Rank, item: Item, number: int, *, ends: bool) -> tuple[tuple[int, bool], ...]:
    """What the loop is to see; of a pass that it is no longer in, nothing."""
    return (*rank.arrived, (number, ends)) if item[0] == rank.pass_number else rank.arrived


@cache
def really(states: tuple[State, ...]) -> Decision:
    """What the real `decide` makes of ranks in such states, each with a sample where it has data."""
    samples = RankSamples(costs=np.array([7]), lengths=np.array([[3]]), sizes=np.array([3]), batch_sizes=(1,))
    said = [
        Contribution(state=state, samples=samples, schema=1) if state is State.DATA else Contribution(state=state)
        for state in states
    ]
    return decide(Contributions.of(said), Rules(name="train"))


class ViolationError(AssertionError):
    """Something that must hold does not; the message has the events that lead there."""


def explore(
    programs: tuple[tuple[Program, ...], ...],
    *,
    depth: int,
    failures: int = 0,
    clock: type[Clock] = Clock,
    decides: Callable[[tuple[State, ...]], Decision] = really,
) -> tuple[int, int]:
    """Visits every state that a world can reach; returns how many, and how many steps there were.

    Args:
        programs: Of each rank, by pass.
        depth: Rounds under way at most.
        failures: Rounds that the lead fails to plan, anywhere.
        clock: The rules of rounds, or broken ones.
        decides: The rules of decisions, or broken ones.

    Raises:
        ViolationError: If an invariant fails, or nothing can happen although the job is not over.
    """
    first = World(programs, [Rank(clock(depth)) for _ in programs], decides, failures=failures)
    numbers: dict[tuple[object, ...], int] = {}
    seen = {first.key(numbers)}
    came: list[tuple[int, str]] = [(0, "")]
    stack: list[tuple[int, World]] = [(0, first)]
    steps = 0
    while stack:
        number, world = stack.pop()
        try:
            world.check()
            moves = 0
            for event, after in world.successors():
                moves += 1
                key = after.key(numbers)
                if key not in seen:
                    seen.add(key)
                    stack.append((len(came), after))
                    came.append((number, event))
            assert moves or world.over, "nothing can happen, and the job is not over"
            steps += moves
        except AssertionError as error:
            path = [str(error)]
            while number:
                number, event = came[number]
                path.append(event)
            raise ViolationError("\n after ".join(path)) from error
    return len(seen), steps
