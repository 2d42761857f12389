"""Picking from several batches against plain indexing."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.references.redistribution import gather_samples
from tests.trainer_client.random_batches import Case, assert_same, cases
from trainer_client.balancing.redistribution.copying import pick


@settings(max_examples=80, deadline=None)
@given(case=cases(), seed=st.integers(0, 2**32))
def test_picked_samples_are_those_of_plain_indexing(case: Case, seed: int) -> None:
    rng = np.random.default_rng(seed)
    chosen = [np.flatnonzero(rng.random(batch.num_samples) < 0.5) for batch in case.batches]
    found = pick(case.batches, chosen)
    wanted = [(index, int(sample)) for index, samples in enumerate(chosen) for sample in samples]
    assert_same(found, gather_samples(case.batches, wanted))


@settings(max_examples=20, deadline=None)
@given(case=cases())
def test_a_batch_that_is_wanted_whole_is_not_copied(case: Case) -> None:
    chosen = [np.zeros(0, np.int64) for _ in case.batches]
    for index, batch in enumerate(case.batches):
        if batch.num_samples:
            chosen[index] = np.arange(batch.num_samples)
            assert pick(case.batches, chosen) is batch
            return
