"""Costs that match the clock: coefficients fitted to measured times while training."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from trainer_client.checks import check_whole
from trainer_client.observing.fitting.solve import Fit, fit_times
from trainer_client.observing.fitting.terms import Terms
from trainer_client.observing.measurement import StepTimes
from trainer_client.process_groups import make_group

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


class CostFitter:
    """Fits the cost of samples to the compute times that all ranks measure.

    Pass `cost` to the `BalancedLoader`. It is `prior` until a fit is good enough; from then on the weighted sum of the
    terms, in milliseconds. All ranks gather the same data in the same step, compute the same fit and switch together,
    so a round never mixes costs.

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
        if self._group is not None:
            tables = [None] * dist.get_world_size(self._group)
            dist.all_gather_object(tables, own, group=self._group)
        table = np.concatenate(tables)
        upper = None if self._options.upper is None else np.array(self._options.upper)
        fit = fit_times(table[:, :-1], table[:, -1], upper)
        if fit is None:
            return
        self.fit = fit
        before = self.fitted
        believable = fit.explained >= self._options.min_explained and bool((fit.coefficients > 0).any())
        self._coefficients = fit.coefficients if believable else None
        if self.fitted != before:
            named = ", ".join(
                f"{value:.3g} ms per {name}" for name, value in zip(self._terms.names, fit.coefficients, strict=True)
            )
            logger.info(
                "step %d: the cost is %s (%.0f %% of the variance explained)", self._step,
                named if self.fitted else "the given one again", 100 * fit.explained,
            )  # fmt: skip
