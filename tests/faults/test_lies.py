"""Plans that do not fit what ranks hold: the service lies to all of them, or a rank lies to the service."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from benchmarks.harness.crew import Crew
from benchmarks.harness.relay import Relay
from benchmarks.harness.steps import Steps
from evenkeel.protocol import balancer_pb2 as pb

ROUND = 8  # in which ranks 0, 1 and 2 have 3, 1 and 6 samples


def change(data: bytes, dtype: str, edit: Callable[[np.ndarray[Any, Any]], object]) -> bytes:
    values = np.frombuffer(data, dtype).copy()
    edit(values)
    return values.tobytes()


def other_destination(decision: pb.Decision, _rank: int) -> None:
    decision.destinations = change(decision.destinations, "<i4", lambda to: to.put(0, (to[0] + 1) % 3))


def nobodys_destination(decision: pb.Decision, _rank: int) -> None:
    decision.destinations = change(decision.destinations, "<i4", lambda to: to.put(0, 99))


def one_sample_more(decision: pb.Decision, _rank: int) -> None:
    decision.source_counts = change(decision.source_counts, "<i4", lambda counts: counts.put(0, counts[0] + 1))


def vast_counts(decision: pb.Decision, _rank: int) -> None:
    decision.source_counts = change(decision.source_counts, "<i4", lambda counts: counts.fill(2**31 - 1))


def negative_counts(decision: pb.Decision, _rank: int) -> None:
    decision.source_counts = change(decision.source_counts, "<i4", lambda counts: counts.fill(-1))


def vast_totals(decision: pb.Decision, _rank: int) -> None:
    decision.source_totals = change(decision.source_totals, "<i8", lambda totals: totals.fill(2**62))


def negative_totals(decision: pb.Decision, _rank: int) -> None:
    decision.source_totals = change(decision.source_totals, "<i8", lambda totals: totals.fill(-(2**40)))


def the_same_source_twice(decision: pb.Decision, _rank: int) -> None:
    decision.sources = change(decision.sources, "<i4", lambda sources: sources.fill(sources[0]))


def nobody_receives(decision: pb.Decision, _rank: int) -> None:
    decision.sources = decision.source_counts = decision.source_totals = b""


def everything_for_rank_0(decision: pb.Decision, rank: int) -> None:
    """As far as anybody sends; rank 0 does not expect it."""
    decision.destinations = change(decision.destinations, "<i4", lambda to: to.fill(0))
    if rank:
        nobody_receives(decision, rank)


@pytest.mark.parametrize(
    "lie",
    [
        other_destination, nobodys_destination, one_sample_more, vast_counts, negative_counts, vast_totals,
        negative_totals, the_same_source_twice, nobody_receives, everything_for_rank_0,
    ],
)  # fmt: skip
def test_a_service_that_lies_to_all_ranks(crew: Crew, relay: Relay, lie: Callable[[pb.Decision, int], None]) -> None:
    """Digests agree: nothing but what the ranks themselves hold tells that the plan does not fit."""

    def answers(rank: int, answer: pb.Answer) -> list[pb.Answer]:
        if answer.round == ROUND and answer.decision.outcome == pb.Decision.OUTCOME_BALANCED:
            with relay.lock:
                relay.seen["lies"] += 1
            lie(answer.decision, rank)
        return [answer]

    relay.answers = answers
    with crew.run(Steps(address=relay.address, name=f"lies-{lie.__name__}", timeout=5.0)) as run:
        run.until(mode="embedded")
        run.until(mode="service", times=2)
    assert relay.seen["lies"] == 3
    assert run.modes[ROUND] == "embedded"


def longer(submit: pb.Submit) -> None:
    submit.lengths = change(submit.lengths, "<u4", lambda lengths: lengths.put(0, lengths[0] + 3))


def shorter(submit: pb.Submit) -> None:
    submit.lengths = change(submit.lengths, "<u4", lambda lengths: lengths.fill(0))


def one_more(submit: pb.Submit) -> None:
    submit.num_samples += 1
    submit.costs_i64 += submit.costs_i64[-8:]
    submit.lengths += submit.lengths[: len(submit.lengths) // (submit.num_samples - 1)]
    submit.sizes += submit.sizes[-8:]


def one_less(submit: pb.Submit) -> None:
    fields = len(submit.lengths) // submit.num_samples
    submit.num_samples -= 1
    submit.costs_i64, submit.sizes = submit.costs_i64[:-8], submit.sizes[:-8]
    submit.lengths = submit.lengths[:-fields]


@pytest.mark.parametrize("lie", [longer, shorter, one_more, one_less])
def test_a_rank_that_lies_about_what_it_has(crew: Crew, relay: Relay, lie: Callable[[pb.Submit], None]) -> None:
    """The service plans what is not there, the same for all ranks; they see it before a sample moves."""

    def submits(rank: int, submit: pb.Submit) -> list[pb.Submit]:
        if submit.round == ROUND and rank == 2:
            with relay.lock:
                relay.seen["lies"] += 1
            lie(submit)
        return [submit]

    relay.submits = submits
    with crew.run(Steps(address=relay.address, name=f"member-{lie.__name__}", timeout=5.0)) as run:
        run.until(mode="embedded")
        run.until(mode="service", times=2)
    assert relay.seen["lies"] >= 1
    assert run.modes[ROUND] == "embedded"
