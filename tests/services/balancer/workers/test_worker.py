import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.harness.plans import make_plan
from evenkeel.partitioning.rounds import RoundPlan
from services.balancer.decisions import PlanFailure, Reason
from services.balancer.effects import PlanInput
from services.balancer.submissions import Submission
from tests.services.balancer.samples import options, submission

RANKS = st.lists(st.lists(st.integers(0, 50), max_size=6), min_size=1, max_size=5)


def inputs(submissions: list[Submission], **changes: object) -> PlanInput:
    nodes = changes.pop("nodes", ("",) * len(submissions))
    return PlanInput(parts=tuple(each.samples for each in submissions), options=options(**changes), nodes=nodes)  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(RANKS, st.sampled_from(["minimal_move", "karmarkar_karp", "lpt"]), st.sampled_from(["equal", "free"]))
def test_slices_fit_together_and_loads_add_up(ranks: list[list[int]], strategy: str, counts: str) -> None:
    rng = np.random.default_rng(sum(map(len, ranks)))
    submissions = [submission(*c, lengths=rng.integers(0, 9, (len(c), 2)).astype(np.uint32)) for c in ranks]
    plan = make_plan(inputs(submissions, strategy=strategy, counts=counts))
    assert isinstance(plan, RoundPlan)
    destinations = np.concatenate([piece.destinations for piece in plan.slices])
    homes = np.repeat(np.arange(len(ranks)), [len(c) for c in ranks])
    lengths = np.concatenate([s.samples.lengths for s in submissions]).astype(np.int64)
    costs = np.concatenate([np.array(c, float) for c in ranks])
    for rank, piece in enumerate(plan.slices):
        assert piece.destinations.size == len(ranks[rank])
        mine = destinations == rank
        expected = {h: (int((mine & (homes == h)).sum()), lengths[mine & (homes == h)].sum(0).tolist()) for h in homes}
        received = {
            int(h): (int(n), t.tolist())
            for h, n, t in zip(piece.sources, piece.source_counts, piece.source_totals, strict=True)
        }
        assert received == {h: (n, t) for h, (n, t) in expected.items() if n}
        assert plan.loads_after[0, rank] == costs[mine].sum()
        assert plan.loads_before[0, rank] == sum(ranks[rank])
    summary = plan.figures
    assert summary.samples == destinations.size
    assert summary.moved_samples == int((destinations != homes).sum())
    assert summary.size == int(lengths.sum())
    assert summary.max_load_after >= summary.lower_bound * (1 - 1e-9)


def test_all_empty_is_a_plan() -> None:
    plan = make_plan(inputs([submission(), submission()]))
    assert isinstance(plan, RoundPlan)
    assert [piece.destinations.size for piece in plan.slices] == [0, 0]
    assert plan.figures.imbalance_before == plan.figures.imbalance_after == 1.0


def test_integer_and_floating_costs_mix() -> None:
    plan = make_plan(inputs([submission(1, 2), submission(0.5, 9.25, dtype=np.float64)]))
    assert isinstance(plan, RoundPlan)
    assert plan.loads_after.sum() == pytest.approx(12.75)


def test_speeds_and_nodes_reach_the_partition() -> None:
    submissions = [submission(*[1] * 8) for _ in range(4)]
    plan = make_plan(inputs(submissions, counts="free", speeds=(3.0, 1.0, 1.0, 3.0), nodes=("a", "a", "b", "b")))
    assert isinstance(plan, RoundPlan)
    assert plan.loads_after.tolist() == [[12, 4, 4, 12]]
    between = sum(
        int(n)
        for rank, piece in enumerate(plan.slices)
        for home, n in zip(piece.sources, piece.source_counts, strict=True)
        if home // 2 != rank // 2
    )
    assert plan.figures.moved_size_between_nodes == between


def test_memory_caps_that_cannot_hold_tell_the_shortfall() -> None:
    crowded = [submission(1, 1, memory=np.array([4.0, 4.0])), submission(1, 1, memory=np.array([4.0, 4.0]))]
    failure = make_plan(inputs(crowded, memory_caps=(6.0, 6.0)))
    assert isinstance(failure, PlanFailure)
    assert failure.reason is Reason.NOT_FOUND
    assert failure.detail.startswith("impossible")
    plan = make_plan(inputs(crowded, memory_caps=(8.0, 8.0)))
    assert isinstance(plan, RoundPlan)


def test_a_partition_that_raises_is_a_failure() -> None:
    failure = make_plan(inputs([submission(1), submission(1)], strategy="unknown"))
    assert isinstance(failure, PlanFailure)
    assert failure.reason is Reason.PARTITION_FAILED
    assert "unknown" in failure.detail
