"""How the ranks show each other what they know of a learned cost."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from trainer_client.balancing.speeds import Measured
from trainer_client.balancing.votes import Vote

from benchmarks.harness.ranks import run_ranks
from trainer_client import BalancedLoader, Balancer
from trainer_client.balancing.costs import FitOptions, LearnedCost, SequenceTerms
from trainer_client.balancing.groups import Groups
from trainer_client.balancing.learning import CostKeeper

TERMS = SequenceTerms(history="length")
CLOCK = np.array([0.0, 1e-3, 3e-6])  # milliseconds a sample, token and pair


def batches_of(rank: int) -> Iterator[dict[str, torch.Tensor]]:
    rng = np.random.default_rng(rank)
    while True:
        yield {"length": torch.from_numpy(np.rint(rng.lognormal(6.0, 1.0, 24)).astype(np.int64) + 1)}


def kept(rank: int) -> tuple[list[bool], bool]:
    """Of each round whether the first rank had a fit to tell, and whether this rank knows one in the end."""
    measured, had = Measured(), []
    measured.learns = LearnedCost(TERMS, options=FitOptions(every=1000, skip=0))
    keeper = CostKeeper("train", Groups.create(None, timedelta(seconds=60)), measured)
    for number, batch in enumerate(itertools.islice(batches_of(rank), 20)):
        terms = TERMS(batch).sum(0).numpy()
        seconds = 1e-3 * float(terms @ CLOCK)
        measured.add(1.0, seconds, terms=terms)
        vote = Vote(round=number, samples=24, measured_seconds=seconds, learns=True, has_fit=keeper.has_fit)
        votes = keeper._groups.gather_votes(vote)
        keeper.note(number, votes)
        had.append(votes[0].has_fit)
        if keeper._fitter is not None and keeper._fitter._thread is not None:
            keeper._fitter._thread.join()
    return had, keeper.fit is not None


def test_a_fit_is_told_once() -> None:
    for had, knows in run_ranks(2, kept):
        assert (sum(had), knows) == (1, True)


def of_others(rank: int) -> list[float] | None:
    """What ranks know in the end of which the first has no data of its own."""
    cost = LearnedCost(TERMS, options=FitOptions(every=5, skip=0))
    own = () if rank == 0 else itertools.islice(batches_of(rank), 40)
    with Balancer.embedded() as balancer:
        loader: BalancedLoader[Any] = BalancedLoader(own, balancer, cost=cost)
        for batch in loader:
            loader.took(1e-3 * float(TERMS(batch).sum(0).numpy() @ CLOCK) + 1e-3)
    return None if cost.fit is None else cost.fit.coefficients.tolist()


def test_ranks_learn_where_the_first_has_no_data_of_its_own() -> None:
    none, *fits = run_ranks(3, of_others)
    assert none is None  # it has no samples whose cost could follow
    for fit in fits:
        np.testing.assert_allclose(fit[1:], CLOCK[1:], rtol=0.1)
