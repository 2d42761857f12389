"""Answers put together from bytes are those that protocol buffers would have written."""

import weakref
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.harness.plans import make_plan, said
from evenkeel.partitioning.rounds import Figures, RoundOptions, RoundPlan
from evenkeel.partitioning.samples import RankSamples
from evenkeel.protocol import balancer_pb2 as pb
from services.balancer.decisions import Decision, Reason, balanced, identity
from services.balancer.effects import PlanInput
from services.balancer.encoding import answer_bytes, error_message, group_bytes, member_bytes, response_bytes
from services.balancer.node_answers import node_bytes
from services.balancer.refusals import Code, Refusal
from trainer_client.balancing.service.joining import split_answer
from trainer_client.balancing.service.messages import MalformedAnswerError

REFUSAL = Refusal(code=Code.CONFLICTING_SUBMIT, field="round", value="7", remedy="resubmit it unchanged")
BATCH = st.lists(st.integers(0, 1000), max_size=40)


def plan_of(costs: list[list[list[int]]], num_fields: int) -> Decision:
    """The decision of a round with these costs by rank and batch."""
    submissions = []
    for own in costs:
        flat = np.array([cost for batch in own for cost in batch], np.int64)
        lengths = np.arange(len(flat) * num_fields, dtype=np.uint32).reshape(len(flat), num_fields)
        samples = RankSamples(costs=flat, lengths=lengths, batch_sizes=tuple(map(len, own)))
        submissions.append(said(samples, window=len(own)).samples)
    window, nodes = len(costs[0]), ("node",) * len(costs)
    inputs = PlanInput(parts=tuple(submissions), options=RoundOptions(), nodes=nodes, window=window)
    plan = make_plan(inputs)
    assert isinstance(plan, RoundPlan)
    return balanced(plan)


def answer_message(instance: int, number: int, rank: int, result: Decision | Refusal) -> pb.Answer:
    """What the wire says, as protocol buffers would write it."""
    answer = pb.Answer(round=number, rank=rank)
    if isinstance(result, Refusal):
        answer.error.CopyFrom(error_message(result))
        return answer
    told = answer.decision
    told.instance, told.outcome, told.digest, told.detail = instance, int(result.outcome), result.digest, result.detail  # type: ignore[assignment]
    plan = result.plan
    if plan is None:
        told.reason = int(result.reason)  # type: ignore[assignment]
        told.missing_ranks.extend(result.missing_ranks)
        return answer
    mine = plan.of(rank)
    home = slice(plan.slices.home_begin[rank], plan.slices.home_begin[rank + 1])
    told.destinations = plan.slices.destinations[home].tobytes()
    for name, dtype in (("sources", "<i4"), ("source_counts", "<i4"), ("source_totals", "<i8")):
        setattr(told, name, b"".join(getattr(piece, name).astype(dtype).tobytes() for piece in mine.slices))
    told.balance.CopyFrom(_balance(plan, plan.worst, rank, plan.figures))
    if len(plan.batches) > 1:
        assert mine.steps is not None
        told.destination_steps = mine.steps.tobytes()
        told.source_groups.extend(len(piece.sources) for piece in mine.slices)
        told.batch_balances.extend(_balance(plan, k, rank, figures) for k, figures in enumerate(plan.batches))
    return answer


def _balance(plan: RoundPlan, batch: int, rank: int, figures: Figures) -> pb.Balance:
    return pb.Balance(
        own_load_before=plan.loads_before[batch, rank], own_load_after=plan.loads_after[batch, rank],
        partition_seconds=plan.seconds, **asdict(figures),
    )  # fmt: skip


@settings(deadline=None, max_examples=60)
@given(
    costs=st.integers(1, 4).flatmap(
        lambda window: st.lists(st.lists(BATCH, min_size=window, max_size=window), min_size=1, max_size=6)
    ),
    num_fields=st.integers(0, 5),
    number=st.integers(0, 2**63),
    instance=st.integers(1, 2**63),
)
def test_every_rank_reads_what_the_message_says(
    costs: list[list[list[int]]], num_fields: int, number: int, instance: int
) -> None:
    decision = plan_of(costs, num_fields)
    for rank in range(len(costs)):
        expected = answer_message(instance, number, rank, decision)
        assert pb.Answer.FromString(answer_bytes(instance, number, rank, decision)) == expected


