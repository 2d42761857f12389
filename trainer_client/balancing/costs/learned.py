"""A cost that learns from the clock what a unit of each of its terms takes, while the job trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from evenkeel.partitioning.splits import SpanCosts
from trainer_client.balancing.batches import BatchError, FlatBatch, lookup
from trainer_client.balancing.costs.base import SampleCost, num_fields
from trainer_client.checks import check_whole

_VARIES = 1e-3  # a term whose deviation is a smaller share of its mean tells nothing apart from the fixed time
_OUTLIER = 4.0  # deviations of the error
_PASSES = 10  # of reweighting
_EXACT = 1e-3  # errors of a smaller share of the median time weigh alike
_SLOW = 1.05  # times the median rank's time for the same work, from which on it is the rank that is slow, not the cost
_SCATTERED = 2.0  # times the error of the fit in use, above which it is not believed any more
_LITTLE = 0.05  # an error that is never too much for it
_ROUNDS = 3  # in which ranks' speeds and coefficients are put right by each other


class Terms(Protocol):
    """Numbers per sample that the time of a batch is a weighted sum of."""

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
        history = _count(batch, self.history) + self.context
        return history, _count(batch, self.candidates) if self.candidates else torch.zeros_like(history)


def _count(batch: Any, source: str | Sequence[str]) -> torch.Tensor:
    """(n,) float64 on the batch's device."""
    counts = []
    for path in (source,) if isinstance(source, str) else source:
        if isinstance(batch, FlatBatch):
            counts.append(torch.from_numpy(batch.lengths_of(path).astype(np.float64)))
            continue
        value = lookup(batch, path)
        lengths = value.lengths() if callable(getattr(value, "lengths", None)) else value
        if not isinstance(lengths, torch.Tensor) or lengths.dim() != 1:
            raise BatchError(f"{path!r} holds no lengths; name a jagged field or an integer tensor with one per sample")
        counts.append(lengths.double())
    return torch.stack(counts).sum(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Coefficients of the time of a rank's step.

    Attributes:
        coefficients: (terms,) milliseconds per unit of each term, 0 or more.
        fixed: Milliseconds that do not depend on the batch.
        error: Mean absolute error over mean time, on the observations used.
        explained: Share of the variance that is explained, 1 at best.
        observations: Number used, without outliers.
    """

    coefficients: NDArray[np.float64]
    fixed: float
    error: float
    explained: float
    observations: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FitOptions:
    """When to fit, and when to believe it.

    Attributes:
        every: Steps between fits; each costs one small all-gather.
        window: Latest steps of each rank that a fit uses.
        skip: First steps that are not used: compilation and warm-up.
        min_explained: Smallest share of the variance that a fit must explain to be used; else the cost stays, since a
            poor fit balances worse than what it replaces.
        upper: Largest allowed milliseconds per unit of each term; default: none.
    """

    every: int = 20
    window: int = 200
    skip: int = 5
    min_explained: float = 0.8
    upper: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        check_whole(self, every=1, window=1, skip=0)
        if not 0 <= self.min_explained <= 1:
            raise ValueError(f"min_explained is {self.min_explained}; use 0 to 1")
        if self.upper is not None and not all(bound > 0 for bound in self.upper):
            raise ValueError(f"upper is {self.upper}; use milliseconds above 0, math.inf for no bound")


class LearnedCost(SampleCost):
    """The weighted sum of a batch's terms, in milliseconds, as soon as the ranks know the weights.

    Give it to a `BalancedLoader`, and the loader to a `StepTimer`, as for learned speeds: nothing else is to be done.

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
        return self.terms(batch).numpy() @ self._coefficients

    def spans(self, batch: Any) -> SpanCosts | None:
        """What any positions of each sample cost; see `SampleCost`."""
        if self.fit is None and self._prior is not None:
            spans = getattr(self._prior, "spans", None)
            return None if spans is None else spans(batch)
        return self.terms.spans(batch, self._coefficients) if isinstance(self.terms, SequenceTerms) else None

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


# ------------------------------------------------------------------------------------------ the fit


def fit_times(
    terms: NDArray[np.float64], milliseconds: NDArray[np.float64], upper: NDArray[np.float64] | None = None
) -> Fit | None:
    """Least squares with bounds, without outliers: what is far from the fit of least absolute deviations.

    That fit, by reweighted least squares, holds still while up to a fifth of the times are off by any factor, as those
    of one stuck rank of eight are.

    Args:
        terms: (observations, terms) sums over each rank's batch.
        milliseconds: (observations,) measured compute times.
        upper: (terms,) largest allowed coefficients; default: none.

    Returns:
        The fit; None if there are too few observations, or none of the terms varies.
    """
    from scipy.optimize import lsq_linear  # takes a while, and few jobs want it

    finite = np.isfinite(milliseconds) & np.isfinite(terms).all(axis=1) & (milliseconds > 0)
    terms, milliseconds = terms[finite], milliseconds[finite]
    varying = terms.std(axis=0) > _VARIES * np.abs(terms.mean(axis=0)) if len(terms) else np.zeros(0, dtype=bool)
    if not varying.any() or len(terms) < 4 * (varying.sum() + 1):
        return None
    highest = np.full(terms.shape[1], np.inf) if upper is None else upper
    scale = np.append(np.abs(terms[:, varying]).max(axis=0), 1.0)
    table = np.column_stack([terms[:, varying], np.ones(len(terms))]) / scale
    bounds = (np.zeros(len(scale)), np.append(highest[varying], np.inf) * scale)
    weights = np.ones(len(table))
    for _ in range(_PASSES):
        solution = lsq_linear(table * weights[:, None], milliseconds * weights, bounds=bounds, method="bvls").x
        errors = np.abs(milliseconds - table @ solution)
        weights = 1 / np.sqrt(np.maximum(errors, _EXACT * np.median(milliseconds)))
    spread = 1.4826 * float(np.median(errors))
    used = errors <= max(_OUTLIER * spread, 1e-9 * float(milliseconds.mean()))
    chosen = milliseconds[used]
    solution = lsq_linear(table[used], chosen, bounds=bounds, method="bvls").x
    coefficients = np.zeros(terms.shape[1])
    coefficients[varying] = solution[:-1] / scale[:-1]
    wrong = chosen - table[used] @ solution
    variance = float(chosen.var())
    return Fit(
        coefficients=coefficients,
        fixed=float(solution[-1]),
        error=float(np.abs(wrong).mean() / chosen.mean()),
        explained=float(1 - wrong.var() / variance) if variance else 0.0,
        observations=int(used.sum()),
    )


def fit_ranks(tables: Sequence[NDArray[np.float64]], upper: NDArray[np.float64] | None = None) -> Fit | None:
    """The same for what several ranks measured, of which some may compute more slowly than the others.

    A rank that takes longer for all it does says nothing else of the cost: its times count as those of the median rank.

    Args:
        tables: Of each rank, (observations, terms + 1): sums over its batch, and milliseconds.
        upper: (terms,) largest allowed coefficients; default: none.
    """
    tables = [table[np.isfinite(table).all(axis=1) & (table[:, -1] > 0)] for table in tables]
    slowness = np.ones(len(tables))
    fit = None
    for _ in range(_ROUNDS):
        terms = np.concatenate([table[:, :-1] for table in tables])
        times = np.concatenate([table[:, -1] / slow for table, slow in zip(tables, slowness, strict=True)])
        fit = fit_times(terms, times, upper)
        if fit is None:
            return None
        ratios = np.full(len(tables), np.nan)  # of measured to predicted times; of ranks without any, unknown
        for rank, table in enumerate(tables):
            if len(table):
                ratios[rank] = np.median(table[:, -1] / (table[:, :-1] @ fit.coefficients + fit.fixed))
        known = np.sort(ratios[~np.isnan(ratios)])
        usual = known[(len(known) - 1) // 2]  # of two ranks, the faster one's
        before, slowness = slowness, np.where(ratios >= _SLOW * usual, ratios / usual, 1.0)
        if np.allclose(slowness, before, rtol=1e-2):
            break
    return fit


def fit_in_force(fit: Fit, before: Fit | None, options: FitOptions) -> Fit | None:
    """What the cost is to be: a new fit, the one before, or the prior (None).

    A good cost makes all times alike, and then a new fit explains little, however right it is: the one that made them
    so stays as long as times are no more scattered than they were.
    """
    if fit.explained >= options.min_explained and (fit.coefficients > 0).any():
        return fit
    return before if before is not None and fit.error <= max(_SCATTERED * before.error, _LITTLE) else None
