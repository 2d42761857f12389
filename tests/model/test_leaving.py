"""Programs that leave their loops anywhere: no rank waits for ever, and no sample is lost, doubled or mixed up."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.model.threads import World
from trainer_client import BalancedLoader, BalanceOptions
from trainer_client.balancing import decide, stream
from trainer_client.balancing.contribution import State
from trainer_client.balancing.stream import Pass

MOST = 6  # batches of a loop
PATIENCE = 120.0  # seconds that a right program is waited for: a starved machine may need many


class BrokenSourceError(Exception):
    """A source has nothing more to give."""


@dataclass(frozen=True, slots=True)
class Loop:
    """What each rank does in one loop.

    Attributes:
        steps: Batches that it has.
        leaves: After how many batches it leaves; more than it gets: never.
        how: By which way: 0 break, 1 an exception, 2 its source raises, 3 an iterator that stays alive.
        inner: After which of its first batches another loader is iterated, by all ranks; and how far by each.
        pauses: Milliseconds that a step takes.
    """

    steps: tuple[int, ...]
    leaves: tuple[int, ...]
    how: tuple[int, ...]
    inner: tuple[int, ...] | None
    pauses: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """Loops, one after the other."""

    ranks: int
    depth: int
    window: int
    loops: tuple[Loop, ...]


def of_ranks(ranks: int, values: st.SearchStrategy[int]) -> st.SearchStrategy[tuple[int, ...]]:
    return st.tuples(*[values] * ranks)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    ranks = draw(st.integers(2, 3))
    loops = st.builds(
        Loop,
        of_ranks(ranks, st.integers(0, MOST)),
        of_ranks(ranks, st.integers(0, MOST + 3)),
        of_ranks(ranks, st.integers(0, 3)),
        st.none() | of_ranks(ranks, st.integers(0, 4)),
        of_ranks(ranks, st.sampled_from([0, 0, 1, 5])),
    )
    return Program(
        ranks, draw(st.integers(1, 3)), draw(st.integers(1, 2)), tuple(draw(st.lists(loops, min_size=1, max_size=4)))
    )


def batch_of(rank: int, loop: int, step: int) -> dict[str, torch.Tensor]:
    """Samples that tell where they come from; heavy ones on one rank in turn, so that some move in most rounds."""
    ids = torch.arange(3) + 10 * rank + 100 * step + 10_000 * loop
    return {"id": ids, "cost": (ids % 10 + 1) * (40 if (step + loop) % 3 == rank else 1)}


def source(rank: int, loop: int, steps: int, raises_after: int | None = None) -> Iterator[dict[str, torch.Tensor]]:
    for step in range(steps):
        if step == raises_after:
            raise BrokenSourceError
        yield batch_of(rank, loop, step)


Ledger = dict[int, list[list[int]]]
"""Ids that a rank got, batch by batch, by loop; inner loops have numbers of their own."""


def run(program: Program, world: World, seconds: float = PATIENCE) -> list[Ledger | BaseException]:
    quarter = timedelta(seconds=seconds / 4)
    options = BalanceOptions(depth=program.depth, window=program.window, timeout=quarter, group_timeout=quarter)

    def rank_program(rank: int) -> Ledger:
        ledger: Ledger = {}
        held = []
        with world.balancer(rank, options) as balancer:

            def loader(number: int, steps: int, name: str = "train", raises_after: int | None = None) -> Any:
                ledger[number] = []
                batches = _Again(rank, number, steps, raises_after)
                return BalancedLoader(batches, balancer, cost=lambda batch: batch["cost"], name=name)

            for name in ("train", "inner"):  # what comes before the streams are open is another test's subject
                assert len([*loader(-1, 1, name)]) == 1
            for number, loop in enumerate(program.loops):
                leaves, how = loop.leaves[rank], loop.how[rank]
                iterator = iter(loader(number, loop.steps[rank], raises_after=leaves if how == 2 else None))
                try:
                    for taken, batch in enumerate(iterator):
                        time.sleep(loop.pauses[rank] / 1000)
                        ledger[number].append(batch["id"].tolist())
                        if loop.inner is not None and taken == 0:
                            inner = iter(loader(1000 + number, 3, name="inner"))
                            ledger[1000 + number] += [
                                b["id"].tolist() for b, _ in zip(inner, range(loop.inner[rank]), strict=False)
                            ]
                            del inner
                        if taken + 1 >= leaves and how != 2:
                            if how == 1:
                                raise KeyError
                            if how == 3:
                                held.append(iterator)
                            break
                except (KeyError, BrokenSourceError):
                    pass
                del iterator
        return ledger

    return world.run(rank_program)


@dataclass(slots=True)
class _Again:
    rank: int
    loop: int
    steps: int
    raises_after: int | None

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return source(self.rank, self.loop, self.steps, self.raises_after)


def check(program: Program, results: list[Any]) -> None:
    failures = [result for result in results if isinstance(result, BaseException)]
    if failures:
        raise failures[0]
    for number in range(len(program.loops)):
        batches = [result[number] for result in results]
        trained = [sample for steps in batches for ids in steps for sample in ids]
        assert len(trained) == len(set(trained)), "a sample was trained twice"
        assert {sample // 10_000 for sample in trained} <= {number}, "a sample of another loop"
        loop = program.loops[number]
        common = min(map(len, batches)) // program.window * program.window
        for step in range(0, common, program.window):
            window = range(step, step + program.window)
            got = sorted(sample for steps in batches for ids in steps[step : step + program.window] for sample in ids)
            assert got == sorted(
                int(sample)
                for rank in range(program.ranks)
                for each in window
                if each < loop.steps[rank]
                for sample in batch_of(rank, number, each)["id"]
            ), "a sample was lost"
        if all(leaves > max(loop.steps) for leaves in loop.leaves):
            assert {len(steps) for steps in batches} == {max(loop.steps)}


def nests_alike(program: Program) -> bool:
    """Whether all ranks come to the inner loops, which a program must see to itself."""
    return all(
        loop.inner is None or (min(loop.steps) > 0 and min(loop.leaves) > 0 and 2 not in loop.how)
        for loop in program.loops
    )


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(programs().filter(nests_alike))
def test_programs_that_leave_their_loops_anywhere(program: Program) -> None:
    world = World(program.ranks, seconds=PATIENCE)
    check(program, run(program, world))
    assert world.in_flight == 0


def sources_fail_at_first(rank: int, world: World) -> list[Any]:
    got = []
    with world.balancer(rank, BalanceOptions(group_timeout=timedelta(seconds=PATIENCE))) as balancer:
        for loop in range(4):
            batches = _Again(rank, loop, 3, 0 if loop < rank else None)
            try:
                loader = BalancedLoader(batches, balancer, cost=lambda batch: batch["cost"])
                got.append([sample // 10_000 for batch in loader for sample in batch["id"].tolist()])
            except BrokenSourceError:
                got.append([])
    return got


def test_loops_that_some_ranks_leave_before_the_stream_is_open_count_as_loops() -> None:
    world = World(3, seconds=PATIENCE)
    results = world.run(lambda rank: sources_fail_at_first(rank, world))
    for loop, samples in enumerate(zip(*results, strict=True)):
        assert {sample for each in samples for sample in each} == ({loop} if loop > 1 else set()), results
    assert sum(map(len, (result[3] for result in results))) == 27


LEAVES = Program(2, 2, 1, tuple(Loop((6, 6), (3 - i % 2, 9), (0, 0), None, (0, 0)) for i in range(3)))


def fails(program: Program, seconds: float = 1.0) -> BaseException | None:
    try:
        check(program, run(program, World(program.ranks, seconds), seconds))
    except (AssertionError, TimeoutError, RuntimeError) as error:
        return error
    return None


def test_the_program_that_shows_mistakes_passes_without_them() -> None:
    assert fails(LEAVES, PATIENCE) is None


def test_a_rank_that_leaves_its_moves_to_others_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def drop(self: Pass, *_: Any) -> None:
        self._tickets.clear()
        self._moves.clear()
        self._drained.set()

    monkeypatch.setattr(Pass, "_drain", drop)
    assert fails(LEAVES) is not None


def test_a_rank_that_does_not_say_that_it_has_left_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Pass.leave

    def silent(self: Pass, **_: Any) -> None:
        self.over = True
        real(self)

    monkeypatch.setattr(Pass, "leave", silent)
    monkeypatch.setattr(stream, "LEAVE_SECONDS", 0.1)
    assert fails(LEAVES) is not None


def test_ranks_that_go_on_after_one_has_left_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    real = decide.decide

    def deaf(contributions: Any, rules: Any, number: int) -> Any:
        states = contributions.copies["state"]
        states[states == State.LEFT] = State.EXHAUSTED
        return real(contributions, rules, number)

    monkeypatch.setattr("trainer_client.balancing.lead.decide", deaf)
    assert fails(LEAVES) is not None