@settings(deadline=None, max_examples=60)
@given(
    costs=st.integers(1, 4).flatmap(
        lambda window: st.lists(st.lists(BATCH, min_size=window, max_size=window), min_size=1, max_size=6)
    ),
    num_fields=st.integers(0, 5),
    data=st.data(),
)
def test_ranks_of_a_node_read_what_each_would_alone(
    costs: list[list[list[int]]], num_fields: int, data: st.DataObject
) -> None:
    ranks = tuple(data.draw(st.lists(st.integers(0, len(costs) - 1), min_size=1, unique=True)))
    for decision in (plan_of(costs, num_fields), identity(Reason.DEADLINE, "rank 1 did not come", (1,))):
        told = pb.AnswerGroup.FromString(node_bytes(5, 300, ranks, decision)).nodes[0]
        assert split_answer(told) == [answer_message(5, 300, rank, decision) for rank in ranks]


def test_what_ranks_are_told_of_a_plan_does_not_outlive_it() -> None:
    """A session gives its memory back when it forgets a plan."""
    decision = plan_of([[[5, 1] * 60], [[2]]], 2)
    plan = weakref.ref(decision.plan)  # type: ignore[arg-type]
    assert node_bytes(5, 300, (0, 1), decision) == node_bytes(5, 300, (0, 1), decision)
    assert answer_bytes(5, 300, 1, decision) != answer_bytes(6, 300, 1, decision)
    del decision
    assert plan() is None


def test_arrays_of_a_node_that_do_not_fit_each_other_are_refused() -> None:
    decision = plan_of([[[5, 1] * 60], [[2]], [[]]], 2)
    told = pb.AnswerGroup.FromString(node_bytes(5, 300, (0, 1), decision)).nodes[0]
    for others in ((0, 2), (1,)):
        with pytest.raises(MalformedAnswerError, match=r"rank\(s\) \[0, 1\], which this stream does not speak for"):
            split_answer(told, others)
    with pytest.raises(MalformedAnswerError, match=r"rank\(s\) \[\]"):
        split_answer(pb.AnswerNode(round=1), (0, 1))
    for name in ("ranks", "num_parts", "num_sources", "loads"):
        wrong = pb.AnswerNode.FromString(told.SerializeToString())
        setattr(wrong, name, getattr(wrong, name)[:-1])
        with pytest.raises(MalformedAnswerError, match=name if name != "ranks" else "ranks|num"):
            split_answer(wrong)
    for name in ("destinations", "sources", "source_counts", "source_totals"):
        wrong = pb.AnswerNode.FromString(told.SerializeToString())
        setattr(wrong.decision, name, getattr(wrong.decision, name)[:-1])
        with pytest.raises(MalformedAnswerError, match=name):
            split_answer(wrong)
    for number in (1 + 2**32, -1 - 2**31):  # as i32 they would be ranks
        wrong = pb.AnswerNode.FromString(told.SerializeToString())
        wrong.decision.destinations = np.full(121, number, "<i8").tobytes()
        with pytest.raises(MalformedAnswerError, match="destinations holds values out of range"):
            split_answer(wrong)


@pytest.mark.parametrize("result", [REFUSAL, identity(Reason.DEADLINE, "rank 1 did not come", (1,))])
def test_outcomes_without_a_plan(result: Decision | Refusal) -> None:
    assert pb.Answer.FromString(answer_bytes(5, 300, 200, result)) == answer_message(5, 300, 200, result)


def test_envelopes() -> None:
    decision = plan_of([[[5, 1] * 60], [[2]], [[]]], 2)
    messages = [answer_message(5, 300, rank, decision) for rank in range(3)]
    answers = [answer_bytes(5, 300, rank, decision) for rank in range(3)]
    assert pb.BalanceResponse.FromString(response_bytes(answers[0])) == pb.BalanceResponse(answer=messages[0])
    grouped = pb.BalanceResponse(answers=pb.AnswerGroup(answers=messages))
    members = [member_bytes(5, 300, rank, decision) for rank in range(3)]
    assert pb.BalanceResponse.FromString(group_bytes(members)) == grouped
