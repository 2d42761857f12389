"""Messages of a node, two ranks of three, that are lost, late, doubled, reordered, of others or that do not fit."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from benchmarks.harness.crew import Crew, Run
from benchmarks.harness.forged_nodes import ANSWERS, CONTRADICTED, SUBMITS, UNTOLD, Change, held
from benchmarks.harness.relay import Relay
from benchmarks.harness.steps import Steps
from evenkeel.protocol import balancer_pb2 as pb

SECONDS = 60.0


def meet(run: Run, relay: Relay, side: str, change: Change) -> tuple[str, str]:
    """Changes a message that can be changed so; returns how its round went, once the service is back."""
    met: list[int] = []

    def pass_on(_rank: int, group: Any) -> Iterable[Any]:
        others = change(group) if group.nodes and not met else None
        if others is None:
            return [group]
        met.append(group.nodes[0].round)
        return others

    setattr(relay, side, pass_on)
    deadline = time.monotonic() + SECONDS  # a busy machine may take steps without the service for a while
    while not (met and len(run.told) > met[0]) and time.monotonic() < deadline:
        run.until()
    relay.heal()
    assert met, "the fault has not happened"
    step, mode, reason = run.told[met[0]]
    assert step == met[0]
    run.until(mode="service", times=2)
    return mode, reason


def late(group: Any) -> Iterable[Any]:
    return held(group, 0.5)


def test_answers_to_a_node_that_are_wrong_reordered_or_doubled(crew: Crew, relay: Relay) -> None:
    """Nobody waits for the deadline: that an answer is of no use is known as soon as it comes."""
    kept: list[pb.AnswerGroup] = []

    def answers(_rank: int, group: pb.AnswerGroup) -> list[pb.AnswerGroup]:
        if group.nodes[0].round % 2 == 0 and group.nodes[0].round < 8 and not kept:
            kept.append(group)
            return []
        relay.seen["reordered"] += len(kept)
        relay.seen["doubled"] += 1
        return [group, *kept, group, *(kept.pop() for _ in kept[:])]

    def submits(_rank: int, group: pb.SubmitGroup) -> list[pb.SubmitGroup]:
        relay.seen["submitted twice"] += bool(group.nodes)
        return [group, group]

    outcomes = {}
    with crew.run(Steps(address=relay.address, name="node-told", node_size=2, timeout=10.0)) as run:
        relay.answer_groups, relay.submit_groups = answers, submits
        run.until(mode="service", times=10)
        relay.heal()
        assert {mode for _, mode, _ in run.told} == {"service"}
        for name, change in ANSWERS.items():
            outcomes[name] = meet(run, relay, "answer_groups", change)
    assert relay.seen["reordered"] >= 4
    assert relay.seen["doubled"] >= 6
    assert relay.seen["submitted twice"] >= 10
    told = {"other incarnation": "decisions_differ", "digest differs": "decisions_differ"}
    told["another destination"] = "transfers_differ"
    assert outcomes == {name: ("embedded", told.get(name, "no_decision")) for name in ANSWERS}
    assert run.longest_wait < 8.0


def test_messages_of_a_node_that_do_not_come_in_time_or_are_refused(crew: Crew, relay: Relay) -> None:
    outcomes = {}
    answers: dict[str, Change] = {"late": late, **UNTOLD}
    submits: dict[str, Change] = {"late": late, "lost": lambda group: [], **SUBMITS}
    with crew.run(Steps(address=relay.address, name="node-untold", node_size=2, timeout=0.2)) as run:
        run.until(mode="service", times=2)
        for name, change in answers.items():
            outcomes[f"answer {name}"] = meet(run, relay, "answer_groups", change)
        for name, change in submits.items():
            outcomes[f"submission {name}"] = meet(run, relay, "submit_groups", change)
        meet(run, relay, "submit_groups", CONTRADICTED)  # the right one may have been decided, or not
    assert {name: mode for name, (mode, _) in outcomes.items()} == dict.fromkeys(outcomes, "embedded")
    assert len(outcomes) == len(answers) + len(submits)
