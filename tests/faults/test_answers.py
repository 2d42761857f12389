"""Messages that come late, twice, out of order, from another time, to some ranks only, or not at all."""

from __future__ import annotations

import time
from collections import defaultdict

import pytest

from benchmarks.harness.crew import Crew
from benchmarks.harness.relay import Relay
from benchmarks.harness.steps import Steps
from evenkeel.protocol import balancer_pb2 as pb

FORGED = 12345


def copy(answer: pb.Answer) -> pb.Answer:
    other = pb.Answer()
    other.CopyFrom(answer)
    return other


@pytest.mark.parametrize("ranks", [{0}, {1}, {0, 1, 2}])
def test_answers_dropped(crew: Crew, relay: Relay, ranks: set[int]) -> None:
    def answers(rank: int, answer: pb.Answer) -> list[pb.Answer]:
        if answer.round == 4 and rank in ranks and relay.seen[f"dropped {rank}"] == 0:
            relay.seen[f"dropped {rank}"] += 1
            return []
        return [answer]

    relay.answers = answers
    with crew.run(Steps(address=relay.address, name=f"dropped-{len(ranks)}-{min(ranks)}", timeout=2.0)) as run:
        run.until(reason="no_decision")
        run.until(mode="service", times=4)
    assert {f"dropped {rank}" for rank in ranks} == set(relay.seen)
    assert run.modes[4] == "embedded"
    assert run.reasons["no_decision"] == 1  # one wait, then the breaker was open until the ranks had joined anew
    assert run.results[0]["breaker_changes"] == 2
    for rank, result in enumerate(run.results):  # one warning when it opens and one when it closes
        assert len(result["warnings"]) == (2 if rank == 0 else 1 if rank == min(ranks) else 0), result["warnings"]


def test_answers_delayed_beyond_the_deadline_and_within(crew: Crew, relay: Relay) -> None:
    def answers(rank: int, answer: pb.Answer) -> list[pb.Answer]:
        if answer.round in (2, 6) and rank == 1:
            relay.seen[f"delayed {answer.round}"] += 1
            time.sleep(0.1 if answer.round == 2 else 3.0)
        return [answer]

    relay.answers = answers
    with crew.run(Steps(address=relay.address, name="delayed", timeout=2.0)) as run:
        run.until(reason="no_decision")
        run.until(mode="service", times=3)
    assert relay.seen["delayed 2"] == 1
    assert relay.seen["delayed 6"] >= 1
    assert run.modes[2] == "service"
    assert run.modes[6] == "embedded"


def test_answers_reordered_and_duplicated(crew: Crew, relay: Relay) -> None:
    held: dict[int, pb.Answer] = {}

    def answers(rank: int, answer: pb.Answer) -> list[pb.Answer]:
        # Nothing is held in the end, which the ranks would wait for before they leave.
        if rank == 1 and answer.round % 2 == 0 and answer.round < 12:
            held[rank] = answer
            return []
        if rank in held:
            relay.seen["reordered"] += 1
            return [answer, held.pop(rank)]
        relay.seen["duplicated"] += 1
        return [answer, copy(answer), copy(answer)]

    relay.answers = answers
    with crew.run(Steps(address=relay.address, name="reordered", timeout=10.0)) as run:
        run.until(mode="service", times=12)
    assert relay.seen["reordered"] >= 5
    assert relay.seen["duplicated"] >= 20
    assert set(run.modes) == {"service"}


def test_stale_answers_of_earlier_steps_and_of_another_incarnation(crew: Crew, relay: Relay) -> None:
    earlier: dict[int, list[pb.Answer]] = defaultdict(list)

    def answers(rank: int, answer: pb.Answer) -> list[pb.Answer]:
        earlier[rank].append(copy(answer))
        if answer.round == 5 and rank == 2 and relay.seen["other incarnation"] == 0:
            relay.seen["other incarnation"] += 1
            forged = copy(answer)
            forged.decision.instance = FORGED
            return [forged]
        relay.seen["earlier step"] += len(earlier[rank]) > 1
        return [*earlier[rank][-3:-1], answer, *earlier[rank][-3:-1]]

    relay.answers = answers
    with crew.run(Steps(address=relay.address, name="stale", timeout=5.0)) as run:
        run.until(reason="decisions_differ")
        run.until(mode="service", times=3)
    assert relay.seen["other incarnation"] == 1
    assert relay.seen["earlier step"] >= 10
    assert run.modes[5] == "embedded"
    assert run.modes.count("embedded") <= 6
    assert next(result["records"][5]["ranks"] for result in run.results) == (2,)


@pytest.mark.parametrize("what", ["digest", "moved", "transfer", "nonsense"])
def test_decisions_that_differ_between_ranks(crew: Crew, relay: Relay, what: str) -> None:
    def forge(decision: pb.Decision) -> None:
        if what == "digest":
            decision.digest = bytes(16)
        elif what == "moved":
            decision.balance.moved_samples += 1
        elif what == "transfer":  # digests agree, but rank 1 expects values that nobody sends
            totals = bytearray(decision.source_totals)
            totals[0] ^= 1
            decision.source_totals = bytes(totals)
        else:
            decision.sources = b"\1\2\3"

    def answers(rank: int, answer: pb.Answer) -> list[pb.Answer]:
        # Rank 1 has samples in every round from 7 to 12 (see Steps.size), so that it receives some.
        if answer.round == 8 and rank == 1 and relay.seen[what] == 0:
            relay.seen[what] += 1
            assert answer.decision.outcome == pb.Decision.OUTCOME_BALANCED
            forge(answer.decision)
        return [answer]

    relay.answers = answers
    with crew.run(Steps(address=relay.address, name=f"forged-{what}", timeout=5.0)) as run:
        run.until(mode="embedded")
        run.until(mode="service", times=3)
    assert relay.seen[what] == 1
    assert run.modes[8] == "embedded"
    wanted = {"transfer": "transfers_differ", "nonsense": "no_decision"}.get(what, "decisions_differ")
    assert run.results[0]["records"][8]["reason"] == wanted


def test_one_ranks_submission_lost(crew: Crew, relay: Relay) -> None:
    def submits(rank: int, submit: pb.Submit) -> list[pb.Submit]:
        if submit.round == 3 and rank == 2 and relay.seen["lost"] == 0:
            relay.seen["lost"] += 1
            return []
        return [submit]

    relay.submits = submits
    with crew.run(Steps(address=relay.address, name="lost", timeout=3.0)) as run:
        run.until(reason="no_decision")
        run.until(mode="service", times=3)
    assert relay.seen["lost"] == 1
    assert run.results[0]["records"][3]["ranks"] == (2,)  # the others heard that it did not come


def test_answers_that_a_newer_service_might_give(crew: Crew, relay: Relay) -> None:
    def answers(rank: int, answer: pb.Answer) -> list[pb.Answer]:
        if answer.round == 3:
            relay.seen["unknown reason"] += 1
            return [
                pb.Answer(
                    round=3,
                    decision=pb.Decision(
                        instance=answer.decision.instance,
                        outcome=pb.Decision.OUTCOME_IDENTITY,
                        reason=99,  # type: ignore[arg-type]
                    ),
                )
            ]
        return [answer]

    relay.answers = answers
    with crew.run(Steps(address=relay.address, name="newer", timeout=5.0)) as run:
        run.until(reason="undecided")
        run.until(mode="service", times=3)
    assert relay.seen["unknown reason"] == 3
    assert run.results[0]["breaker_changes"] == 0
