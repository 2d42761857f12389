"""A cost that real ranks learn from the times of their batches."""

import itertools
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.datasets import SequenceBatch, SyntheticSequences
from tests.trainer_client.balancing.jobs import logged, run_in_turn
from trainer_client import BalancedLoader, BalanceOptions, Balancer
from trainer_client.balancing.batches import BatchError, flatten
from trainer_client.balancing.costs import FitOptions, HSTUCost, LearnedCost, SequenceTerms, TokenCost, make_cost
from trainer_client.balancing.costs.fitting import Fit, fit_in_force, fit_times
from trainer_client.observing.measurement import StepTimer

TERMS = SequenceTerms(history=("num_history", "num_history"), candidates="num_candidates", context=2)
PRIOR = HSTUCost(num_layers=1, width=1024, num_heads=4, head_dim=256, history=("num_history", "num_history"))
CLOCK = np.array([0.0, 1e-3, 3e-6])  # milliseconds a sample, token and pair
SIZE, STEPS = 24, 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    slow: tuple[float, ...] = (1.0, 1.0, 1.0)
    plain: int = -1  # the rank whose cost is no learned one
    options: BalanceOptions = field(default_factory=BalanceOptions)


def batches_of(rank: int) -> Iterator[dict[str, torch.Tensor]]:
    for step in itertools.count():
        lengths = np.clip(np.rint(np.random.default_rng([rank, step]).lognormal(6.0, 1.0, SIZE)), 1, 8192)
        ids = torch.arange(SIZE) + 1000 * step + 1_000_000 * rank
        yield {"length": torch.from_numpy(lengths.astype(np.int64)), "id": ids}


def run_job(rank: int, job: Job) -> dict[str, Any]:
    said = logged("trainer_client.balancing.costs.learning")
    logging.getLogger("trainer_client.balancing.costs.learning").setLevel(logging.INFO)
    terms = SequenceTerms(history="length")
    learned = LearnedCost(terms, options=FitOptions(every=10, skip=2))
    cost = learned if rank != job.plain else TokenCost(tokens="length")
    rng, records = np.random.default_rng([7, rank]), []
    with Balancer.embedded(options=job.options) as balancer:
        loader: BalancedLoader[Any] = BalancedLoader(batches_of(rank), balancer, cost=cost)
        stream = iter(loader)
        for batch in itertools.islice(stream, STEPS):
            clock = float(terms(batch).sum(0).numpy() @ CLOCK) + 2.0
            loader.took(1e-3 * clock * job.slow[rank] * float(rng.lognormal(0, 0.01)))
            # By the costs that it was planned with, and by those that are true.
            records.append({"clock": clock, "load": loader.report.own_load,
                            "tokens": float(batch["length"].sum())})  # fmt: skip
        stream.close()
    fit = learned.fit
    return {"records": records, "said": said, "fit": None if fit is None else fit.coefficients.tolist()}


def excess(results: list[dict[str, Any]], step: int) -> float:
    """By how much the slowest rank's time exceeds the mean."""
    clock = [result["records"][step]["clock"] for result in results]
    return max(clock) / float(np.mean(clock)) - 1


def followed(results: list[dict[str, Any]], step: int) -> set[bool]:
    """Whether each rank's batch was planned by tokens."""
    return {abs(one["records"][step]["load"] / one["records"][step]["tokens"] - 1) < 1e-6 for one in results}


@pytest.fixture(scope="module")
def jobs() -> dict[str, list[dict[str, Any]]]:
    """What each rank did, of each job."""
    jobs = {
        "plain": Job(), "in windows": Job(options=BalanceOptions(window=2)), "other costs": Job(plain=1),
        "a slow rank": Job(slow=(1.0, 1.0, 2.0), options=BalanceOptions(learn_speeds=False)),
    }  # fmt: skip
    return dict(zip(jobs, run_in_turn(3, *((run_job, job) for job in jobs.values())), strict=True))


