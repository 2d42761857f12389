from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.datasets import (
    DISTRIBUTIONS,
    Keys,
    LogNormalLengths,
    NormalLengths,
    SequenceBatch,
    SyntheticSequences,
    ZipfLengths,
    lengths_named,
)
from trainer_client.balancing.batches import flatten


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_lengths_are_in_range_and_have_their_mean(name: str) -> None:
    lengths = lengths_named(name, maximum=4096).draw(np.random.default_rng(0), 200_000)
    assert lengths.dtype == np.int64
    assert lengths.min() >= 1
    assert lengths.max() <= 4096
    # Zipf: Σ min(k, 4096) k^-1.2 / ζ(1.2); log-normal of mean 600 and sigma 1: 600 Φ(1.421) + 4096 Φ(-2.421).
    expected = {"uniform": 2048.5, "normal": 2048.0, "zipf": 868.0, "lognormal": 585.0}[name]
    assert lengths.mean() == pytest.approx(expected, rel=0.03)


def test_wrong_distributions_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'pareto'; use one of uniform, normal, zipf, lognormal"):
        lengths_named("pareto")
    with pytest.raises(ValueError, match=r"exponent is 1\.0; use a finite number above 1"):
        lengths_named("zipf", exponent=1.0)
    with pytest.raises(ValueError, match="mean is -1"):
        lengths_named("lognormal", mean=-1)


@given(st.integers(1, 5000))
def test_places_are_a_permutation_of_the_keys(count: int) -> None:
    keys = Keys(count=count, exponent=1.1, drift=1.5)
    places = np.arange(count)
    assert np.array_equal(np.sort(keys.at_places(places, 7)), places)


def test_popularity_follows_the_power_law_and_drifts() -> None:
    keys = Keys(count=1000, exponent=1.0, drift=100.0)
    drawn = keys.draw(np.random.default_rng(0), 100_000, batch=0)
    hot = keys.at_places(np.arange(2), 0)
    counts = np.bincount(drawn, minlength=1000)
    assert counts[hot[0]] / counts[hot[1]] == pytest.approx(2.0, rel=0.1)
    assert counts.argmax() == hot[0]
    later = np.bincount(keys.draw(np.random.default_rng(0), 100_000, batch=5), minlength=1000)
    assert later.argmax() == keys.at_places(np.array([500]), 0)[0] != hot[0]


def test_a_sequence_counts_context_history_actions_and_candidates() -> None:
    data = SyntheticSequences(num_batches=3, batch_size=50, num_candidates=3, num_context=2)
    drawn = data.lengths.draw(np.random.default_rng([0, 0, 1]), 50)
    tokens = data.batch(1).sequence_lengths(interleaved=True).numpy()
    fits = drawn >= 5
    assert np.all(np.abs(tokens[fits] - drawn[fits]) <= 1)  # a pair of item and action is not split
    assert np.all(tokens[~fits] == 5)
    assert tokens.max() <= data.max_tokens


def test_ranks_differ_and_iterations_repeat() -> None:
    first = SyntheticSequences(num_batches=2, rank=0)
    second = SyntheticSequences(num_batches=1, rank=1)
    assert [torch.equal(a.history, b.history) for a, b in zip(first, first, strict=True)] == [True, True]
    assert not torch.equal(first.batch(0).history, second.batch(0).history)
    samples = torch.cat([batch.sample for data in (first, second) for batch in data])
    assert samples.unique().numel() == 96  # also where ranks have different numbers of batches


def test_labels_can_be_learnt_from_the_actions() -> None:
    batch = SyntheticSequences(num_batches=1, batch_size=200).batch(0)
    for history, actions, candidate, label in zip(
        batch.history.split(batch.num_history.tolist()), batch.actions.split(batch.num_history.tolist()),
        batch.candidates, batch.labels, strict=True,
    ):  # fmt: skip
        liked = history[actions % 2 == 1] % 2
        assert torch.all(liked == liked[:1])
        if len(liked):
            assert bool(label) == bool(candidate % 2 == liked[0])


def test_batches_are_understood_by_the_balancer() -> None:
    batch = SyntheticSequences(num_batches=1, batch_size=4).batch(0)
    flat = flatten(batch, SequenceBatch.spec())
    assert flat.num_samples == 4
    assert flat.structure.columns == ("num_candidates", "num_history")
    again = flat.unflatten()
    assert isinstance(again, SequenceBatch)
    assert torch.equal(again.history, batch.history)


def test_parameters_out_of_range_are_named() -> None:
    wrong: list[tuple[Callable[..., Any], str, Any]] = [
        (SyntheticSequences, "batch_size", 0), (SyntheticSequences, "batch_size", 2.5),
        (SyntheticSequences, "seed", -1), (SyntheticSequences, "num_batches", True),
        (SyntheticSequences, "lengths", "zipf"), (Keys, "drift", -1),
        (Keys, "count", 2.5), (Keys, "exponent", "1"), (ZipfLengths, "maximum", 2.5), (ZipfLengths, "minimum", 5000),
        (LogNormalLengths, "sigma", "1"), (NormalLengths, "mean", float("nan")),
    ]  # fmt: skip
    needed = {SyntheticSequences: {"num_batches": 1}, Keys: {"count": 3}}
    for make, field, value in wrong:
        with pytest.raises(ValueError, match=f"{field} is {value!r}.*; (use|give) a"):
            make(**{**needed.get(make, {}), field: value})
