"""What a round did, for people, metrics and the weighting of losses: from its votes and its plan."""

from __future__ import annotations

import logging
import math
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.api import evenness
from evenkeel.partitioning.delays import Delay
from evenkeel.partitioning.rounds import Figures, RankPlan
from evenkeel.partitioning.speeds import ALL_EQUAL, LearnedSpeeds, Straggler, planned_speeds
from trainer_client.balancing.agreement import Mode, Reason, Verdict
from trainer_client.balancing.options import BalanceOptions
from trainer_client.balancing.votes import Vote

if TYPE_CHECKING:  # which carries reports
    from trainer_client.balancing.tickets import Ticket

logger = logging.getLogger(__name__)


@cache
def _warn_of_mean() -> None:
    """Once a process: a loop asks at every step."""
    logger.warning(
        "this rank has no sample in a batch, and a mean over none is NaN whatever it is multiplied by: take a sum "
        "times loss_scale, or keep ranks from empty batches by BalanceOptions(min_samples=1) and drop_last=True"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundReport:
    """One round as seen by one rank. Loads are in units of the cost; what is unknown of them is NaN.

    Where the costs of a rank cannot be used, its load is unknown, and with it how even the ranks are.

    Attributes:
        round: Round number of the loader's stream.
        batch: Which batch of the round's window; 0 without windows.
        mode: What all ranks did.
        reason: Why, when it was not the service's plan.
        ranks: The ranks that the reason is about.
        home_loads: (world size,) float64, load of each rank's own samples.
        own_load: Load of the samples that this rank trains.
        max_load_before: Largest load over speed as loaded.
        max_load: Largest load over speed after the round, with what the exchange of split samples takes; NaN if only
            single ranks know.
        imbalance_before: Max/mean of load over speed as loaded.
        imbalance: The same as trained.
        lower_bound: No assignment of whole samples has a smaller maximum.
        samples: Samples of all ranks.
        own_samples: Samples that this rank trains, each piece of a split sample as one.
        moved_samples: Samples that changed rank, over all ranks.
        size: Bytes of all samples.
        moved_size: Bytes of the samples that changed rank.
        wait_seconds: How long this rank's worker waited for the service (hidden behind training unless too long).
        partition_seconds: Time of the partition search.
        split_samples: Samples that are split over ranks, of all ranks.
        pieces: Pieces that they are split into.
        exchanged: Positions whose keys and values go to another rank, counted for each rank that they go to.
        max_load_whole: Where samples are split, the `max_load` of the best plan found without; 0 otherwise, and where
            no such plan keeps within the memory caps.
        learned: What was known of the ranks' speeds when the round was planned; all equal unless steps are measured.
    """

    round: int
    batch: int = 0
    mode: Mode
    reason: Reason
    ranks: tuple[int, ...]
    home_loads: NDArray[np.float64]
    own_load: float
    max_load_before: float
    max_load: float
    imbalance_before: float
    imbalance: float
    lower_bound: float
    samples: int
    own_samples: int
    moved_samples: int = 0
    size: int = 0
    moved_size: int = 0
    wait_seconds: float = 0.0
    partition_seconds: float = 0.0
    split_samples: int = 0
    pieces: int = 0
    exchanged: int = 0
    max_load_whole: float = 0.0
    learned: LearnedSpeeds = ALL_EQUAL

    @property
    def stragglers(self) -> tuple[Straggler, ...]:
        """The ranks known to compute more slowly than the others when the round was planned, the slowest first."""
        return tuple(sorted(self.learned.stragglers, key=lambda slow: slow.speed))

    @property
    def delays(self) -> tuple[Delay, ...]:
        """The ranks known to get their batches later than the others, and why, the latest first."""
        return tuple(sorted(self.learned.delays, key=lambda late: -late.share))

    @property
    def loss_scale(self) -> float:
        """World size over the samples of the global batch: the factor for a loss that is a sum over samples."""
        return len(self.home_loads) / self.samples if self.samples else 0.0

    @property
    def mean_loss_scale(self) -> float:
        """The factor for a loss that is a mean over this rank's samples: world size × own samples / all samples.

        It is 0 where the rank has no sample; but a mean over none is NaN, and stays it times 0, which a warning says.
        """
        if not self.own_samples:
            _warn_of_mean()
        return self.loss_scale * self.own_samples

    @property
    def timed_load(self) -> float:
        """The load whose time tells of this rank's speed; 0 if unknown, or where split samples wait for others."""
        return 0.0 if self.split_samples or math.isnan(self.own_load) else self.own_load

    @property
    def moved_share(self) -> float:
        """Share of all bytes that changed rank."""
        return self.moved_size / self.size if self.size else 0.0


@dataclass(slots=True)
class Counters:
    """Running totals of a stream on this rank.

    Attributes:
        rounds: Number of rounds by (mode, reason).
        breaker_changes: How often the breaker opened or closed.
        wait_seconds: Sum of the waits of the worker for the service.
        dropped_samples: Samples that this rank loaded and nobody trained because of `drop_last`.
        exposed_seconds: Sum of the time that the training thread waited for an agreement.
        redistribution_seconds: Sum of the time that the training thread spent in starting and finishing moves.
        loading_seconds: Sum of the time that the training thread waited for the wrapped loader.
        own_load: Sum of the loads of the batches that a loader has yielded, as far as they are known.
        split_samples: Sum of the samples that were split in them.
    """

    rounds: Counter[tuple[Mode, Reason]] = field(default_factory=Counter)
    breaker_changes: int = 0
    dropped_samples: int = 0
    wait_seconds: float = 0.0
    exposed_seconds: float = 0.0
    redistribution_seconds: float = 0.0
    loading_seconds: float = 0.0
    own_load: float = 0.0
    split_samples: int = 0

    def count(self, report: RoundReport) -> None:
        """Adds a batch that was yielded."""
        self.own_load += 0.0 if math.isnan(report.own_load) else report.own_load
        self.split_samples += report.split_samples


def report_round(
    ticket: Ticket,
    votes: list[Vote],
    verdict: Verdict,
    *,
    plan: RankPlan,
    rank: int,
    options: BalanceOptions,
    wait_seconds: float,
    learned: LearnedSpeeds = ALL_EQUAL,
) -> tuple[RoundReport, ...]:
    """The report of each batch of a round."""
    num_batches = max(1, *(vote.num_batches for vote in votes))
    speeds = planned_speeds(options.of_rounds.speeds, learned, [vote.load for vote in votes], num_batches)
    known = all(vote.costs_valid for vote in votes)
    reports = []
    for batch in range(num_batches):
        of_batch = [vote.of_batch(batch) for vote in votes]
        home_loads = np.array([vote.load if vote.costs_valid else math.nan for vote in of_batch], dtype=np.float64)
        own_size = int(ticket.samples.moving_sizes[ticket.samples.in_batch(batch)].sum())
        own_load = plan.loads[batch] if plan.loads else float(home_loads[rank])
        figures = plan.figures[batch] if plan.figures else _as_loaded(of_batch, home_loads, speeds, own_size)
        if not known:
            figures = _without_loads(figures)
            own_load = math.nan if plan.loads else own_load
        reports.append(
            RoundReport(
                round=ticket.round,
                batch=batch,
                mode=verdict.mode,
                reason=verdict.reason,
                ranks=verdict.ranks,
                home_loads=home_loads,
                own_load=own_load,
                max_load_before=figures.max_load_before,
                max_load=figures.max_load_after,
                imbalance_before=figures.imbalance_before,
                imbalance=figures.imbalance_after,
                lower_bound=figures.lower_bound,
                samples=figures.samples,
                own_samples=int(plan.slices[batch].source_counts.sum()),
                moved_samples=figures.moved_samples,
                size=figures.size,
                moved_size=figures.moved_size,
                wait_seconds=wait_seconds,
                partition_seconds=plan.seconds,
                split_samples=figures.split_samples,
                pieces=figures.pieces,
                exchanged=figures.exchanged,
                max_load_whole=figures.max_load_whole,
                learned=learned,
            )
        )
    return tuple(reports)


def _as_loaded(
    votes: list[Vote], loads: NDArray[np.float64], speeds: NDArray[np.float64] | None, own_size: int
) -> Figures:
    """Those of a batch that nobody has planned, as far as the votes tell; its size is that on this rank."""
    mean, (largest, even) = float(loads.mean()), evenness(loads, speeds)
    # The bound is that of free counts and equal speeds, which holds for every way of balancing.
    bound = max(mean, *(vote.heaviest for vote in votes)) if speeds is None else float("nan")
    return Figures(
        mean_load=mean, max_load_before=largest, max_load_after=largest, imbalance_before=even, imbalance_after=even,
        lower_bound=bound, samples=sum(vote.samples for vote in votes), moved_samples=0, size=own_size, moved_size=0,
        moved_size_between_nodes=0,
    )  # fmt: skip


def _without_loads(figures: Figures) -> Figures:
    """The same but for what depends on the loads of all ranks, which are unknown."""
    return replace(
        figures, mean_load=math.nan, max_load_before=math.nan, max_load_after=math.nan, imbalance_before=math.nan,
        imbalance_after=math.nan, lower_bound=math.nan,
    )  # fmt: skip
