from __future__ import annotations

import numpy as np
import pytest
import torch

from evenkeel.placement import Eviction, InvalidInputError, Zipf
from evenkeel.placement.hit_rates import step_keys
from trainer_client.planning import KeyHistogram

ROWS, LOOKUPS = 100_000, 4_096


def _batches(count: int) -> list[torch.Tensor]:
    draw = np.random.default_rng(0)
    weight = np.arange(1, ROWS + 1) ** -1.05
    permuted = draw.permutation(ROWS) * 7919 - 3
    return [torch.tensor(permuted[draw.choice(ROWS, LOOKUPS, p=weight / weight.sum())]) for _ in range(count)]


def test_without_sampling_counts_are_exact() -> None:
    counter = KeyHistogram()
    counter.observe(torch.tensor([[5, 5, -1], [7, 5, -1]]))
    counter.observe(torch.tensor([7], dtype=torch.int32))
    counted = counter.histogram(bins_per_factor_two=64)
    assert counter.lookups == 7
    assert sum(counted.keys) == 3
    assert sum(counted.lookups) == 7
    assert counted.lookups[0] == 3


def test_keys_that_were_never_seen_have_their_part() -> None:
    draw = np.random.default_rng(0)
    weight = np.arange(1, ROWS + 1) ** -0.8
    keys = draw.choice(ROWS, 40_000, p=weight / weight.sum())
    counter = KeyHistogram()
    for part in np.split(keys, 10):
        counter.observe(torch.tensor(part))
    unseen = (weight / weight.sum())[~np.isin(np.arange(ROWS), keys)].sum()
    counted = counter.histogram()
    assert sum(counted.lookups) == pytest.approx(40_000)
    assert counted.lookups[-1] / 40_000 == pytest.approx(unseen, abs=0.01)


def test_the_error_knows_of_drift() -> None:
    steady, moving = KeyHistogram(), KeyHistogram()
    for number, batch in enumerate(_batches(48)):
        steady.observe(batch)
        moving.observe(batch + 50_000_000 * (number // 32))
    assert KeyHistogram().relative_error == 1
    assert steady.relative_error < 0.05
    assert moving.relative_error > 0.3


@pytest.mark.parametrize("max_keys", [1_000, 8_000, 200_000])
def test_sampled_statistics_predict_what_the_law_predicts(max_keys: int) -> None:
    counter = KeyHistogram(max_keys=max_keys, heavy_keys=max_keys // 8)
    for batch in _batches(300):
        counter.observe(batch)
    assert len(counter._keys) <= max_keys
    seen = step_keys(counter.histogram(), ROWS, float(LOOKUPS), Eviction.LRU)
    law = step_keys(Zipf(exponent=1.05), ROWS, float(LOOKUPS), Eviction.LRU)
    tolerance = 0.03 + 2 * counter.relative_error
    assert seen.unique == pytest.approx(law.unique, rel=tolerance)
    sizes = np.array([5_000.0, 20_000.0])
    assert seen.misses(sizes).tolist() == pytest.approx(law.misses(sizes).tolist(), abs=0.03 + tolerance / 2)


def test_nothing_observed_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="observe at least one batch"):
        KeyHistogram().histogram()
    with pytest.raises(InvalidInputError):
        KeyHistogram(max_keys=0)
