"""What a round did, for people, metrics and the weighting of losses."""

from __future__ import annotations

import logging
import math
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache

from evenkeel.partitioning.delays import Delay
from evenkeel.partitioning.rounds import Figures
from evenkeel.partitioning.speeds import ALL_EQUAL, LearnedSpeeds, Straggler
from evenkeel.partitioning.splits import SplitSample

logger = logging.getLogger(__name__)


class Mode(StrEnum):
    """What all ranks do with a round."""

    SERVICE = "service"  # move by the service's plan
    EMBEDDED = "embedded"  # move by the lead's own plan
    IDENTITY = "identity"  # every sample stays at home
    SPREAD = "spread"  # every sample stays at home but those that ranks with too few need (min_samples)
    DROP = "drop"  # nobody trains the samples (drop_last)
    END = "end"  # the pass is over on all ranks


class Reason(StrEnum):
    """Why a round did what it did, where that was not the service's plan."""

    NONE = "none"
    LEFT = "left"  # some rank has left its loop
    TOO_FEW_SAMPLES = "too_few_samples"  # for all ranks; the loader has drop_last
    NO_SERVICE = "no_service"  # the balancer is embedded or off
    NO_ANSWER = "no_answer"  # the service had not answered when the lead's loop came for the batch, or it failed
    NOT_ASKED = "not_asked"  # the service owes an earlier answer, or gave none before: it is asked again after a while
    REFUSED = "refused"  # the service refuses rounds like this one, as its limits say
    INVALID_COSTS = "invalid_costs"  # a rank's costs are no finite numbers of at least 0
    PARTITION_FAILED = "partition_failed"  # no plan within the memory caps was found
    COMPILING = "compiling"  # the lead's kernels are being compiled: it plans by a plain heuristic meanwhile


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundReport(Figures):
    """One round as seen by one rank. Loads are in units of the cost; what is unknown of them is NaN.

    Where the costs of some rank cannot be used, loads are unknown. Beside what is here it has the attributes of
    `Figures`, of the batch.

    Attributes:
        round: Round number of the loader's stream.
        batch: Which batch of the round.
        mode: What all ranks did.
        reason: Why, when it was not the service's plan.
        ranks: The ranks that the reason is about.
        world_size: Number of ranks that balance together.
        home_load: Load of this rank's samples as loaded.
        own_load: Load of the samples that this rank trains.
        own_samples: Samples that this rank trains, each piece of a split sample as one.
        wait_seconds: How long the lead waited for the service (hidden behind training unless too long).
        partition_seconds: Time of the partition search.
        learned: What was known of the ranks when the round was planned; all are alike unless steps are measured.
        splits: Samples that lie on several ranks, those of all ranks.
    """

    round: int
    batch: int = 0
    mode: Mode
    reason: Reason
    ranks: tuple[int, ...] = ()
    world_size: int = 1
    home_load: float
    own_load: float
    own_samples: int
    wait_seconds: float = 0.0
    partition_seconds: float = 0.0
    learned: LearnedSpeeds = ALL_EQUAL
    splits: tuple[SplitSample, ...] = ()

    @property
    def max_load(self) -> float:
        """Largest load over speed after the round, with what the exchange of split samples takes."""
        return self.max_load_after

    @property
    def imbalance(self) -> float:
        """Max/mean of load over speed as trained."""
        return self.imbalance_after

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
        return self.world_size / self.samples if self.samples else 0.0

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


@cache
def _warn_of_mean() -> None:
    """Once a process: a loop asks at every step."""
    logger.warning(
        "this rank has no sample in a batch, and a mean over none is NaN whatever it is multiplied by: take a sum "
        "times loss_scale, or keep ranks from empty batches by BalanceOptions(min_samples=1) and drop_last=True"
    )


@dataclass(slots=True)
class Counters:
    """Running totals of a stream on this rank.

    Attributes:
        rounds: Number of rounds by (mode, reason).
        breaker_changes: How often the lead has stopped asking the service, or begun again; 0 on other ranks.
        breaker_open: Whether the lead has stopped asking the service for a while; False on other ranks.
        wait_seconds: Sum of the lead's waits for the service.
        partition_seconds: Sum of the partition searches' time.
        dropped_samples: Samples that this rank loaded and nobody trained, as those of batches that `drop_last` drops.
        exposed_seconds: Sum of the time that the training thread waited for a round.
        redistribution_seconds: Sum of the time that the training thread spent in starting and finishing moves.
        loading_seconds: Sum of the time that the training thread waited for the wrapped loader.
        own_load: Sum of the loads of the batches that a loader has yielded, as far as they are known.
        split_samples: Sum of the samples that were split in them.
    """

    rounds: Counter[tuple[Mode, Reason]] = field(default_factory=Counter)
    breaker_changes: int = 0
    breaker_open: bool = False
    dropped_samples: int = 0
    wait_seconds: float = 0.0
    partition_seconds: float = 0.0
    exposed_seconds: float = 0.0
    redistribution_seconds: float = 0.0
    loading_seconds: float = 0.0
    own_load: float = 0.0
    split_samples: int = 0
