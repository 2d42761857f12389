"""The lead's own plan of a round, and how even a round is that nobody planned."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning import PartitionError
from evenkeel.partitioning.api import evenness
from evenkeel.partitioning.rounds import Figures, RoundOptions, RoundSamples
from evenkeel.partitioning.stages import plan_round, slice_round
from trainer_client.balancing.decide import Decision, spread
from trainer_client.balancing.kernels import Kernels
from trainer_client.balancing.lead import Round, Stage
from trainer_client.balancing.report import Mode, Reason

logger = logging.getLogger(__name__)


class Planning(Stage):
    """Plans what no service has planned; cuts every plan for the ranks."""

    def __init__(self, name: str, kernels: Kernels | None, *, min_samples: int) -> None:
        self._name, self._kernels, self._min_samples = name, kernels, min_samples
        self._unplanned = 0

    def finish(self, round_: Round) -> None:
        """Gives a round its plan, slices and figures, or the reason why it has no plan."""
        samples = round_.samples
        assert samples is not None
        options, plain = round_.options, False
        if round_.plan is None and round_.decision.mode in (Mode.EMBEDDED, Mode.SPREAD):
            if plain := self._is_plain(round_):
                options = replace(options, strategy="plain", split=None)
            if round_.decision.mode is Mode.EMBEDDED:
                try:
                    if samples.num_ranks > 1:
                        round_.plan = plan_round(samples, options)
                    else:
                        _check_alone(options, samples)
                except PartitionError as error:
                    stays = Decision(mode=Mode.IDENTITY, reason=Reason.PARTITION_FAILED, problem=str(error))
                    stays = replace(stays, batches=round_.decision.batches, last=round_.decision.last)
                    round_.decision = spread(stays, samples.batch_sizes, self._min_samples)
                else:
                    reason = Reason.COMPILING if plain else round_.reason
                    alone = replace(round_.decision, mode=Mode.IDENTITY)
                    round_.decision = replace(round_.decision, reason=reason) if round_.plan is not None else alone
            if round_.decision.mode is Mode.SPREAD:
                round_.plan = plan_round(samples, options.spreading())
        if round_.plan is not None:
            round_.slices = slice_round(round_.plan, samples, compiled=not plain)
        if round_.decision.reason in (Reason.INVALID_COSTS, Reason.PARTITION_FAILED):
            self._say_unplanned(round_.number, round_.decision)
        if round_.plan is not None:
            round_.extras.figures = round_.plan.batches
            round_.home_loads, round_.loads = round_.plan.loads_before, round_.plan.loads_after
        else:
            loads = samples.home_loads
            if round_.decision.reason is Reason.INVALID_COSTS:
                round_.extras.figures = _figures(np.full_like(loads, np.nan), samples, options.speeds)
                loads[:, list(round_.decision.ranks)] = np.nan
            else:
                round_.extras.figures = _figures(loads, samples, options.speeds)
            round_.home_loads = round_.loads = loads

    def _is_plain(self, round_: Round) -> bool:
        """Whether to plan without kernels, which are being compiled; a resumed window is planned as it was before."""
        if round_.window is not None:
            if not round_.window["plain"] and self._kernels is not None:
                self._kernels.wait()
            return bool(round_.window["plain"])
        if self._kernels is not None and self._kernels.ready:
            self._kernels = None
        return self._kernels is not None

    def _say_unplanned(self, number: int, decision: Decision) -> None:
        """Said of the first, second, fourth, eighth…, as it may be every round."""
        self._unplanned += 1
        if self._unplanned.bit_count() == 1:
            why = decision.problem
            if decision.reason is Reason.INVALID_COSTS:
                of = f"the costs of rank(s) {', '.join(map(str, decision.ranks))} cannot be used"
                why = f"{of}: {why}" if why else of
            text = "round %d of %s stays unbalanced (%d so far): %s"
            logger.warning(text, number, self._name, self._unplanned, why)


def _check_alone(options: RoundOptions, samples: RoundSamples) -> None:
    """One rank keeps its samples; an error where they exceed its memory cap."""
    caps, memory = options.memory_caps, samples.memory
    if caps and memory is not None:
        steps = np.zeros(memory.size, np.int64) if samples.steps is None else samples.steps
        most = float(np.bincount(steps, memory, samples.num_batches).max(initial=0.0))
        if most > caps[0]:
            raise PartitionError(f"its batch takes {most:g} of memory, the cap of the only rank is {caps[0]:g}")


def _figures(loads: NDArray[np.float64], samples: RoundSamples, speeds: tuple[float, ...]) -> tuple[Figures, ...]:
    """Those of batches that nobody has planned, with the bound of free counts, which holds for all counts."""
    figures, rates = [], np.array(speeds or np.ones(samples.num_ranks))
    batches = np.zeros(len(samples.costs), np.int64) if samples.steps is None else samples.steps
    sizes = np.bincount(batches, samples.moving_sizes, samples.num_batches)
    for batch, (row, size) in enumerate(zip(loads, sizes.tolist(), strict=True)):
        largest, imbalance = evenness(row, rates if speeds else None)
        if np.isnan(row).any():
            largest = imbalance = np.nan
        heaviest = float(samples.costs[batches == batch].max(initial=0))
        bound = max(float(row.mean()) * len(row) / float(rates.sum()), heaviest / float(rates.max()))
        figures.append(
            Figures(
                mean_load=float(row.mean()), max_load_before=largest, max_load_after=largest,
                imbalance_before=imbalance, imbalance_after=imbalance, lower_bound=bound,
                samples=int(samples.batch_sizes[:, batch].sum()), moved_samples=0, size=int(size), moved_size=0,
                moved_size_between_nodes=0,
            )
        )  # fmt: skip
    return tuple(figures)
