"""The search for programs that go wrong: it notices what is wrong, shortens it, and a short run finds nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.programs.crew import Crew, Outcome
from benchmarks.programs.data import sample_id, split_id
from benchmarks.programs.draw import Means, draw
from benchmarks.programs.features import features
from benchmarks.programs.judge import judge
from benchmarks.programs.language import BalancerPlan, Close, LoaderPlan, Loop, Manual, ModelPlan, Program, listing
from benchmarks.programs.shrink import shrink

MEANS = Means(ranks=(2, 4))
SHORT = 16  # programs

TRAINING = Program(
    seed=0,
    ranks=2,
    balancers=(BalancerPlan(),),
    loaders=(LoaderPlan(sizes=((3, 4), (5,))),),
    model=ModelPlan(wrap="hand", routings=("hash_roundrobin", "continuous")),
    statements=(Loop(loaders=(0,), use="train"),) * 2,
)


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew(group_seconds=30.0) as crew:
        yield crew


def _change_id(change: Callable[[int], int]) -> Callable[[list[Any]], None]:
    def tamper(answers: list[Any]) -> None:
        steps = answers[0]["steps"]
        step = next(step for step in steps if step.ids)
        step.ids[-1] = change(step.ids[-1])

    return tamper


def _moved(number: int, *, epochs: int = 0, steps: int = 0) -> int:
    loader, epoch, rank, step, index = split_id(number)
    return sample_id(loader, epoch + epochs, rank, step + steps, index)


def _set(name: str, value: Any) -> Callable[[list[Any]], None]:
    return lambda answers: setattr(answers[1]["steps"][1], name, value)


FAULTS: dict[str, Callable[[list[Any]], Any]] = {
    "lost": lambda answers: answers[0]["steps"][0].ids.pop(),
    "doubled": lambda answers: answers[0]["steps"][0].ids.append(answers[0]["steps"][0].ids[-1]),
    "strangers": _change_id(lambda number: _moved(number, epochs=1)),
    "misplaced": _change_id(lambda number: _moved(number, steps=1)),
    "order": lambda answers: max((step.ids for step in answers[0]["steps"]), key=len).reverse(),
    "corrupted": _set("intact", False),
    "reports": _set("reason", "breaker_open"),
    "loss": _set("loss", 7.0),
    "gradients": _set("gradients", [0.0] * 7),
    "steps": lambda answers: answers[1]["steps"].pop(),
    "leak": lambda answers: answers[1]["leaked"].append("evenkeel-train"),
    "dense values": lambda answers: answers[1]["end"]["dense"].pop(),
    "row": lambda answers: next(iter(answers[0]["end"]["rows"]["table0"].values())).reverse(),
}


def test_what_is_wrong_is_noticed(crew: Crew) -> None:
    outcome = crew.run(TRAINING)
    verdict = judge(TRAINING, outcome)
    assert not verdict.findings
    assert not verdict.refused
    assert verdict.samples == 24
    assert verdict.compared == 4
    for kind, fault in FAULTS.items():
        answers = copy.deepcopy(outcome.answers)
        fault(answers)
        found = judge(TRAINING, Outcome(answers=answers)).findings
        assert any(finding.startswith(kind) for finding in found), (kind, found)


def test_parts_that_are_missing_are_noticed(crew: Crew) -> None:
    program = replace(
        TRAINING,
        balancers=(BalancerPlan(split="first", counts="free"),),
        loaders=(LoaderPlan(layout="parted", cost="tokens", sizes=((3, 4), (0, 4))),),
    )
    outcome = crew.run(program)
    verdict = judge(program, outcome)
    assert not verdict.findings
    assert verdict.parts > 0
    assert verdict.compared == 4
    cut = next(step for answer in outcome.answers if answer for step in answer["steps"] if step.parts)
    cut.parts.pop()
    assert any(finding.startswith("parts") for finding in judge(program, outcome).findings)


def test_errors_are_right_only_if_they_are_documented_and_the_same_on_all_ranks() -> None:
    loop = Loop(loaders=(0,), stops=(1, 2))
    uneven = Program(seed=0, ranks=2, balancers=(BalancerPlan(),), loaders=TRAINING.loaders, statements=(loop,))

    def told(*messages: str, error: str = "trainer_client.balancing.agreement.ProgramOrderError") -> Any:
        return judge(uneven, Outcome(answers=[{"error": error, "message": message} for message in messages]))

    assert told("the same", "the same").refused
    assert told("one", "another").findings[0].startswith("error (ranks differ)")
    assert told("the same", "the same", error="builtins.TypeError").findings[0].startswith("error (undocumented)")
    even = Program(
        seed=0, ranks=2, balancers=(BalancerPlan(),), loaders=TRAINING.loaders, statements=(Loop(loaders=(0,)),)
    )
    assert judge(even, told_outcome()).findings


def told_outcome() -> Outcome:
    error = {"error": "trainer_client.balancing.agreement.ProgramOrderError", "message": "the same"}
    return Outcome(answers=[error, error])


def test_programs_become_as_small_as_they_can() -> None:
    large = next(
        program
        for seed in range(1000)
        if {"submit and redistribute", "several loaders", "nested loop", "window"}
        <= features(program := draw(seed, MEANS))
    )
    tried = []

    def fails(program: Program) -> bool:
        tried.append(program)
        return any(isinstance(statement, Manual) for statement in program.statements)

    small = shrink(large, fails, tries=500)
    assert len(tried) < 500
    assert len(small.statements) == len(small.loaders) == len(small.balancers) == 1
    assert small.balancers[0] == BalancerPlan()
    assert small.ranks == 2
    assert len(listing(small).splitlines()) == 5


def test_draws_are_repeatable_and_cover_the_language() -> None:
    programs = [draw(seed, MEANS) for seed in range(600)]
    assert programs == [draw(seed, MEANS) for seed in range(600)]
    seen = set().union(*map(features, programs))
    for wanted in (
        "left unevenly", "left by keep", "left by raise", "nested loop", "zipped loaders", "several balancers", "drop",
        "close", "submit and redistribute", "model ddp", "model fsdp2", "resume by checkpoint", "resume by state_dict",
        "balancer faulty", "balancer gone", "balancer service", "balancer off", "rank without data", "empty batches",
        "changing shapes", "two loaders under one name", "errors in the source", "errors in the cost", "window",
        "cost bfloat16", "cost bad", "cost huge", "source workers", "mesh of data and tensor parallel ranks", "4 ranks",
        "split, tags with last", "split, tags with first", "split, tags with all", "caps tight",
    ):  # fmt: skip
        assert wanted in seen, wanted


def test_a_rank_that_dies_is_replaced(crew: Crew) -> None:
    program = Program(
        seed=0, ranks=2, balancers=(BalancerPlan(),), loaders=TRAINING.loaders,
        statements=(Loop(loaders=(0,)), Close(balancer=0), Loop(loaders=(0,))),
    )  # fmt: skip
    assert not judge(program, crew.run(program)).findings
    before = crew.replaced
    crew._processes[1].kill()
    crew._processes[1].join(10)
    died = crew.run(program)
    assert not judge(program, died).findings
    assert crew.replaced == before + 1


def test_a_short_search_finds_nothing(crew: Crew) -> None:
    right = 0
    for seed in range(SHORT):
        program = draw(seed, MEANS)
        verdict = judge(program, crew.run(program))
        assert not verdict.findings, "\n".join([listing(program), *verdict.findings])
        right += not verdict.refused
    assert right >= SHORT * 0.8
