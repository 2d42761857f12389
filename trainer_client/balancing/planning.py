"""The lead's own plan of a round, and how even a round is that nobody planned."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning import PartitionError
from evenkeel.partitioning.api import evenness
from evenkeel.partitioning.rounds import Figures, RoundOptions, RoundSamples, partition_batches
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
        if round_.plan is None and round_.decision.mode in (Mode.EMBEDDED, Mode.SPREAD):
            self._plan(round_, samples)
        reason = round_.decision.reason
        if reason in (Reason.INVALID_COSTS, Reason.PARTITION_FAILED):
            self._say_unplanned(round_.number, round_.decision)
        if round_.plan is not None:
            round_.slices = slice_round(round_.plan, samples, compiled=not round_.plain)
            round_.extras.figures = round_.plan.batches
            round_.home_loads, round_.loads = round_.plan.loads_before, round_.plan.loads_after
            return
        loads = samples.home_loads
        unknown = np.full_like(loads, np.nan) if reason is Reason.INVALID_COSTS else loads
        round_.extras.figures = _figures(unknown, samples, round_.options)
        if reason is Reason.INVALID_COSTS:
            loads[:, list(round_.decision.ranks)] = np.nan
        round_.home_loads = round_.loads = loads

    def _plan(self, round_: Round, samples: RoundSamples) -> None:
        options, decision = round_.options, round_.decision
        if self._kernels is not None and not round_.plain:
            if self._kernels.ready:
                self._kernels = None
            else:
                round_.plain = True
        if round_.plain:
            options = replace(options, strategy="plain", split=None)
        if decision.mode is Mode.EMBEDDED:
            try:
                if samples.num_ranks > 1:
                    round_.plan = plan_round(samples, options)
                    reason = Reason.COMPILING if round_.plain else round_.reason
                    round_.decision = replace(decision, reason=reason)
                else:
                    _check_alone(samples, options)
                    round_.decision = replace(decision, mode=Mode.IDENTITY)
            except PartitionError as error:
                stays = Decision(
                    mode=Mode.IDENTITY, reason=Reason.PARTITION_FAILED, problem=str(error), batches=decision.batches,
                    last=decision.last,
                )  # fmt: skip
                round_.decision = spread(stays, samples.batch_sizes, self._min_samples)
        if round_.decision.mode is Mode.SPREAD:
            round_.plan = plan_round(samples, options.spreading())

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


def _check_alone(samples: RoundSamples, options: RoundOptions) -> None:
    """One rank keeps its samples; an error where they exceed its memory cap."""
    if options.memory_caps and samples.memory is not None:
        found = partition_batches(samples, replace(options, strategy="plain", stay=True))
        if isinstance(found, PartitionError):
            raise found


def _figures(loads: NDArray[np.float64], samples: RoundSamples, options: RoundOptions) -> tuple[Figures, ...]:
    """Those of batches that nobody has planned, with the bound of free counts, which holds for all counts."""
    figures, rates = [], np.array(options.speeds or np.ones(samples.num_ranks))
    batches = np.zeros(len(samples.costs), np.int64) if samples.steps is None else samples.steps
    sizes = np.bincount(batches, samples.moving_sizes, samples.num_batches)
    for batch, (row, size) in enumerate(zip(loads, sizes.tolist(), strict=True)):
        largest, imbalance = evenness(row, rates if options.speeds else None)
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
