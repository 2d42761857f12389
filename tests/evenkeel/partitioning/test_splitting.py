"""Samples in parts: near the best of all plans where few are; what holds of every plan is in test_fuzz."""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from evenkeel.partitioning import PartitionError
from evenkeel.partitioning.rounds import RoundPlan, partition_batches
from evenkeel.partitioning.split_search import split_batch
from evenkeel.partitioning.splits import Divisible, SpanCosts, SplitOptions
from tests.evenkeel.partitioning.instances import round_of
from tests.evenkeel.partitioning.reference import Traffic
from tests.evenkeel.partitioning.test_fuzz import check_parts


def divisible_of(spans: SpanCosts, which: list[int] | None = None) -> Divisible:
    """All samples, or some, as those that may be split."""
    samples = np.arange(len(spans)) if which is None else np.array(which, np.int64)
    return Divisible.with_spans(spans.take(samples), samples, np.zeros(samples.size))


def planned(
    spans: SpanCosts,
    homes: Any,
    num_ranks: int,
    split: SplitOptions,
    which: list[int] | None = None,
    **options: Any,
) -> tuple[RoundPlan | PartitionError, RoundPlan | None]:
    """The best assignment of whole samples, and what is made of it."""
    samples, how = round_of(
        spans.whole, homes, num_ranks, divisible=divisible_of(spans, which).table, split=split, **options
    )
    found = partition_batches(samples, how)
    return found, split_batch(samples, how, found)


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


def test_giants_are_shared_evenly_inside_a_node() -> None:
    lengths = np.full(64, 500)
    lengths[[5, 40]] = 60_000
    spans = SpanCosts.of(lengths, per_position=5120, per_pair=2)
    found, plan = planned(
        spans, np.repeat(np.arange(16), 4), 16, SplitOptions(within=100, between=50_000), nodes=np.arange(16) // 8,
        counts="free",
    )  # fmt: skip
    assert isinstance(found, RoundPlan)
    even = spans.whole.sum() / 16
    assert plan.figures.split_samples == 2
    assert plan.figures.exchanged_between_nodes == 0
    assert found.batches[0].lower_bound > 6 * even
    assert plan.loads_after.max() < 1.05 * even


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


@pytest.mark.parametrize(
    ("lengths", "caps", "above"),
    [
        ([100, 10, 10, 10], [40.0] * 4, 100.0),  # no rank holds the first: it is split for that reason alone
        ([1000, 100, 100], [800.0, 300.0, 110.0], 0.05),  # parts fill what different caps leave
        ([1000, 10], [560.0, 560.0], 0.05),  # equal work would break them
    ],
)
def test_parts_keep_to_memory_caps(lengths: list[int], caps: list[float], above: float) -> None:
    spans, num_ranks = SpanCosts.of(lengths, per_pair=1.0), len(caps)
    how: dict[str, Any] = {"memory": spans.positions, "counts": "free"}
    plan = planned(spans, range(num_ranks), num_ranks, SplitOptions(above=above), memory_caps=caps, **how)[1]
    assert plan is not None
    check_parts(plan, spans, set(range(len(lengths))), how | {"memory_caps": caps, "split": SplitOptions()}, num_ranks)
    tight = [0.2 * sum(lengths) / num_ranks] * num_ranks
    assert planned(spans, range(num_ranks), num_ranks, SplitOptions(), memory_caps=tight, **how)[1] is None


def test_caps_that_nothing_fits_are_refused_in_time() -> None:
    """No rank can be filled: lengths are tens, and so are parts, but caps are not. There are 56 ways of splitting."""
    lengths = 10 * np.clip(np.random.default_rng(0).lognormal(3, 1.2, 341), 1, 1e6).astype(np.int64)
    lengths[0] += 10 * ((2 - lengths.sum() // 10) % 5)
    spans = SpanCosts.of(lengths, per_position=1.0, per_pair=0.01, granule=10)
    heavy, caps = np.sort(np.argsort(-lengths)[:20]).tolist(), [lengths.sum() / 5] * 5
    began = time.process_time()
    whole, plan = planned(
        spans, np.arange(341) * 5 // 341, 5, SplitOptions(), which=heavy, memory=lengths, memory_caps=caps,
        strategy="lpt",
    )  # fmt: skip
    assert isinstance(whole, PartitionError)
    assert plan is None
    assert time.process_time() - began < 2
