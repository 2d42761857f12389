"""A cost that learns from the clock what a unit of each of its terms takes, while the job trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from evenkeel.partitioning.splits import SpanCosts
from trainer_client.balancing.costs.base import SampleCost
from trainer_client.balancing.costs.fits import Fit, FitOptions
from trainer_client.balancing.costs.terms import SequenceTerms, Terms


class LearnedCost(SampleCost):
    """The weighted sum of a batch's terms, in milliseconds, as soon as the ranks know the weights.

    Give it to a `BalancedLoader`, and the loader to a `StepTimer`, as for learned speeds: nothing else is to be done.

        loader = BalancedLoader(loader, balancer, cost=LearnedCost(SequenceTerms(history="history")))
        timer = StepTimer(device, loader=loader)

    Now and then the ranks show each other what their batches held and how long they took. From the round that all know
    the fit of the first rank in, their costs are that fit's, on all ranks alike; before, and whenever no fit is good
    enough any more, they are the prior's.

    Attributes:
        terms: What the time is made of.
        options: When to fit, and when to believe it; those of the first rank count.
        fit: That the cost follows; None: it is the prior.
    """

    def __init__(
        self, terms: Terms, *, prior: Callable[[Any], Any] | None = None, options: FitOptions | None = None
    ) -> None:
        """Starts with the prior.

        Args:
            terms: What the time is made of.
            prior: The cost until a fit is good enough; default: tokens, where the terms are those of sequences.
            options: When to fit, and when to believe it.

        Raises:
            ValueError: If there is no prior, or `options.upper` has another length than the terms.
        """
        upper = options.upper if options is not None else None
        if upper is not None and len(upper) != len(terms.names):
            raise ValueError(f"upper has {len(upper)} bounds; give one for each of {', '.join(terms.names)}")
        if prior is None and not isinstance(terms, SequenceTerms):
            raise ValueError("prior is None; give the cost until the terms' weights are known")
        self.terms = terms
        self.options = options or FitOptions()
        self.fit: Fit | None = None
        self._prior = prior

    @classmethod
    def of(
        cls,
        *,
        history: Any,
        candidates: Any = None,
        context: int = 0,
        prior: Callable[[Any], Any] | None = None,
        **options: Any,
    ) -> LearnedCost:
        """Of sequences, as configuration files name it; `options` are those of `FitOptions`."""
        if isinstance(prior, Mapping):
            raise ValueError(f"prior is {prior!r}; give the cost itself, or leave it out: tokens")
        terms = SequenceTerms(history=history, candidates=candidates, context=context)
        return cls(terms, prior=prior, options=FitOptions(**options))

    def __call__(self, batch: Any) -> Any:
        """(n,) costs of the host's batch; see `SampleCost`."""
        if self.fit is None and self._prior is not None:
            return self._prior(batch)
        terms = self.terms(batch).numpy()
        if self.fit is None:
            return terms[:, 1]  # of sequences: tokens
        costs: NDArray[np.float64] = terms @ self.fit.coefficients
        return costs

    def spans(self, batch: Any) -> SpanCosts | None:
        """What any positions of each sample cost; see `SampleCost`."""
        if self.fit is None and self._prior is not None:
            spans = getattr(self._prior, "spans", None)
            return None if spans is None else spans(batch)
        if not isinstance(self.terms, SequenceTerms):
            return None
        tokens = np.zeros(len(self.terms.names))
        tokens[1] = 1.0
        return self.terms.spans(batch, tokens if self.fit is None else self.fit.coefficients)


class SummedTerms:
    """The terms of all batches that a loop has got so far, summed, without waiting for a device.

    Attributes:
        before: (terms,) on the host, up to the batch before the latest one; on a GPU known once the step computes.
        after: Including the latest one.
    """

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self._total = torch.zeros(len(terms.names), dtype=torch.float64)
        self.before = self.after = self._total
        self._copied: torch.cuda.Event | None = None

    def add(self, batch: Any) -> None:
        """Adds a batch that the loop is about to get."""
        sums = self._terms(batch).sum(0)
        self._total = self._total.to(sums.device, non_blocking=True) + sums
        self.before, self.after = self.after, self._total
        if sums.is_cuda:
            host = torch.empty(sums.shape, dtype=sums.dtype, device="cpu", pin_memory=True)
            self.after = host.copy_(self._total, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    @property
    def latest(self) -> NDArray[np.float64] | None:
        """(terms,) of the latest batch; None while they are on their way."""
        if self._copied is not None and not self._copied.query():  # type: ignore[no-untyped-call]
            return None
        latest: NDArray[np.float64] = (self.after - self.before).numpy()
        return latest
