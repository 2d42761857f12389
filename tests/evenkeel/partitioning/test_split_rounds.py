"""Rounds whose samples are split, carried out on lists: every value arrives once, and where the pieces say."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from benchmarks.harness.plans import said
from hypothesis import given, settings
from hypothesis import strategies as st

from evenkeel.partitioning import PartitionError
from evenkeel.partitioning.rounds import RankPlan, RoundOptions, RoundPlan, digest_of, plan_round
from evenkeel.partitioning.samples import RankSamples, RoundSamples
from evenkeel.partitioning.splits import (
    ALL,
    FIRST,
    LAST,
    Cuts,
    Divisible,
    SpanCosts,
    SplitOptions,
    check_table,
    part_ranges,
)

ROLES = np.array([1, 2, LAST, FIRST, ALL])
HEAD, GRANULE = 3, 2  # of a sequence whose items are two positions, behind three contextual ones


@dataclass(frozen=True)
class Round:
    """A round as its ranks tell of it."""

    ranks: list[RankSamples]
    samples: RoundSamples
    options: RoundOptions

    def plan(self) -> RoundPlan:
        return plan_round(self.samples, self.options)


def rank_samples(items: list[list[int]], rng: np.random.Generator) -> RankSamples:
    """Samples of a rank, batch by batch, by their numbers of items."""
    own = np.array([item for batch in items for item in batch], np.int64)
    others = rng.integers(0, 5, (own.size, 3))
    spans = SpanCosts.of(HEAD + GRANULE * own, context=HEAD, per_position=20, per_pair=1, granule=GRANULE)
    heavy = np.flatnonzero(own > 60)
    divisible = Divisible(samples=heavy, first_items=np.full(heavy.size, HEAD), spans=spans.take(heavy))
    assert check_table(divisible.table, spans.whole) == ""
    return RankSamples(
        costs=spans.whole,
        lengths=np.column_stack([own, 2 * own, others]).astype(np.uint32),
        batch_sizes=tuple(map(len, items)),
        memory=own.astype(np.float64),
        divisible=divisible.table if heavy.size else None,
        roles=ROLES,
    )


def round_of(ranks: list[RankSamples], num_batches: int, options: RoundOptions, nodes: Any = None) -> Round:
    columns = RoundSamples.columns(
        [said(ranks, window=num_batches).samples], nodes, with_memory=bool(options.memory_caps), roles=ROLES
    )
    samples = RoundSamples(**{name: column.joined() for name, column in columns.items()})
    return Round(ranks, samples, options)


@st.composite
def rounds(draw: st.DrawFn) -> Round:
    """Of a few ranks and batches, with some giants."""
    num_ranks, num_batches = draw(st.integers(2, 5)), draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    giants = draw(st.floats(0, 0.4))
    ranks = []
    for _ in range(num_ranks):
        sizes = rng.integers(0, 5, num_batches)
        items = [np.where(rng.random(n) < giants, rng.integers(61, 800, n), rng.integers(0, 60, n)) for n in sizes]
        ranks.append(rank_samples([one.tolist() for one in items], rng))
    options = RoundOptions(
        counts=draw(st.sampled_from(["equal", "free"])),
        split=SplitOptions(
            above=draw(st.sampled_from([0.0, 0.1])),
            within=draw(st.sampled_from([0.0, 5.0])),
            fixed=draw(st.sampled_from([0.0, 30_000.0])),
        ),
        speeds=tuple(rng.uniform(0.5, 2, num_ranks).tolist()) if draw(st.booleans()) else (),
        memory_caps=(900.0,) * num_ranks if draw(st.booleans()) else (),
    )
    nodes = np.arange(num_ranks, dtype=np.int32) // 2 if num_ranks > 2 and draw(st.booleans()) else None
    return round_of(ranks, num_batches, options, nodes)


Part = tuple[int, int, int, int]  # rank and sample that it is of, its first item, and the one after its last


def carried_out(done: Round, plans: list[RankPlan], batch: int) -> list[list[Part]]:
    """What each rank trains in a batch, in the order of arrival; checks what it is told to expect."""
    arrived: list[list[Part]] = [[] for _ in plans]
    totals = np.zeros((len(plans), len(plans), ROLES.size), np.int64)
    for rank, (own, plan) in enumerate(zip(done.ranks, plans, strict=True)):
        trained = np.arange(len(own))[own.in_batch(batch) if plan.steps is None else plan.steps == batch]
        cuts = plan.cuts_in(batch)
        if cuts is None:
            cuts = Cuts(samples=np.arange(trained.size), begins=np.zeros(trained.size, np.int64))
        assert cuts.num_samples == trained.size == plan.own_in(batch)
        begins, ends = part_ranges(own.lengths[trained], cuts, ROLES)
        sent = plan.sent_in(own, batch)
        np.testing.assert_array_equal(sent, ends - begins)
        for part, target in enumerate(plan.slices[batch].destinations.tolist()):
            sample = int(trained[cuts.samples[part]])
            arrived[target].append((rank, sample, int(begins[part, 0]), int(ends[part, 0])))
            totals[rank, target] += sent[part]
    for rank, plan in enumerate(plans):
        piece = plan.slices[batch]
        assert len(arrived[rank]) == piece.source_counts.sum()
        np.testing.assert_array_equal(totals[piece.sources, rank], piece.source_totals)
        assert totals[:, rank].sum() == piece.source_totals.sum()
    return arrived


@settings(max_examples=80)
@given(done=rounds())
def test_values_arrive_once_and_pieces_are_where_they_say(done: Round) -> None:
    try:
        plan = done.plan()
    except PartitionError:
        return
    plans = [plan.of(rank) for rank in range(len(done.ranks))]
    seen: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for batch, figures in enumerate(plan.batches):
        arrived = carried_out(done, plans, batch)
        splits = plans[0].splits[batch] if plans[0].splits else ()
        parts = [(rank, place) for rank, ranks in enumerate(arrived) for place in range(len(ranks))]
        of_pieces = [(piece.rank, piece.sequence) for sample in splits for piece in sample.pieces]
        assert len(set(of_pieces)) == len(of_pieces)
        for sample in splits:
            first = sample.pieces[0]
            home, own, _, _ = arrived[first.rank][first.sequence]
            assert sample.num_context == HEAD
            assert len(sample) == HEAD + GRANULE * int(done.ranks[home].lengths[own, 0])
            for number, piece in enumerate(sample.pieces):
                item = 0 if number == 0 else (piece.begin - HEAD) // GRANULE
                assert arrived[piece.rank][piece.sequence] == (home, own, item, (piece.end - HEAD) // GRANULE)
        for rank, place in parts:
            home, own, begin, end = arrived[rank][place]
            if (rank, place) not in of_pieces:
                assert (begin, end) == (0, done.ranks[home].lengths[own, 0])
            seen.setdefault((home, own), []).append((begin, end))
        assert figures.split_samples == len(splits)
        assert figures.pieces == len(of_pieces)
        assert figures.samples == sum(one.own_in(batch) for one in plans)
        if splits and figures.max_load_whole:
            assert figures.max_load_after < figures.max_load_whole
        assert (figures.exchanged > 0) == bool(splits)
    for rank, own_samples in enumerate(done.ranks):
        for sample in range(len(own_samples)):
            spans = sorted(seen.pop((rank, sample)))
            assert spans[0][0] == 0
            assert all(one[1] == other[0] for one, other in pairwise(spans))
            assert spans[-1][1] == own_samples.lengths[sample, 0]
    assert not seen
    assert digest_of(plan, done.samples) == digest_of(done.plan(), done.samples)


def giants(num_batches: int = 1, **changes: Any) -> Round:
    rng = np.random.default_rng(0)
    items = [[[900 if rank + batch == 0 else 20, 20, 20] for batch in range(num_batches)] for rank in range(4)]
    options = RoundOptions(split=SplitOptions(), **changes)
    return round_of([rank_samples(own, rng) for own in items], num_batches, options)


def test_a_giant_is_no_longer_the_bound() -> None:
    done = giants()
    (figures,) = done.plan().batches
    assert (figures.split_samples, figures.pieces) == (1, 4)
    assert figures.max_load_after < 1.02 * figures.mean_load
    assert figures.max_load_whole >= figures.lower_bound > 3 * figures.mean_load
    (whole,) = plan_round(done.samples, replace(done.options, split=None)).batches
    assert whole.split_samples == 0
    assert whole.max_load_after == figures.max_load_whole
    assert digest_of(done.plan(), done.samples) != digest_of(
        plan_round(done.samples, replace(done.options, split=SplitOptions(within=30.0))), done.samples
    )


def test_without_giants_the_plan_is_the_same_as_ever() -> None:
    rng = np.random.default_rng(1)
    ranks = [rank_samples([rng.integers(40, 80, 8).tolist()], rng) for _ in range(4)]
    done = round_of(ranks, 1, RoundOptions(split=SplitOptions()))
    plan, before = done.plan(), plan_round(done.samples, RoundOptions())
    assert plan.parts is None
    assert plan.batches == before.batches
    assert digest_of(plan, done.samples) == digest_of(before, done.samples)
    assert plan.of(0).cuts == plan.of(0).splits == ()


@pytest.mark.parametrize("search", ["stay", "cheapest", "spreading"])
def test_rounds_that_are_not_balanced_or_in_a_hurry_have_whole_samples(search: str) -> None:
    done = giants()
    options = replace(done.options, stay=True) if search == "stay" else getattr(done.options, search)()
    assert plan_round(done.samples, options).parts is None


def test_what_fits_no_rank_is_split_for_that_alone() -> None:
    done = giants(memory_caps=(300.0,) * 4, counts="free")
    with pytest.raises(PartitionError):
        plan_round(done.samples, replace(done.options, split=None))
    (figures,) = done.plan().batches
    assert figures.split_samples == 1
    assert figures.max_load_whole == 0
    with pytest.raises(PartitionError):
        plan_round(done.samples, replace(done.options, memory_caps=(200.0,) * 4))


def test_a_window_that_goes_on_keeps_its_batches_and_is_split_anew() -> None:
    done = giants(num_batches=2, memory_caps=(1e9,) * 4)
    before = done.plan()
    ranks = []
    for rank, own in enumerate(done.ranks):
        plan = before.of(rank)
        assert plan.steps is not None
        to = np.empty(len(own), np.int64)
        for batch in range(2):
            to[plan.steps == batch] = plan.ranks_in(batch)
        ranks.append(replace(own, given=plan.steps.astype(np.int64) << 32 | to))
    samples = replace(done.samples, given=np.concatenate([own.given for own in ranks if own.given is not None]))
    for caps in ((), (300.0,) * 4):
        after = plan_round(samples, replace(done.options, memory_caps=caps))
        for rank in range(4):
            np.testing.assert_array_equal(after.of(rank).steps, before.of(rank).steps)
        assert [one.split_samples for one in after.batches] == [one.split_samples for one in before.batches]
        assert after.figures.split_samples == 1
