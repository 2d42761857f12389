"""Samples in parts: every position exactly once, never longer than whole, near the best of all plans where few are."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from evenkeel.partitioning import PartitionError
from evenkeel.partitioning.rounds import RoundPlan, partition_batches
from evenkeel.partitioning.splits import Divisible, SpanCosts, SplitOptions
from evenkeel.partitioning.splits.stage import BatchParts, split_batch
from tests.evenkeel.partitioning.least_splits import least_time
from tests.evenkeel.partitioning.rounds import round_of
from tests.evenkeel.partitioning.test_fuzz import check_parts


def divisible_of(spans: SpanCosts, which: list[int] | None = None) -> Divisible:
    """All samples, or some, as those that may be split."""
    samples = np.arange(len(spans)) if which is None else np.array(which, np.int64)
    return Divisible(samples=samples, first_items=np.zeros(samples.size), spans=spans.take(samples))


def planned(
    spans: SpanCosts,
    homes: Any,
    num_ranks: int,
    split: SplitOptions,
    which: list[int] | None = None,
    **options: Any,
) -> tuple[RoundPlan | PartitionError, BatchParts | None]:
    """The best assignment of whole samples, and what is made of it."""
    samples, how = round_of(
        spans.whole, homes, num_ranks, divisible=divisible_of(spans, which).table, split=split, **options
    )
    found = partition_batches(samples, how)
    return found, split_batch(samples, how, found)


@st.composite
def rounds(draw: st.DrawFn) -> dict[str, Any]:
    """Rounds with some giants, some samples that cannot be cut, nodes, speeds and prices."""
    num_ranks = draw(st.integers(2, 9))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    n = draw(st.integers(1, 40))
    positions = rng.integers(0, 60, n)
    positions[rng.random(n) < draw(st.floats(0, 0.3))] = draw(st.integers(200, 5000))
    context, candidates = rng.integers(0, 3, n), rng.integers(0, 9, n)
    spans = SpanCosts.of(
        context + positions + candidates,
        context=context,
        candidates=candidates,
        per_position=50.0,
        per_pair=draw(st.sampled_from([0.0, 0.3, 2.0])),
        granule=draw(st.integers(1, 3)),
    )
    call: dict[str, Any] = {
        "spans": spans,
        "homes": np.sort(rng.integers(0, num_ranks, n)),
        "num_ranks": num_ranks,
        "which": np.flatnonzero(rng.random(n) < draw(st.sampled_from([1.0, 0.5]))).tolist(),
        "split": SplitOptions(
            above=draw(st.sampled_from([0.0, 0.05, 0.5])),
            within=draw(st.sampled_from([0.0, 20.0])),
            between=draw(st.sampled_from([0.0, 100.0])),
            fixed=draw(st.sampled_from([0.0, 500.0])),
        ),
        "counts": draw(st.sampled_from(["equal", "free"])),
        "min_samples": draw(st.sampled_from([0, 1, 2])),
        "sizes": spans.positions,
    }
    if draw(st.booleans()):
        call["nodes"] = rng.integers(0, 3, num_ranks)
    if draw(st.booleans()):
        call["speeds"] = rng.uniform(0.5, 2.0, num_ranks)
    return call


class Traffic:
    """What ranks send and receive: to each node once, a share to each of its ranks, which passes it on to the others.

    Args:
        num_ranks: Ranks.
        nodes: Of each.
        within: Price of a position that goes to a rank of the same node.
        between: Price of one that goes to another.
    """

    def __init__(self, num_ranks: int, nodes: Any, within: float, between: float) -> None:
        self.nodes, self.prices, self.first, self.then = nodes, (within, between), *np.zeros((2, 2, num_ranks))

    def add(self, keys: float, source: int, targets: list[int]) -> None:
        """Keys and values of a piece go to the ranks of later ones."""
        for relay in targets:
            others = [rank for rank in targets if self.nodes[rank] == self.nodes[relay] and rank != relay]
            share = keys / (len(others) + 1)
            price = share * self.prices[int(self.nodes[source] != self.nodes[relay])]
            self.first[:, [source, relay]] += [[price, 0.0], [0.0, price]]
            for rank in others:
                self.then[:, [relay, rank]] += share * self.prices[0] * np.eye(2)

    def times(self) -> NDArray[np.float64]:
        """(num_ranks,) the more of what is sent and received, and again of what is passed on."""
        times: NDArray[np.float64] = self.first.max(axis=0) + self.then.max(axis=0)
        return times


def recounted(call: dict[str, Any], plan: BatchParts) -> tuple[list[float], NDArray[np.float64], int, int]:
    """Loads and exchange of each rank, and the positions that travel, one by one from the spans."""
    spans, num_ranks, split = call["spans"], call["num_ranks"], call["split"]
    nodes = call.get("nodes", np.zeros(num_ranks))
    loads, travelled = [0.0] * num_ranks, [0, 0]
    traffic = Traffic(num_ranks, nodes, split.within, split.between)
    for sample, begin, end, rank, _ in plan.parts.tolist():
        if not end:
            loads[rank] += float(spans.whole[sample])
            continue
        loads[rank] += float(spans.take([sample]).of_spans(begin, end)[0])
        keys = max(min(end, spans.positions[sample] - spans.candidates[sample]) - begin, 0)
        later = [target for other, first, _, target, _ in plan.parts.tolist() if other == sample and first > begin]
        far = len({nodes[target] for target in later} - {nodes[rank]})
        travelled[0] += int(keys) * (len(later) - far)
        travelled[1] += int(keys) * far
        traffic.add(keys, rank, later)
    return loads, traffic.times(), travelled[0], travelled[1]


@settings(max_examples=60)
@given(call=rounds())
def test_every_position_once_and_never_longer_than_whole(call: dict[str, Any]) -> None:
    found, plan = planned(**call)
    spans, speeds = call["spans"], np.asarray(call.get("speeds", np.ones(call["num_ranks"])))
    if plan is None:
        return
    check_parts(plan, spans, set(call["which"]), call, call["num_ranks"])
    assert plan.parts["end"].any()
    sequences = np.bincount(plan.parts["rank"], minlength=call["num_ranks"])
    assert sequences.min() >= call["min_samples"] or len(spans) < call["min_samples"] * call["num_ranks"]
    loads, exchange, within, between = recounted(call, plan)
    figures = plan.figures
    np.testing.assert_allclose(plan.loads, loads, rtol=1e-9)
    assert (figures.exchanged, figures.exchanged_between_nodes) == (within + between, between)
    assert isinstance(found, RoundPlan)
    time = (plan.loads / speeds + exchange).max() + call["split"].fixed
    np.testing.assert_allclose(figures.max_load_after, time, rtol=1e-9)
    even = spans.whole.sum() / speeds.sum()
    assert even * (1 - 1e-9) <= figures.max_load_after < found.batches[0].max_load_after
    assert found.batches[0].lower_bound > (1 + call["split"].above) * even * (1 - 1e-9)
    again = planned(**call)[1]
    assert again is not None
    assert np.array_equal(plan.parts, again.parts)


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
    divisible = divisible_of(spans)
    assert least_time(spans.whole, divisible, num_ranks, price, num_ranks) <= best * (1 + 1e-9)


def test_giants_are_shared_evenly_inside_a_node() -> None:
    lengths = np.full(64, 500)
    lengths[[5, 40]] = 60_000
    spans = SpanCosts.of(lengths, per_position=5120, per_pair=2)
    found, plan = planned(
        spans, np.repeat(np.arange(16), 4), 16, SplitOptions(within=100, between=50_000), nodes=np.arange(16) // 8,
        counts="free",
    )  # fmt: skip
    assert isinstance(found, RoundPlan)
    assert plan is not None
    even = spans.whole.sum() / 16
    assert plan.figures.split_samples == 2
    assert plan.figures.exchanged_between_nodes == 0
    assert found.batches[0].lower_bound > 6 * even
    assert plan.loads.max() < 1.05 * even


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
    begins, ends = plan.parts["begin"], plan.parts["end"]
    held = np.where(ends > 0, ends - begins, spans.positions[plan.parts["sample"]])
    used = np.bincount(plan.parts["rank"], held, num_ranks)
    assert (used <= np.array(caps) * (1 + 1e-9)).all()
    tight = [0.2 * sum(lengths) / num_ranks] * num_ranks
    assert planned(spans, range(num_ranks), num_ranks, SplitOptions(), memory_caps=tight, **how)[1] is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"above": -1}, r"split.above is -1; use a share of an even division, 0 to 1000"),
        ({"within": float("nan")}, r"split.within is nan; use units of cost, 0 to 1e\+100"),
        ({"between": "fast"}, r"split.between is 'fast'; use units of cost"),
        ({"fixed": -1.0}, r"split.fixed is -1.0; use units of cost, 0 to"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SplitOptions(**changes)
