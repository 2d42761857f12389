"""Costs that match the clock: coefficients fitted to measured times while training."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from scipy.optimize import lsq_linear

from evenkeel.partitioning.spans import SpanCosts
from trainer_client.balancing.batches import BatchError, lookup
from trainer_client.checks import check_whole
from trainer_client.observing.measurement import StepTimes
from trainer_client.process_groups import make_group


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
        history = _count(batch, self.history) + self.context
        candidates = _count(batch, self.candidates) if self.candidates else torch.zeros_like(history)
        pairs = history * (history + 1) / 2 + candidates * (history + 1)
        columns = [torch.ones_like(history), history + candidates, pairs]
        return torch.stack([*columns, candidates] if self.candidates else columns, dim=1)

    def spans(self, batch: Any, coefficients: NDArray[np.float64]) -> SpanCosts:
        """What any positions of each sample of the host's batch cost, given what a unit of each term costs."""
        history = _count(batch, self.history).numpy() + self.context
        candidates = _count(batch, self.candidates).numpy() if self.candidates else np.zeros(len(history))
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
            granule=1 if isinstance(self.history, str) else len(self.history),
        )


def _count(batch: Any, source: str | Sequence[str]) -> torch.Tensor:
    paths = (source,) if isinstance(source, str) else tuple(source)
    counts = []
    for path in paths:
        value = lookup(batch, path)
        lengths = value.lengths() if callable(getattr(value, "lengths", None)) else value
        if not isinstance(lengths, torch.Tensor) or lengths.dim() != 1:
            raise BatchError(f"{path!r} holds no lengths; name a jagged field or an integer tensor with one per sample")
        counts.append(lengths.double())
    return torch.stack(counts).sum(0)


