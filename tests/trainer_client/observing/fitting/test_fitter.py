from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from benchmarks.harness.ranks import run_ranks
from evenkeel.partitioning import partition
from examples.datasets import SequenceBatch, SyntheticSequences
from trainer_client.balancing.batches import BatchError
from trainer_client.balancing.costs import HSTUCost
from trainer_client.observing.fitting import CostFitter, FitOptions, SequenceTerms
from trainer_client.observing.measurement import StepTimes

TERMS = SequenceTerms(history=("num_history", "num_history"), candidates="num_candidates", context=2)
PRIOR = HSTUCost(num_layers=1, width=1024, num_heads=4, head_dim=256, history=("num_history", "num_history"))
# Attention at a third of the rate of the products: what FLOPs do not know.
CLOCK = np.array([0.0, 1e-3, 3e-6, 0.0])


def _times(step: int, compute: float) -> StepTimes:
    return StepTimes(step=step, data=1.0, compute=compute, communication=2.0, optimizer=1.0)


def _measure(batch: SequenceBatch) -> float:
    return float(TERMS(batch).sum(0).numpy() @ CLOCK) + 5.0


def test_terms_agree_with_the_lengths() -> None:
    batch = SyntheticSequences(num_batches=1, batch_size=6, num_candidates=2).batch(0)
    terms = TERMS(batch)
    history = 2 * batch.num_history + 2
    assert terms[:, 0].tolist() == [1.0] * 6
    assert torch.equal(terms[:, 1].long(), batch.sequence_lengths(True))
    assert torch.equal(terms[:, 2].long(), history * (history + 1) // 2 + 2 * (history + 1))
    with pytest.raises(BatchError, match="holds no lengths"):
        SequenceTerms(history="context")(batch)


def test_the_prior_holds_until_a_fit_is_good() -> None:
    fitter = CostFitter(TERMS, prior=PRIOR, options=FitOptions(every=30, skip=2))
    rng = np.random.default_rng(0)
    batches = list(SyntheticSequences(num_batches=60))
    for step, batch in enumerate(batches[:30]):
        assert np.array_equal(fitter.cost(batch), PRIOR(batch))
        fitter.observe(batch)
        fitter.end_step([_times(step, float(rng.uniform(1, 2)))])
    assert not fitter.fitted  # noise explains nothing
    assert fitter.fit is not None


def test_times_that_come_late_count_for_their_step() -> None:
    fitter = CostFitter(TERMS, prior=PRIOR, options=FitOptions(every=40, skip=2))
    late: list[StepTimes] = []
    for step, batch in enumerate(SyntheticSequences(num_batches=40)):
        fitter.observe(batch)
        late.append(_times(step, _measure(batch)))
        fitter.end_step([late.pop(0) for _ in range(len(late) - 3)])
    assert fitter.fitted
    batch = SyntheticSequences(num_batches=1, seed=9).batch(0)
    assert np.allclose(fitter.cost(batch), TERMS(batch).numpy() @ CLOCK, rtol=1e-3, atol=1e-6)


def test_fitted_costs_balance_measured_time_better_than_flops() -> None:
    fitter = CostFitter(TERMS, prior=PRIOR, options=FitOptions(every=40, skip=0))
    for step, batch in enumerate(SyntheticSequences(num_batches=40)):
        fitter.observe(batch)
        fitter.end_step([_times(step, _measure(batch))])
    spread = {}
    for name, cost in (("flops", PRIOR), ("fitted", fitter.cost)):
        ratios = []
        for number in range(10):
            ranks = [SyntheticSequences(num_batches=10, seed=1, rank=rank).batch(number) for rank in range(8)]
            homes = np.repeat(np.arange(8, dtype=np.int32), 32)
            plan = partition(np.concatenate([cost(batch) for batch in ranks]), homes, 8)
            clock = np.concatenate([TERMS(batch).numpy() @ CLOCK for batch in ranks])
            loads = np.bincount(plan.destinations, weights=clock, minlength=8)
            ratios.append(loads.max() / loads.mean())
        spread[name] = np.mean(ratios) - 1
    assert spread["fitted"] < 0.5 * spread["flops"]


def _rank(rank: int) -> dict[str, Any]:
    fitter = CostFitter(TERMS, prior=PRIOR, options=FitOptions(every=10, skip=0))
    switched = None
    probe = SyntheticSequences(num_batches=1, seed=5).batch(0)
    for step, batch in enumerate(SyntheticSequences(num_batches=30, rank=rank, batch_size=4 + rank)):
        fitter.observe(batch)
        # Rank 1 reads its first times late, after the others' first fit.
        fitter.end_step([_times(step, _measure(batch))] if rank != 1 or step >= 10 else [])
        if fitter.fitted and switched is None:
            switched = step
    dist.barrier()
    return {"switched": switched, "costs": fitter.cost(probe).tolist()}


def test_all_ranks_switch_in_the_same_step_to_the_same_cost() -> None:
    results = run_ranks(3, _rank)
    assert results[0]["switched"] is not None
    assert all(result == results[0] for result in results)


def test_options_out_of_range_are_named() -> None:
    with pytest.raises(ValueError, match="every is 0"):
        FitOptions(every=0)
    with pytest.raises(ValueError, match=r"every is 2\.5; use a whole number"):
        FitOptions(every=2.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="min_explained is 2"):
        FitOptions(min_explained=2)
    for bound in (0.0, float("nan")):
        with pytest.raises(ValueError, match=r"upper is .* use milliseconds above 0"):
            FitOptions(upper=(1.0, bound, 1.0, 1.0))
    with pytest.raises(ValueError, match="upper has 1 bounds; give one for each of samples, tokens, pairs, candidates"):
        CostFitter(TERMS, prior=PRIOR, options=FitOptions(upper=(1.0,)))
