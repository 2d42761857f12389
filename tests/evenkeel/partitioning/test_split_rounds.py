"""Rounds whose samples are split, carried out on lists: every value arrives once, and where the pieces say."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from evenkeel.partitioning import PartitionError
from evenkeel.partitioning.rounds import RankSamples, RoundOptions, RoundPlan, RoundSamples
from evenkeel.partitioning.slices import Slice
from evenkeel.partitioning.splits import (
    ALL,
    FIRST,
    LAST,
    WIDTH,
    Cuts,
    Divisible,
    SpanCosts,
    SplitOptions,
    SplitSample,
    check_table,
    part_ranges,
    read_parts,
    read_splits,
)
from evenkeel.partitioning.stages import plan_round, slice_round

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
    )


def round_of(ranks: list[RankSamples], num_batches: int, options: RoundOptions, nodes: Any = None) -> Round:
    """The round of all ranks."""
    first = np.cumsum([0, *map(len, ranks)])
    tables = [np.zeros((0, WIDTH))]
    for own, begin in zip(ranks, first.tolist(), strict=False):
        if own.divisible is not None:
            tables.append(own.divisible + begin * np.eye(1, WIDTH))
    samples = RoundSamples(
        batch_sizes=np.array([[*own.batch_sizes, *[0] * num_batches][:num_batches] for own in ranks], np.int64),
        costs=np.concatenate([own.costs for own in ranks]),
        lengths=np.concatenate([own.lengths for own in ranks]),
        memory=np.concatenate([own.memory for own in ranks if own.memory is not None]),
        nodes=nodes,
        divisible=np.concatenate(tables),
        roles=ROLES,
    )
    return Round(ranks, samples, options)


@dataclass(frozen=True)
class Own:
    """What a rank does of a plan: the batch of each of its samples, where its parts go, and how samples are cut."""

    steps: NDArray[np.int32] | None
    slices: tuple[Slice, ...]
    cuts: tuple[Cuts | None, ...]
    splits: tuple[tuple[SplitSample, ...], ...]


def owns(done: Round, plan: RoundPlan) -> list[Own]:
    """What each rank is sent of a plan, as a directive has it."""
    slices, found = slice_round(plan, done.samples), []
    for rank in range(len(done.ranks)):
        own = slice(int(slices.home_begin[rank]), int(slices.home_begin[rank + 1]))
        steps, count = None if slices.steps is None else slices.steps[own], len(plan.batches)
        cuts, splits = (None,) * count, ((),) * count
        if plan.parts is not None:
            further = np.stack([plan.parts.samples[own], plan.parts.begins[own]], axis=1)[plan.parts.begins[own] > 0]
            steps, cuts = read_parts(further, own.stop - own.start - len(further), steps, count)
            splits = read_splits(plan.parts.pieces, count)
        found.append(Own(steps, slices.batches_of(rank), cuts, splits))
    return found


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


def carried_out(done: Round, plans: list[Own], batch: int) -> list[list[Part]]:
    """What each rank trains in a batch, in the order of arrival; checks what it is told to expect."""
    arrived: list[list[Part]] = [[] for _ in plans]
    totals = np.zeros((len(plans), len(plans), ROLES.size), np.int64)
    for rank, (own, plan) in enumerate(zip(done.ranks, plans, strict=True)):
        trained = np.arange(len(own))[own.in_batch(batch) if plan.steps is None else plan.steps == batch]
        cuts = plan.cuts[batch]
        if cuts is None:
            cuts = Cuts(samples=np.arange(trained.size), begins=np.zeros(trained.size, np.int64))
        assert cuts.num_samples == trained.size
        begins, ends = part_ranges(own.lengths[trained], cuts, ROLES)
        sent = ends - begins
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
    plans = owns(done, plan)
    seen: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for batch, figures in enumerate(plan.batches):
        arrived = carried_out(done, plans, batch)
        splits = plans[0].splits[batch]
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
        assert figures.samples == sum(begin == 0 for ranks in arrived for *_, begin, _ in ranks)
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
    assert np.array_equal(plan.destinations, done.plan().destinations)


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


def test_without_giants_the_plan_is_the_same_as_ever() -> None:
    rng = np.random.default_rng(1)
    ranks = [rank_samples([rng.integers(40, 80, 8).tolist()], rng) for _ in range(4)]
    done = round_of(ranks, 1, RoundOptions(split=SplitOptions()))
    plan, before = done.plan(), plan_round(done.samples, RoundOptions())
    assert plan.parts is None
    assert plan.batches == before.batches
    assert np.array_equal(plan.destinations, before.destinations)


def test_rounds_that_are_not_balanced_have_whole_samples() -> None:
    done = giants()
    assert plan_round(done.samples, done.options.spreading()).parts is None


def test_what_fits_no_rank_is_split_for_that_alone() -> None:
    done = giants(memory_caps=(300.0,) * 4, counts="free")
    with pytest.raises(PartitionError):
        plan_round(done.samples, replace(done.options, split=None))
    (figures,) = done.plan().batches
    assert figures.split_samples == 1
    assert figures.max_load_whole == 0
    with pytest.raises(PartitionError):
        plan_round(done.samples, replace(done.options, memory_caps=(200.0,) * 4))