_VARIES = 1e-3  # a term whose deviation is a smaller share of its mean tells nothing apart from the fixed time
_OUTLIER = 4.0  # deviations of the error
_PASSES = 10  # of reweighting
_EXACT = 1e-3  # errors of a smaller share of the median time weigh alike
_SLOW = (
    1.05  # times the median rank's time for the same work, from which on a rank's own speed is not the cost's matter
)
_SCATTERED = 2.0  # times the error of the fit in use, above which it is not believed any more
_LITTLE = 0.05  # an error that is never too much for it
_ROUNDS = 3  # in which ranks' speeds and coefficients are put right by each other


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
        solution = _solve(table * weights[:, None], milliseconds * weights, bounds)
        errors = np.abs(milliseconds - table @ solution)
        weights = 1 / np.sqrt(np.maximum(errors, _EXACT * np.median(milliseconds)))
    spread = 1.4826 * float(np.median(errors))
    used = errors <= max(_OUTLIER * spread, 1e-9 * float(milliseconds.mean()))
    solution = _solve(table[used], milliseconds[used], bounds)
    coefficients = np.zeros(terms.shape[1])
    coefficients[varying] = solution[:-1] / scale[:-1]
    chosen = milliseconds[used]
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
    """The same for what several ranks measured, where some of them may compute more slowly than the others.

    A rank that takes longer for all it does says nothing else of the cost: its times count as those of the median rank.

    Args:
        tables: Of each rank, (observations, terms + 1): sums over its batch, and milliseconds.
        upper: (terms,) largest allowed coefficients; default: none.

    Returns:
        The fit; None as in `fit_times`.
    """
    tables = [table[np.isfinite(table).all(axis=1) & (table[:, -1] > 0)] for table in tables]
    slowness = np.ones(len(tables))
    fit = None
    for _ in range(_ROUNDS):
        table = np.concatenate(
            [np.column_stack([t[:, :-1], t[:, -1] / s]) for t, s in zip(tables, slowness, strict=True)]
        )
        fit = fit_times(table[:, :-1], table[:, -1], upper)
        if fit is None:
            return None
        taken = [np.median(t[:, -1] / (t[:, :-1] @ fit.coefficients + fit.fixed)) for t in tables if len(t)]
        usual = sorted(taken)[(len(taken) - 1) // 2]  # of two ranks, the faster one's
        found = iter(taken)
        before = slowness
        slowness = np.array([max(1.0, next(found) / usual) if len(t) else 1.0 for t in tables])
        slowness[slowness < _SLOW] = 1.0
        if np.allclose(slowness, before, rtol=1e-2):
            break
    return fit


def _solve(
    table: NDArray[np.float64], milliseconds: NDArray[np.float64], bounds: tuple[NDArray[np.float64], ...]
) -> NDArray[np.float64]:
    solution: NDArray[np.float64] = lsq_linear(table, milliseconds, bounds=bounds, method="bvls").x
    return solution


logger = logging.getLogger(__name__)


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


def fit_in_force(fit: Fit, before: Fit | None, options: FitOptions) -> Fit | None:
    """What the cost is to be: a new fit, the one before, or the prior.

    A good cost makes all times alike, and then a new fit explains little, however right it is: the one that made them
    so stays as long as times are no more scattered than they were.

    Args:
        fit: The new one.
        before: Used so far; None: the prior is.
        options: When to believe it.
    """
    if fit.explained >= options.min_explained and (fit.coefficients > 0).any():
        return fit
    return before if before is not None and fit.error <= max(_SCATTERED * before.error, _LITTLE) else None


class CostFitter:
    """Fits the cost of samples to the compute times that all ranks measure.

    Pass `cost` to the `BalancedLoader`. It is `prior` until a fit is good enough; from then on the weighted sum of the
    terms, in milliseconds. All ranks show each other what they measured in the same step and take the first rank's fit
    of it, so they switch together, and a round never mixes costs.

        fitter = CostFitter(terms, prior=HSTUCost(...))
        loader = BalancedLoader(loader, balancer, cost=fitter.cost)
        for batch in loader:
            fitter.observe(batch)
            ...                                   # a step, timed by a StepTimer
            fitter.end_step(timer.finished())
    """

    def __init__(
        self,
        terms: Terms,
        *,
        prior: Callable[[Any], Any],
        options: FitOptions | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        """Starts with the prior. Collective: makes a Gloo group of its own.

        Args:
            terms: What the time is made of.
            prior: The cost until a fit is used, and whenever none is good enough any more.
            options: When to fit, and when to believe it.
            process_group: The ranks that balance together; default: all.

        Raises:
            ValueError: If `options.upper` has another length than the terms.
        """
        upper = options.upper if options is not None else None
        if upper is not None and len(upper) != len(terms.names):
            raise ValueError(f"upper has {len(upper)} bounds; give one for each of {', '.join(terms.names)}")
        self._terms = terms
        self._prior = prior
        self._options = options or FitOptions()
        self._used: Fit | None = None
        self._coefficients: NDArray[np.float64] | None = None
        self._observed: deque[tuple[int, torch.Tensor]] = deque()
        self._times: dict[int, float] = {}
        self._history: deque[NDArray[np.float64]] = deque(maxlen=self._options.window)
        self._step = 0
        self._group: dist.ProcessGroup | None = None
        self.fit: Fit | None = None
        if dist.is_available() and dist.is_initialized() and dist.get_world_size(process_group) > 1:
            ranks = dist.get_process_group_ranks(process_group if process_group is not None else dist.group.WORLD)
            self._group = make_group(ranks, "gloo")

    @property
    def fitted(self) -> bool:
        """Whether the cost is a fitted one."""
        return self._coefficients is not None

    def cost(self, batch: Any) -> Any:
        """(n,) costs of the host's batch, for the `BalancedLoader`."""
        if self._coefficients is None:
            return self._prior(batch)
        return self._terms(batch).numpy() @ self._coefficients

    def spans(self, batch: Any) -> SpanCosts | None:
        """What any positions of each sample of the host's batch cost; None if the cost cannot say it."""
        if self._coefficients is None:
            spans = getattr(self._prior, "spans", None)
            return None if spans is None else spans(batch)
        if not isinstance(self._terms, SequenceTerms):
            return None
        return self._terms.spans(batch, self._coefficients)

    def observe(self, batch: Any) -> None:
        """Notes what the batch that is about to be trained holds; nothing is read from its device yet."""
        sums = self._terms(batch).sum(0)
        if sums.is_cuda:
            sums = torch.empty(sums.shape, dtype=sums.dtype, device="cpu", pin_memory=True).copy_(
                sums, non_blocking=True
            )
        self._observed.append((self._step, sums))

    def end_step(self, finished: Iterable[StepTimes]) -> None:
        """Ends a step; every `every` steps all ranks exchange what they measured and fit. Collective.

        Args:
            finished: Steps whose times have been read since the last call, counted like the calls of this method.
        """
        for times in finished:
            self._times[times.step] = times.compute
        latest = max(self._times, default=-1)
        while self._observed and self._observed[0][0] <= latest:
            step, sums = self._observed.popleft()
            # The events of the step are over, so the copy before them is too.
            milliseconds = self._times.pop(step, None)
            if milliseconds is not None and step >= self._options.skip:
                self._history.append(np.append(sums.numpy(), milliseconds))
        self._step += 1
        if self._step % self._options.every == 0:
            self._refit()

    def _refit(self) -> None:
        width = len(self._terms.names) + 1
        own = np.array(self._history, dtype=np.float64).reshape(-1, width)
        tables: list[Any] = [own]
        upper = None if self._options.upper is None else np.array(self._options.upper)
        if self._group is None:
            fit = fit_ranks(tables, upper)
        else:
            # Only the first rank's is taken: others, on other machines, might come to another one in the last digits.
            first = dist.get_rank(self._group) == 0
            tables = [None] * dist.get_world_size(self._group)
            dist.all_gather_object(tables, own, group=self._group)
            told = [fit_ranks(tables, upper) if first else None]
            dist.broadcast_object_list(told, dist.get_global_rank(self._group, 0), group=self._group)
            fit = told[0]
        if fit is None:
            return
        self.fit = fit
        before = self.fitted
        self._used = fit_in_force(fit, self._used, self._options)
        self._coefficients = None if self._used is None else self._used.coefficients
        if self.fitted != before:
            named = ", ".join(
                f"{value:.3g} ms per {name}" for name, value in zip(self._terms.names, fit.coefficients, strict=True)
            )
            logger.info(
                "step %d: the cost is %s (%.0f %% of the variance explained)", self._step,
                named if self.fitted else "the given one again", 100 * fit.explained,
            )  # fmt: skip
