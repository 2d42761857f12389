"""Rounds that are a window of several batches: the plan, and what the wire says of it."""

import asyncio

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.harness.plans import make_plan
from evenkeel.partitioning.rounds import RoundPlan
from evenkeel.protocol import balancer_pb2 as pb
from services.balancer.effects import PlanInput
from services.balancer.submissions import Submission
from tests.services.balancer.conftest import StartServer
from tests.services.balancer.ranks import Rank
from tests.services.balancer.samples import options, submission

BATCHES = st.lists(st.integers(0, 1000), max_size=4)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3), st.integers(2, 4), st.data())
def test_the_batches_of_a_plan_fit_together(num_ranks: int, window: int, data: st.DataObject) -> None:
    ranks = [data.draw(st.lists(BATCHES, max_size=window)) for _ in range(num_ranks)]
    submissions = [_submission(batches, window) for batches in ranks]
    plan = make_plan(
        PlanInput(
            parts=tuple(each.samples for each in submissions), options=options(), nodes=("",) * num_ranks, window=window
        )
    )
    assert isinstance(plan, RoundPlan)
    assert plan.slices.steps is not None
    n = sum(s.num_samples for s in submissions)
    assert plan.slices.steps.size == n
    counts = np.bincount(plan.slices.steps, minlength=window)
    loaded = [sum(len(batches[k]) for batches in ranks if k < len(batches)) for k in range(window)]
    assert counts.tolist() == loaded
    received = [[int(piece.source_counts.sum()) for piece in plan.of(rank).slices] for rank in range(num_ranks)]
    assert np.sum(received, axis=0).tolist() == loaded
    total = sum(sum(map(sum, batches)) for batches in ranks)
    assert plan.loads_before.sum() == plan.loads_after.sum() == total
    assert plan.figures.samples == n
    assert plan.figures.imbalance_after == max(s.imbalance_after for s in plan.batches)


async def test_giants_of_two_batches_meet_over_the_wire(start_server: StartServer) -> None:
    server = await start_server()
    costs = [[1000, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 900, 1, 1, 1]]  # a giant in each of the window's two batches
    async with Rank(server.port, 0, window=2) as first, Rank(server.port, 1, window=2) as second:
        answers = await asyncio.gather(
            *(rank.round(0, own, batch_sizes=[4, 4]) for rank, own in zip((first, second), costs, strict=True))
        )
    decisions = [answer.decision for answer in answers]
    assert decisions[0].digest == decisions[1].digest
    steps = [np.frombuffer(decision.destination_steps, "<i4") for decision in decisions]
    ranks = [np.frombuffer(decision.destinations, "<i4") for decision in decisions]
    assert steps[0][0] == steps[1][4]  # one batch holds both giants
    assert ranks[0][0] != ranks[1][4]  # on different ranks
    for rank, decision in enumerate(decisions):
        assert len(decision.source_groups) == len(decision.batch_balances) == 2
        sent = np.frombuffer(decision.source_counts, "<i4")
        assert len(sent) == sum(decision.source_groups)
        expected = sum(int((r == rank).sum()) for r in ranks)
        assert sent.sum() == expected
        assert [balance.samples for balance in decision.batch_balances] == [8, 8]
    assert sum(decision.batch_balances[0].own_load_after for decision in decisions) in (1906, 8)
    assert decisions[0].balance.samples == 16


async def test_batch_sizes_that_do_not_add_up_are_refused(start_server: StartServer) -> None:
    server = await start_server()
    async with Rank(server.port, 0, 1, window=2) as rank:
        for sizes in ([4, 4], [1, 1, 1]):
            error = (await rank.round(0, [1.0, 1.0, 1.0], batch_sizes=sizes)).error
            assert (error.code, error.field) == (pb.ERROR_CODE_INVALID_ARGUMENT, "batch_sizes")
        assert (await rank.round(0, [1.0, 1.0, 1.0], batch_sizes=[1, 2])).decision.outcome


async def test_the_same_samples_in_other_batches_are_another_submission(start_server: StartServer) -> None:
    server = await start_server()
    async with Rank(server.port, 0, window=2) as rank:
        await rank.submit(0, [1, 1, 1], batch_sizes=[1, 2])
        answer = await rank.round(0, [1, 1, 1], batch_sizes=[2, 1])
        assert answer.error.code == pb.ERROR_CODE_CONFLICTING_SUBMIT


def _submission(batches: list[list[int]], window: int) -> Submission:
    costs = [cost for batch in batches for cost in batch]
    return submission(*costs, window=window, batch_sizes=tuple(len(batch) for batch in batches))
