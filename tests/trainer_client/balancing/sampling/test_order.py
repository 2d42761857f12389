"""The order of a data set: a permutation, as random as one that is drawn, and the same for ever."""

from __future__ import annotations

import math
from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import chi2, chisquare, kstest

from trainer_client.balancing.sampling import SampleOrder

# With fixed seeds a test's outcome is fixed as well; a fair order has a smaller p-value in one of 10,000.
LEAST_P = 1e-4


def _all(length: int, seed: int = 0, epoch: int = 0) -> NDArray[np.int64]:
    return SampleOrder(length, seed=seed, epoch=epoch).samples(np.arange(length))


@settings(max_examples=60, deadline=None)
@given(length=st.integers(0, 3000), seed=st.integers(0, 2**64), epoch=st.integers(0, 2**40))
@example(length=3_000_017, seed=1, epoch=1)
def test_every_sample_comes_once(length: int, seed: int, epoch: int) -> None:
    assert np.array_equal(np.sort(_all(length, seed, epoch)), np.arange(length))
    plain = SampleOrder(length, seed=seed, epoch=epoch, shuffle=False)
    assert np.array_equal(plain.samples(np.arange(length)), np.arange(length))


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 2**62), st.integers(0, 2**62), st.integers(1, 300), st.integers(0, 9))
def test_a_part_is_the_same_from_wherever_it_is_asked(length: int, begin: int, count: int, seed: int) -> None:
    order = SampleOrder(length, seed=seed)
    places = (begin + np.arange(min(count, length))) % length
    found = order.samples(places)
    assert ((found >= 0) & (found < length)).all()
    assert len(set(found.tolist())) == len(found)
    assert np.array_equal(found[::-1], order.samples(places[::-1].copy()))


def test_the_order_does_not_change_between_releases() -> None:
    # A saved position means these very samples: if this fails, VERSION must be raised too.
    assert _all(10).tolist() == [5, 6, 9, 7, 2, 4, 0, 8, 3, 1]
    assert SampleOrder(10**12, seed=7, epoch=3).samples(np.arange(4)).tolist() == [
        719073682341, 351817646503, 767930689427, 30877024514,
    ]  # fmt: skip
    assert SampleOrder(2**62, seed=7, epoch=3).samples(np.array([0, 2**62 - 1])).tolist() == [
        4208744882747580688, 1097136280178955908,
    ]  # fmt: skip


@pytest.mark.parametrize("length", [2, 3, 4])
def test_all_orders_of_few_samples_are_equally_likely(length: int) -> None:
    counts = Counter(tuple(_all(length, seed).tolist()) for seed in range(20 * math.factorial(length)))
    assert chisquare([counts[order] for order in permutations(range(length))]).pvalue > LEAST_P


@pytest.mark.parametrize("length", [16, 97, 1000])
def test_every_sample_is_as_likely_at_every_place(length: int) -> None:
    bins = min(length, 20)
    table = np.zeros((bins, bins), np.int64)
    for epoch in range(1500 if length < 100 else 300):
        at = np.arange(length) * bins // length
        np.add.at(table, (at, at[_all(length, 3, epoch)]), 1)
    expected = np.outer(table.sum(1), table.sum(0)) / table.sum()
    statistic = ((table - expected) ** 2 / expected).sum()
    # Of whole permutations rather than of draws: (b-1)² degrees, each n/(n-1) as much.
    assert chi2.sf(statistic * (length - 1) / length, (bins - 1) ** 2) > LEAST_P


@pytest.mark.parametrize("length", [50, 10_000, 1 << 16, 10**9])
def test_neighbours_are_as_far_apart_as_in_a_permutation_that_is_drawn(length: int) -> None:
    """Steps from one sample to the next, and from an epoch's order to the next one's, beside numpy's."""
    count = min(length, 20_000)
    ours, others = [], []
    rng = np.random.default_rng(1)
    for epoch in range(40 if length < 1000 else 2):
        now, later = (SampleOrder(length, seed=9, epoch=epoch + k).samples(np.arange(count)) for k in (0, 1))
        if length <= 1 << 16:
            drawn, drawn_later = (rng.permutation(length)[:count] for _ in range(2))
        else:
            drawn, drawn_later = (rng.integers(0, length, count) for _ in range(2))
        ours.append(np.concatenate((np.diff(now), later - now)) % length)
        others.append(np.concatenate((np.diff(drawn), drawn_later - drawn)) % length)
    for found in (np.concatenate(ours), np.concatenate(others)):
        steps = found[found > 0]  # a sample does not follow itself
        assert kstest((steps - rng.random(steps.size)) / (length - 1), "uniform").pvalue > LEAST_P
        counts = np.bincount(steps * 25 // length, minlength=25)
        sizes = np.bincount(np.arange(1, length) * 25 // length, minlength=25) if length < 10**6 else np.ones(25)
        assert chisquare(counts, sizes / sizes.sum() * counts.sum()).pvalue > LEAST_P