@pytest.mark.parametrize("name", ["plain", "in windows"])
def test_ranks_learn_what_tokens_and_pairs_take(jobs: dict[str, list[dict[str, Any]]], name: str) -> None:
    results = jobs[name]
    for step in range(STEPS):
        assert len(followed(results, step)) == 1, "all ranks' costs are of one kind in every step"
    assert followed(results, 0) == {True}
    assert followed(results, STEPS - 1) == {False}
    assert all(result["fit"] == results[0]["fit"] for result in results)
    assert np.allclose(results[0]["fit"][2], CLOCK[2], rtol=0.1)
    before = np.mean([excess(results, step) for step in range(8)])
    after = np.mean([excess(results, step) for step in range(STEPS - 12, STEPS)])
    assert after < 0.5 * before
    (told,) = results[0]["said"]
    assert "ms per pairs" in told


def test_a_slow_rank_does_not_count_for_the_cost_and_speeds_need_not_be_learned(jobs: dict[str, Any]) -> None:
    assert np.allclose(jobs["a slow rank"][0]["fit"][2], CLOCK[2], rtol=0.1)


def test_ranks_of_other_costs_learn_nothing_and_say_why(jobs: dict[str, Any]) -> None:
    results = jobs["other costs"]
    assert all(result["fit"] is None for result in results)
    assert "the cost of rank 1 has the terms None" in results[0]["said"][0]
    assert [len(result["said"]) for result in results] == [1, 0, 0]


