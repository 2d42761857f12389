"""Rounds whose samples are split, carried out on lists: every value arrives once, and where the pieces say."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from evenkeel.partitioning import PartitionError
from evenkeel.partitioning.refinements import plan_round, slice_round
from evenkeel.partitioning.rounds import RankPlan, RoundOptions, RoundPlan
from evenkeel.partitioning.splits import SplitOptions, part_ranges, read_parts, read_splits, samples_of_parts
from tests.evenkeel.protocol.rounds import GRANULE, HEAD, ROLES, Round, make_round, rounds, split_samples


def own_of(done: Round, rank: int) -> slice:
    """Where a rank's samples are."""
    ends = np.cumsum(done.samples.counts_at_home)
    return slice(int(ends[rank] - done.samples.counts_at_home[rank]), int(ends[rank]))


def owns(done: Round, plan: RoundPlan) -> list[RankPlan]:
    """What each rank is sent of a plan, as a directive has it."""
    slices, found = slice_round(plan, done.samples), []
    for rank in range(done.samples.num_ranks):
        own = slice(int(slices.home_begin[rank]), int(slices.home_begin[rank + 1]))
        steps, count = None if slices.steps is None else slices.steps[own], len(plan.batches)
        one = RankPlan(steps=steps, slices=slices.batches_of(rank), cuts=(None,) * count)
        if plan.parts is not None:
            steps, cuts = read_parts(plan.parts.begins[own], steps, count)
            one = replace(one, steps=steps, cuts=cuts)
        found.append(one)
    return found


Part = tuple[int, int, int, int]  # rank and sample that it is of, its first item, and the one after its last


def carried_out(done: Round, plans: list[RankPlan], batch: int) -> list[list[Part]]:
    """What each rank trains in a batch, in the order of arrival; checks what it is told to expect."""
    arrived: list[list[Part]] = [[] for _ in plans]
    totals = np.zeros((len(plans), len(plans), ROLES.size), np.int64)
    for rank, plan in enumerate(plans):
        own = own_of(done, rank)
        lengths = done.samples.lengths[own]
        trained = np.arange(len(lengths)) if plan.steps is None else np.flatnonzero(plan.steps == batch)
        cuts = plan.cuts_in(batch)
        if cuts is None:
            cuts = np.zeros(trained.size, np.int64)
        assert np.count_nonzero(cuts == 0) == trained.size == plan.own_in(batch)
        begins, ends = part_ranges(lengths[trained], cuts, ROLES)
        sent = ends - begins
        for part, target in enumerate(plan.slices[batch].destinations.tolist()):
            sample = int(trained[samples_of_parts(cuts)[part]])
            arrived[target].append((rank, sample, int(begins[part, 0]), int(ends[part, 0])))
            totals[rank, target] += sent[part]
    for rank, plan in enumerate(plans):
        piece = plan.slices[batch]
        assert len(arrived[rank]) == piece.source_counts.sum()
        np.testing.assert_array_equal(totals[piece.sources, rank], piece.source_totals)
        assert totals[:, rank].sum() == piece.source_totals.sum()
    return arrived


@settings(max_examples=120)
@given(done=rounds())
def test_values_arrive_once_and_pieces_are_where_they_say(done: Round) -> None:
    try:
        plan = plan_round(done.samples, done.options)
    except PartitionError:
        return
    strangers = replace(done.samples, users=None)
    plans, alone = owns(done, plan), plan_round(strangers, done.options)
    assert plan_round(done.samples, done.options.spreading()).parts is None  # where nothing is balanced
    if alone.parts is None:
        assert alone.batches == plan_round(strangers, replace(done.options, split=None)).batches
    seen: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for batch, figures in enumerate(plan.batches):
        assert figures.max_load_after <= alone.batches[batch].max_load_after
        arrived = carried_out(done, plans, batch)
        splits = () if plan.parts is None else read_splits(plan.parts.pieces, len(plan.batches))[batch]
        assert not splits or arrived == carried_out(done, owns(done, alone), batch), "users change no batch with parts"
        parts = [(rank, place) for rank, ranks in enumerate(arrived) for place in range(len(ranks))]
        of_pieces = [(piece.rank, piece.sequence) for sample in splits for piece in sample.pieces]
        assert len(set(of_pieces)) == len(of_pieces)
        for sample in splits:
            first = sample.pieces[0]
            home, own, _, _ = arrived[first.rank][first.sequence]
            assert sample.num_context == HEAD
            assert len(sample) == HEAD + GRANULE * int(done.samples.lengths[own_of(done, home)][own, 0])
            for number, piece in enumerate(sample.pieces):
                item = 0 if number == 0 else (piece.begin - HEAD) // GRANULE
                assert arrived[piece.rank][piece.sequence] == (home, own, item, (piece.end - HEAD) // GRANULE)
        for rank, place in parts:
            home, own, begin, end = arrived[rank][place]
            if (rank, place) not in of_pieces:
                assert (begin, end) == (0, done.samples.lengths[own_of(done, home)][own, 0])
            seen.setdefault((home, own), []).append((begin, end))
        assert figures.split_samples == len(splits)
        assert figures.pieces == len(of_pieces)
        assert figures.samples == sum(begin == 0 for ranks in arrived for *_, begin, _ in ranks)
        if splits and figures.max_load_whole:
            assert figures.max_load_after < figures.max_load_whole
        assert (figures.exchanged > 0) == bool(splits)
    for rank in range(done.samples.num_ranks):
        for sample, lengths in enumerate(done.samples.lengths[own_of(done, rank)]):
            spans = sorted(seen.pop((rank, sample)))
            assert spans[0][0] == 0
            assert all(one[1] == other[0] for one, other in pairwise(spans))
            assert spans[-1][1] == lengths[0]
    assert not seen
    assert np.array_equal(plan.destinations, plan_round(done.samples, done.options).destinations)


def round_with(items: list[list[int]], **options: Any) -> Round:
    """A round of one batch with samples of so many items on each rank."""
    own = np.array(items)
    samples = split_samples(own.ravel(), np.full((len(own), 1), own.shape[1]), np.random.default_rng(0))
    memory = own.ravel().astype(np.float64)
    return replace(
        make_round(), samples=replace(samples, memory=memory), options=RoundOptions(split=SplitOptions(), **options)
    )


GIANTS = [[900, 20, 20], [20, 20, 20], [20, 20, 20], [20, 20, 20]]


def test_what_fits_no_rank_is_split_for_that_alone() -> None:
    done = round_with(GIANTS, memory_caps=(300.0,) * 4, counts="free")
    with pytest.raises(PartitionError):
        plan_round(done.samples, replace(done.options, split=None))
    (figures,) = plan_round(done.samples, done.options).batches
    assert figures.split_samples == 1
    assert figures.max_load_whole == 0
    with pytest.raises(PartitionError):
        plan_round(done.samples, replace(done.options, memory_caps=(200.0,) * 4))
