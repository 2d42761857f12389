"""How the ranks show each other what they know of a learned cost."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from datetime import timedelta

import numpy as np
import torch

from benchmarks.harness.ranks import run_ranks
from trainer_client.balancing.costs import FitOptions, LearnedCost, SequenceTerms
from trainer_client.balancing.groups import Groups
from trainer_client.balancing.learning import CostKeeper
from trainer_client.balancing.speeds import Measured
from trainer_client.balancing.votes import Vote

TERMS = SequenceTerms(history="length")
CLOCK = np.array([0.0, 1e-3, 3e-6])  # milliseconds a sample, token and pair


def batches_of(rank: int) -> Iterator[dict[str, torch.Tensor]]:
    rng = np.random.default_rng(rank)
    while True:
        yield {"length": torch.from_numpy(np.rint(rng.lognormal(6.0, 1.0, 24)).astype(np.int64) + 1)}


def kept(rank: int) -> tuple[list[bool], bool]:
    """Of each round whether the first rank had a fit to tell, and whether this rank knows one in the end."""
    measured, had, fit = Measured(), [], None
    measured.learns = LearnedCost(TERMS, options=FitOptions(every=1000, skip=0))
    keeper = CostKeeper("train", Groups.create(None, timedelta(seconds=60)), measured)
    for number, batch in enumerate(itertools.islice(batches_of(rank), 20)):
        terms = TERMS(batch).sum(0).numpy()
        seconds = 1e-3 * float(terms @ CLOCK)
        measured.add(1.0, seconds, terms=terms)
        vote = Vote(round=number, samples=24, measured_seconds=seconds, learns=True, has_fit=keeper.has_fit)
        votes = keeper._groups.gather_votes(vote)
        fit = keeper.note(number, votes)
        had.append(votes[0].has_fit)
        if keeper._fitter is not None and keeper._fitter._thread is not None:
            keeper._fitter._thread.join()
    return had, fit is not None


def test_a_fit_is_told_once() -> None:
    for had, knows in run_ranks(2, kept):
        assert (sum(had), knows) == (1, True)