def test_terms_agree_with_the_lengths() -> None:
    batch = SyntheticSequences(num_batches=1, batch_size=6, num_candidates=2).batch(0)
    terms = TERMS(batch)
    history = 2 * batch.num_history + 2
    assert terms[:, 0].tolist() == [1.0] * 6
    assert torch.equal(terms[:, 1].long(), batch.sequence_lengths(True))
    assert torch.equal(terms[:, 2].long(), history * (history + 1) // 2 + 2 * (history + 1))
    assert torch.equal(TERMS(flatten(batch, SequenceBatch.spec())), terms), "as a batch of a device arrives"
    with pytest.raises(BatchError, match="name a jagged field"):
        SequenceTerms(history="context")(batch)


def test_the_cost_is_the_prior_until_it_follows_a_fit() -> None:
    batch = SyntheticSequences(num_batches=1, batch_size=6, num_candidates=2).batch(0)
    cost = LearnedCost(TERMS, prior=PRIOR)
    assert np.array_equal(cost(batch), PRIOR(batch))
    assert np.array_equal(LearnedCost(TERMS)(batch), TERMS(batch)[:, 1].numpy())
    np.testing.assert_allclose(cost.spans(batch).whole, PRIOR(batch))
    weights = np.array([1.0, 2.0, 3.0, 4.0])
    cost.fit = Fit(coefficients=weights, fixed=1.0, error=0.01, explained=0.99, observations=100)
    assert np.array_equal(cost(batch), TERMS(batch).numpy() @ weights)
    np.testing.assert_allclose(cost.spans(batch).whole, cost(batch))  # split as fitted
    named = make_cost("learned", history="num_history", every=7)
    assert isinstance(named, LearnedCost)
    assert named.options.every == 7


def test_a_timer_tells_what_each_batch_held() -> None:
    terms, batches = SequenceTerms(history="length"), list(itertools.islice(batches_of(0), 20))
    loader: BalancedLoader[Any] = BalancedLoader(batches, Balancer.off(), cost=LearnedCost(terms))
    timer = StepTimer("cpu", loader=loader)
    for number, _ in enumerate(loader):
        if number % 2:  # two batches make a step
            timer.compute_done()
            timer.end_step()
        else:
            timer.batch_ready()
    rows = loader._stream.measured.take_rows()
    sums = np.array([terms(batch).sum(0).numpy() for batch in batches])
    np.testing.assert_allclose(rows[:, :-1], sums.reshape(10, 2, 3).sum(1))
    assert np.all(rows[:, -1] > 0)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: FitOptions(every=0), "every is 0"),
        (lambda: FitOptions(min_explained=2), "min_explained is 2"),
        (lambda: FitOptions(upper=(1.0, float("nan"))), "upper is .* use milliseconds above 0"),
        (lambda: LearnedCost(TERMS, options=FitOptions(upper=(1.0,))), "upper has 1 bounds; give one for each of samp"),
        (lambda: LearnedCost(OtherTerms()), "prior is None; give the cost until"),
        (lambda: SequenceTerms(history=3), "history is 3; name at least one field"),
        (lambda: SequenceTerms(history="h", context=-5), "context is -5"),
    ],
)
def test_options_out_of_range_are_named(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


class OtherTerms:
    names = ("things",)

    def __call__(self, batch: Any) -> torch.Tensor:
        return torch.ones(len(batch), 1, dtype=torch.float64)


def _observations(seed: int, count: int = 200) -> np.ndarray:
    rng = np.random.default_rng(seed)
    lengths = np.minimum(rng.zipf(1.2, (count, 32)), 4096).astype(float)
    return np.column_stack([np.full(count, 32.0), lengths.sum(1), (lengths * (lengths + 1) / 2).sum(1)])


@given(st.floats(1e-5, 1e-1), st.floats(1e-8, 1e-4), st.floats(0, 50), st.integers(0, 100), st.booleans())
def test_recovers_exact_times(per_token: float, per_pair: float, fixed: float, seed: int, twice: bool) -> None:
    terms = _observations(seed)
    times = terms @ [0.0, per_token, per_pair] + fixed
    if twice:  # a term that says the same as another one
        terms = np.column_stack([terms, 2 * terms[:, 1]])
    fit = fit_times(terms, times)
    assert np.allclose(terms @ fit.coefficients + fit.fixed, times, rtol=1e-3)
    assert fit.explained > 0.999
    assert np.all(fit.coefficients >= 0)
    assert fit.coefficients[0] == 0.0  # the same in every observation: part of the fixed time


@pytest.mark.parametrize("factor", [3.0, 1e6])
@pytest.mark.parametrize("every", [20, 5])
def test_outliers_do_not_count(every: int, factor: float) -> None:
    terms = _observations(1)
    clean = terms @ [0.0, 1e-3, 1e-6] + 3.0
    times = clean * (1 + 0.01 * np.random.default_rng(0).standard_normal(len(clean)))
    times[::every] *= factor
    fit = fit_times(terms, times)
    assert np.allclose(terms @ fit.coefficients + fit.fixed, clean, rtol=0.05)
    good = 200 - 200 // every
    assert good - 10 <= fit.observations <= good
    assert fit.explained > 0.95


def test_a_fit_that_has_made_times_alike_stays_until_they_scatter() -> None:
    def fit(explained: float, error: float) -> Fit:
        return Fit(coefficients=np.array([1.0]), fixed=1.0, error=error, explained=explained, observations=100)

    options, good, newer = FitOptions(min_explained=0.8), fit(0.95, 0.04), fit(0.9, 0.2)
    assert fit_in_force(fit(0.5, 0.01), None, options) is None
    assert fit_in_force(good, None, options) is good
    assert fit_in_force(fit(0.1, 0.07), good, options) is good  # balanced: there is nothing left to explain
    assert fit_in_force(fit(0.1, 0.2), good, options) is None
    assert fit_in_force(newer, good, options) is newer


def test_bounds_hold_and_too_little_is_no_fit() -> None:
    terms = _observations(2)
    fit = fit_times(terms, terms @ [0.0, 1e-3, -1e-7] + 50.0, upper=np.array([np.inf, 5e-4, np.inf]))
    assert np.all(fit.coefficients >= 0)
    assert fit.coefficients[1] <= 5e-4 * (1 + 1e-9)
    for few in (terms[:5], np.ones((50, 3)), np.zeros((0, 3))):
        assert fit_times(few, np.ones(len(few))) is None
    assert fit_times(terms, np.full(200, np.nan)) is None
