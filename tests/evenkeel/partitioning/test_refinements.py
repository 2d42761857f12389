"""What refinements of a plan gain: windows, samples in parts; what holds of every plan is in test_fuzz."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from evenkeel.partitioning import PartitionError
from evenkeel.partitioning.refinements import plan_round
from evenkeel.partitioning.rounds import RoundPlan, partition_batches
from evenkeel.partitioning.split_search import split_heavy
from evenkeel.partitioning.splits import SpanCosts, SplitOptions, table_of
from tests.evenkeel.partitioning.instances import round_of
from tests.evenkeel.partitioning.reference import Traffic


def plan_of(call: dict[str, Any]) -> RoundPlan:
    return plan_round(*round_of(**call))


def giants(num_ranks: int, num_steps: int, samples: int, cost: int = 10_000) -> dict[str, Any]:
    """One sample in each batch that outweighs a rank's share of it by far."""
    steps = np.tile(np.repeat(np.arange(num_steps), samples), num_ranks)
    homes = np.repeat(np.arange(num_ranks), samples * num_steps)
    costs = np.full(steps.size, 10)
    for step in range(num_steps):
        costs[np.flatnonzero((steps == step) & (homes == step % num_ranks))[0]] = cost
    return {"costs": costs, "homes": homes, "steps": steps, "num_ranks": num_ranks, "num_steps": num_steps}


@pytest.mark.parametrize(
    ("num_steps", "cost", "most"),
    [(2, 10_000, 10_070 + 80), (4, 10_000, 10_070 + 3 * 80), (4, 60, 380)],  # by themselves as often 10,070, or 130
)
def test_giants_of_all_batches_meet_in_one(num_steps: int, cost: int, most: int) -> None:
    call = giants(num_ranks=4, num_steps=num_steps, samples=8, cost=cost)
    plan, heavy = plan_of(call), call["costs"] == cost
    assert plan.loads_after.max(axis=1).sum() <= most
    if cost == 10_000:
        assert len(set(plan.steps[heavy].tolist())) == 1
        assert len(set(plan.destinations[heavy].tolist())) == num_steps
        assert np.count_nonzero(plan.steps != call["steps"]) == 2 * (num_steps - 1)  # and what made room for them
    assert (plan_of(call | {"stay": True}).steps == call["steps"]).all()


def planned(
    spans: SpanCosts,
    homes: Any,
    num_ranks: int,
    split: SplitOptions,
    which: list[int] | None = None,
    **options: Any,
) -> tuple[RoundPlan | PartitionError, RoundPlan | None]:
    """The best assignment of whole samples, and what is made of it."""
    may = np.arange(len(spans)) if which is None else np.array(which, np.int64)
    table = table_of(spans.take(may), may, np.zeros(may.size))
    samples, how = round_of(spans.whole, homes, num_ranks, divisible=table, split=split, **options)
    (found,) = partition_batches(samples, how).plans
    plan = split_heavy(samples, how, found)
    return found, plan if isinstance(plan, RoundPlan) and plan is not found else None


def exhaustive(spans: SpanCosts, num_ranks: int, nodes: NDArray[np.int64], within: float, between: float) -> float:
    """The least time of all plans, by trying each division of each sample, and each set of ranks.

    Args:
        spans: Of the samples.
        num_ranks: Of equal speed.
        nodes: (num_ranks,) of each.
        within: Price of a position that goes to a rank of the same node.
        between: Price of one that goes to another.
    """
    choices = []
    for sample in range(len(spans)):
        one, end = spans.take([sample]), int(spans.positions[sample])
        found = []
        for count in range(1, num_ranks + 1):
            for cuts in itertools.combinations(range(1, end), count - 1):
                edges = [0, *cuts, end]
                for ranks in itertools.permutations(range(num_ranks), count):
                    load, traffic = np.zeros(num_ranks), Traffic(num_ranks, nodes, within, between)
                    for place, rank in enumerate(ranks):
                        load[rank] = one.of_spans(edges[place], edges[place + 1])[0]
                        traffic.add(edges[place + 1] - edges[place], rank, list(ranks[place + 1 :]))
                    found.append(np.stack([load + traffic.then[0], *traffic.first]))
        choices.append(np.stack(found))
    totals = choices[0]
    for more in choices[1:]:
        totals = (totals[:, None] + more[None]).reshape(-1, 3, num_ranks)
    return float((totals[:, 0] + np.maximum(totals[:, 1], totals[:, 2])).max(axis=1).min())


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 8), min_size=1, max_size=3),
    num_ranks=st.integers(2, 3),
    price=st.sampled_from([0.0, 0.5, 3.0]),
    far=st.sampled_from([1.0, 4.0]),
    per_pair=st.sampled_from([0.0, 1.0]),
)
def test_small_rounds_are_near_the_best_plan(
    lengths: list[int], num_ranks: int, price: float, far: float, per_pair: float
) -> None:
    spans, nodes = SpanCosts.of(lengths, per_position=4.0, per_pair=per_pair), np.array([0, 1, 1])[:num_ranks]
    found, plan = planned(
        spans, np.zeros(len(lengths)), num_ranks, SplitOptions(above=0.0, within=price, between=far * price),
        nodes=nodes, counts="free", move_price=0.0,
    )  # fmt: skip
    assert isinstance(found, RoundPlan)
    best = exhaustive(spans, num_ranks, nodes, price, far * price)
    time = (found.batches[0] if plan is None else plan.figures).max_load_after
    assert time >= best * (1 - 1e-12)
    assert time <= 1.3 * best + 4 + 9 * per_pair  # a position is the least that can be moved


def test_where_the_exchange_takes_longer_samples_stay_whole() -> None:
    spans = SpanCosts.of([1000, 10, 10, 10], per_position=1.0)
    homes = [0, 1, 2, 3]
    assert planned(spans, homes, 4, SplitOptions())[1] is not None
    assert planned(spans, homes, 4, SplitOptions(within=10.0))[1] is None
    assert planned(spans, homes, 4, SplitOptions(above=3.0))[1] is None
    assert planned(spans, homes, 4, SplitOptions(fixed=700.0))[1] is not None
    assert planned(spans, homes, 4, SplitOptions(fixed=800.0))[1] is None  # of 1000, an even division saves 743
    assert planned(spans, homes, 4, SplitOptions(), which=[1, 2])[1] is None
    assert planned(spans, [0] * 4, 1, SplitOptions())[1] is None
