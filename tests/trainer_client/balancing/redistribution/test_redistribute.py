"""Random programs of batches through a stream, and slices that do not fit."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from evenkeel.partitioning.slices import Slice, slice_plan
from tests.trainer_client.balancing.redistribution.pool import GlooRanks, compiled_by, group_of, move
from tests.trainer_client.balancing.redistribution.structures import run_program
from trainer_client import BalancedLoader, Balancer
from trainer_client.balancing.batches import BatchError, BatchSpec, FlatBatch, flatten
from trainer_client.balancing.redistribution import start

WORLD = 4  # all ranks of the pool; some have no samples in some programs


def slices_of(batches: list[FlatBatch], destinations: list[int]) -> list[Slice]:
    lengths = np.concatenate([batch.lengths for batch in batches])
    return list(slice_plan(np.array(destinations, np.int32), [batch.num_samples for batch in batches], lengths))


def two_batches() -> list[FlatBatch]:
    return [flatten({"x": torch.arange(4) + 10 * rank}) for rank in range(2)]


def test_nothing_is_compiled_after_warm_up(ranks: GlooRanks) -> None:
    batches = two_batches()
    pieces = slices_of(batches, [1, 0, 1, 0, 0, 1, 0, 1])
    arguments = [(batch, piece, 2) for batch, piece in zip(batches, pieces, strict=True)]
    for versions in ranks.call(compiled_by, arguments):
        assert set(versions.values()) == {(1, 1)}, versions


def changed(piece: Slice, **changes: object) -> Slice:
    return Slice(**{name: changes.get(name, getattr(piece, name)) for name in Slice.__slots__})


def test_lengths_that_the_plan_does_not_announce_are_an_error(ranks: GlooRanks) -> None:
    batches = [
        flatten({"n": torch.tensor([2, 1]), "v": torch.arange(3)}, BatchSpec(rows_per_sample={"v": "n"}))
        for _ in range(2)
    ]
    pieces = slices_of(batches, [0, 1, 0, 1])
    # Both segments are padded to 16 bytes, so the collective itself does not notice.
    wrong = changed(pieces[1], source_totals=np.array([[2], [1]]))
    with pytest.raises(RuntimeError, match=r"rank 0 sent rank 1 samples of total lengths \[1\].*\[2\]"):
        ranks.call(move, [(batches[0], pieces[0], 2), (batches[1], wrong, 2)])


def home(flat: FlatBatch, **changes: object) -> Slice:
    return changed(Slice.staying(0, flat.lengths), **changes)


def test_slice_of_another_batch_or_rank_is_refused(ranks: GlooRanks) -> None:
    flat = flatten({"x": torch.arange(3)})
    for piece, words in [
        (home(flatten({"x": torch.arange(4)})), "for 4 samples, the batch has 3"),
        (home(flat, source_totals=np.zeros((1, 2), np.int64)), "totals of shape"),
        (home(flat, destinations=np.array([0, 1, 0], np.int32)), "group is None"),
    ]:
        with pytest.raises(ValueError, match=words):
            start(flat, piece, group=None)
    batches = two_batches()
    pieces = slices_of(batches, [0, 0, 0, 0, 1, 1, 1, 1])
    with pytest.raises(RuntimeError, match="the slice is that of rank 1, this is rank 0"):
        ranks.call(move, [(batches[0], pieces[1], 2), (batches[1], pieces[0], 2)])


def run_one(seed: int) -> str:
    """In a rank: one program."""
    return run_program(seed, WORLD, group_of(WORLD))


@settings(max_examples=20, deadline=None, phases=(Phase.generate,), suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32 - 1))
def test_every_rank_gets_what_its_samples_make(ranks: GlooRanks, seed: int) -> None:
    assert ranks.call(run_one, [(seed,)] * WORLD) == [""] * WORLD


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_one_rank_alone_gets_what_its_samples_make(seed: int) -> None:
    assert run_program(seed, 1, None) == ""


def _reused(kind: str) -> Iterator[dict[str, Any]]:
    """One buffer for all batches, written through torch or through NumPy."""
    array = np.zeros(4, dtype=np.int64)
    tensor = torch.from_numpy(array) if kind == "numpy" else torch.zeros(4, dtype=torch.int64)
    for step in range(6):
        if kind == "numpy":
            array[:] = np.arange(4) + 10 * step
        else:
            tensor.copy_(torch.arange(4) + 10 * step)
        yield {"x": tensor if kind == "torch" else array}


def _train_here(batches: Any, copy: bool) -> list[list[int]]:
    with Balancer.off() as balancer:
        spec = BatchSpec(copy=copy)
        loader = BalancedLoader(batches, balancer, cost=lambda batch: np.ones(len(batch["x"])), spec=spec)
        return [batch["x"].tolist() for batch in loader]


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_memory_that_a_loader_uses_again_is_copied_or_refused(kind: str) -> None:
    assert _train_here(_reused(kind), True) == [[10 * step + index for index in range(4)] for step in range(6)]
    with pytest.raises(BatchError, match=r"'x' of a batch was written to before its samples moved.*copy=True"):
        _train_here(_reused(kind), False)


def test_batches_that_a_loader_gives_again_are_no_reuse() -> None:
    batch = {"x": torch.arange(3), "same": torch.ones(3), "view": torch.arange(6.0).view(3, 2)[:, 1]}
    assert _train_here([batch] * 5, False) == [[0, 1, 2]] * 5
