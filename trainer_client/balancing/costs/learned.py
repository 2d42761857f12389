"""A cost that learns from the clock what a unit of each of its terms takes, while the job trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from evenkeel.partitioning.splits import SpanCosts
from trainer_client.balancing.batches.flat import coming
from trainer_client.balancing.batches.paths import find_lengths
from trainer_client.balancing.costs.base import SampleCost, check_sources
from trainer_client.balancing.costs.fitting import Fit, FitOptions
from trainer_client.balancing.costs.sequences import num_fields
from trainer_client.checks import check_whole


class Terms(Protocol):
    """Numbers per sample that the time of a batch is a weighted sum of.

    With a method `spans(batch, coefficients)` as of `SequenceTerms`, samples can be split.
    """

    @property
    def names(self) -> tuple[str, ...]:
        """One name per term."""
        ...

    def __call__(self, batch: Any) -> torch.Tensor:
        """(n, terms) float64 on the batch's device; nothing is read from it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceTerms:
    """Samples, tokens, attended pairs and candidates of sequences.

    With h history positions, c context positions among them, and k candidates, attention computes
    `h (h + 1) / 2 + k (h + 1)` pairs.

    Attributes:
        history: Path(s) of lengths that add up to the history: integer tensors, or jagged fields.
        candidates: Path(s) of the candidates.
        context: Context positions of each sample.
    """

    history: str | Sequence[str]
    candidates: str | Sequence[str] | None = None
    context: int = 0

    def __post_init__(self) -> None:
        check_sources(self, needed=("history",) if self.candidates is None else ("history", "candidates"))
        check_whole(self, context=0)

    @property
    def names(self) -> tuple[str, ...]:
        """One name per term."""
        return ("samples", "tokens", "pairs", "candidates") if self.candidates else ("samples", "tokens", "pairs")

    def __call__(self, batch: Any) -> torch.Tensor:
        """(n, terms) float64 on the batch's device."""
        history, candidates = self._count(batch)
        pairs = history * (history + 1) / 2 + candidates * (history + 1)
        columns = [torch.ones_like(history), history + candidates, pairs, candidates]
        return torch.stack(columns[: len(self.names)], dim=1)

    def spans(self, batch: Any, coefficients: NDArray[np.float64]) -> SpanCosts:
        """What any positions of each sample of the host's batch cost, given what a unit of each term costs."""
        history, candidates = (counts.numpy() for counts in self._count(batch))
        samples, tokens, pairs, *rest = coefficients.tolist()
        return SpanCosts.of(
            history + candidates,
            candidates=candidates,
            per_position=tokens,
            per_pair=pairs,
            targets=candidates,
            per_target=rest[0] if rest else 0.0,
            fixed=samples,
            head=self.context,
            granule=num_fields(self.history),
        )

    def _count(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        history = count_on_device(batch, self.history) + self.context
        return history, count_on_device(batch, self.candidates) if self.candidates else torch.zeros_like(history)


def count_on_device(batch: Any, source: str | Sequence[str]) -> torch.Tensor:
    """(n,) float64 sums of the lengths at one or several paths, on the batch's device: what terms are made of."""
    paths = (source,) if isinstance(source, str) else source
    return torch.stack([find_lengths(batch, path).double() for path in paths]).sum(0)


class LearnedCost(SampleCost):
    """The weighted sum of a batch's terms, in milliseconds, as soon as the ranks know the weights.

    Give it to a `BalancedLoader`, and the loader to a `StepTimer`: nothing else is to be done.

        loader = BalancedLoader(loader, balancer, cost=LearnedCost(SequenceTerms(history="history")))
        timer = StepTimer(device, loader=loader)

    Now and then the ranks tell the lead what their batches held and how long they took. From some round on, their costs
    are the lead's fit's, on all ranks alike; before, and whenever no fit is good enough any more, they are the prior's.

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
        self.terms, self.options = terms, options or FitOptions()
        self.fit: Fit | None = None
        upper = self.options.upper
        if upper is not None and len(upper) != len(terms.names):
            raise ValueError(f"upper has {len(upper)} bounds; give one for each of {', '.join(terms.names)}")
        if prior is None and not isinstance(terms, SequenceTerms):
            raise ValueError("prior is None; give the cost until the terms' weights are known")
        if isinstance(prior, Mapping):  # as a configuration file might
            raise ValueError(f"prior is {prior!r}; give the cost itself, or leave it out: tokens")
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
        terms = SequenceTerms(history=history, candidates=candidates, context=context)
        return cls(terms, prior=prior, options=FitOptions(**options))

    def __call__(self, batch: Any) -> Any:
        """(n,) costs of the host's batch; see `SampleCost`."""
        if self.fit is None and self._prior is not None:
            return self._prior(batch)
        return self.terms(batch).numpy() @ self._coefficients

    def spans(self, batch: Any) -> SpanCosts | None:
        """What any positions of each sample cost; see `SampleCost`."""
        if self.fit is None and self._prior is not None:
            spans = getattr(self._prior, "spans", None)
            return None if spans is None else spans(batch)
        spans = getattr(self.terms, "spans", None)
        return None if spans is None else spans(batch, self._coefficients)

    @property
    def _coefficients(self) -> NDArray[np.float64]:
        """Those of the fit; without one, of sequences: tokens."""
        return self.fit.coefficients if self.fit is not None else np.eye(len(self.terms.names))[1]


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
            self.after = coming(self._total)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    @property
    def latest(self) -> NDArray[np.float64] | None:
        """(terms,) of the latest batch; None while they are on their way."""
        if self._copied is not None and not self._copied.query():  # type: ignore[no-untyped-call]
            return None
        latest: NDArray[np.float64] = (self.after - self.before).numpy()
        return latest
