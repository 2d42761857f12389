"""Real ranks against the reference gather."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings, strategies

from benchmarks.references.redistribution import redistribute_reference
from evenkeel.partitioning.slices import Slice, slice_plan
from tests.trainer_client.balancing.redistribution.pool import (
    GlooRanks,
    compiled_by,
    move,
    move_in_pieces,
    move_overlapping,
)
from tests.trainer_client.random_batches import Case, assert_same, cases
from trainer_client.balancing.batches import BatchSpec, FlatBatch, flatten
from trainer_client.balancing.redistribution import redistribute, start

# Ranks that wait for one that raised make shrinking take minutes.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)


def slices_of(case: Case) -> list[Slice]:
    lengths = np.concatenate([batch.lengths for batch in case.batches])
    return list(slice_plan(case.destinations, case.counts, lengths))


def expected_of(case: Case) -> list[FlatBatch]:
    return redistribute_reference(case.batches, np.split(case.destinations, np.cumsum(case.counts)[:-1]))


def run(ranks: GlooRanks, case: Case) -> list[FlatBatch]:
    size = len(case.batches)
    return ranks.call(move, [(batch, piece, size) for batch, piece in zip(case.batches, slices_of(case), strict=True)])


@settings(max_examples=120, deadline=None, phases=PHASES, suppress_health_check=list(HealthCheck))
@given(case=cases())
def test_result_is_the_reference_gather_bit_by_bit(ranks: GlooRanks, case: Case) -> None:
    for found, expected in zip(run(ranks, case), expected_of(case), strict=True):
        assert_same(found, expected)


@settings(max_examples=40, deadline=None, phases=PHASES, suppress_health_check=list(HealthCheck))
@given(case=cases(), most=strategies.integers(1, 40))
def test_result_is_the_same_in_pieces(ranks: GlooRanks, case: Case, most: int) -> None:
    slices, size = slices_of(case), len(case.batches)
    arguments = [(batch, piece, size, most) for batch, piece in zip(case.batches, slices, strict=True)]
    for found, expected in zip(ranks.call(move_in_pieces, arguments), expected_of(case), strict=True):
        assert_same(found, expected)


@settings(max_examples=30, deadline=None, phases=PHASES, suppress_health_check=list(HealthCheck))
@given(case=cases(min_ranks=3, max_ranks=3))
def test_several_may_be_in_flight(ranks: GlooRanks, case: Case) -> None:
    turned = Case(batches=case.batches, counts=case.counts, destinations=(case.destinations + 1) % 3)
    plans = [slices_of(one) for one in (case, turned, case)]
    arguments = [(batch, [plan[rank] for plan in plans], 3) for rank, batch in enumerate(case.batches)]
    for rank, found in enumerate(ranks.call(move_overlapping, arguments)):
        for result, one in zip(found, (case, turned, case), strict=True):
            assert_same(result, expected_of(one)[rank])


def test_nothing_is_compiled_after_warm_up(ranks: GlooRanks) -> None:
    case = simple_case([1, 0, 1, 0, 0, 1, 0, 1])
    arguments = [(batch, piece, 2) for batch, piece in zip(case.batches, slices_of(case), strict=True)]
    for versions in ranks.call(compiled_by, arguments):
        assert set(versions.values()) == {(1, 1)}, versions


def simple_case(destinations: list[int]) -> Case:
    batches = [flatten({"x": torch.arange(4) + 10 * rank}) for rank in range(2)]
    return Case(batches=batches, counts=[4, 4], destinations=np.array(destinations, dtype=np.int32))


def test_lengths_that_the_plan_does_not_announce_are_an_error(ranks: GlooRanks) -> None:
    batches = [
        flatten({"n": torch.tensor([2, 1]), "v": torch.arange(3)}, BatchSpec(rows_per_sample={"v": "n"}))
        for _ in range(2)
    ]
    case = Case(batches=batches, counts=[2, 2], destinations=np.array([0, 1, 0, 1], dtype=np.int32))
    pieces = slices_of(case)
    # Both segments are padded to 16 bytes, so the collective itself does not notice.
    wrong = changed(pieces[1], source_totals=np.array([[2], [1]]))
    with pytest.raises(RuntimeError, match=r"rank 0 sent rank 1 samples of total lengths \[1\].*\[2\]"):
        ranks.call(move, [(batches[0], pieces[0], 2), (batches[1], wrong, 2)])


def changed(piece: Slice, **changes: object) -> Slice:
    return Slice(**{name: changes.get(name, getattr(piece, name)) for name in Slice.__slots__})  # type: ignore[arg-type]


def home(flat: FlatBatch, **changes: object) -> Slice:
    return changed(slice_plan(np.zeros(flat.num_samples, np.int32), [flat.num_samples], flat.lengths)[0], **changes)


def test_one_rank_needs_no_process_group() -> None:
    flat = flatten({"x": torch.arange(3)})
    assert redistribute(flat, home(flat), group=None).unflatten()["x"].tolist() == [0, 1, 2]
    assert start(flat, home(flat), group=None, device="cpu").wait().num_samples == 3


def test_slice_of_another_batch_is_refused() -> None:
    flat = flatten({"x": torch.arange(3)})
    other = flatten({"x": torch.arange(4)})
    with pytest.raises(ValueError, match="for 4 samples, the batch has 3"):
        redistribute(flat, home(other), group=None)
    with pytest.raises(ValueError, match="totals of shape"):
        redistribute(flat, home(flat, source_totals=np.zeros((1, 2), np.int64)), group=None)
    with pytest.raises(ValueError, match="group is None"):
        redistribute(flat, home(flat, destinations=np.array([0, 1, 0], np.int32)), group=None)


def test_slice_of_another_rank_is_refused(ranks: GlooRanks) -> None:
    case = simple_case([0, 0, 0, 0, 1, 1, 1, 1])
    pieces = slices_of(case)
    with pytest.raises(RuntimeError, match="the slice is that of rank 1, this is rank 0"):
        ranks.call(move, [(case.batches[0], pieces[1], 2), (case.batches[1], pieces[0], 2)])
