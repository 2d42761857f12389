"""Counters of a session, for people and dashboards; no decision depends on them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.rounds import Figures
from services.balancer.decisions import Decision, Reason


@dataclass(slots=True)
class SessionStatistics:
    """What has become of a session's rounds.

    Attributes:
        last_round: the last decided round.
        balanced: rounds with a plan.
        identity: rounds without, by reason.
        waited: seconds from first submission to decision, summed over all rounds.
        last_balance: how even the last balanced round is, with the seconds that its plan took, and the loads of its
            ranks before and after in its least even batch.
    """

    last_round: int = 0
    balanced: int = 0
    identity: dict[Reason, int] = field(default_factory=dict)
    waited: float = 0.0
    last_balance: tuple[Figures, float, NDArray[np.float64], NDArray[np.float64]] | None = None

    def count(self, round_number: int, decision: Decision, waited: float) -> None:
        """Takes a decided round into account."""
        self.last_round = round_number
        self.waited += waited
        if decision.plan is not None:
            self.balanced += 1
            plan = decision.plan
            worst = plan.worst
            self.last_balance = plan.figures, plan.seconds, plan.loads_before[worst], plan.loads_after[worst]
        else:
            self.identity[decision.reason] = self.identity.get(decision.reason, 0) + 1

    @property
    def rounds(self) -> int:
        """Decided rounds."""
        return self.balanced + sum(self.identity.values())

    @property
    def mean_wait(self) -> float:
        """Seconds from a round's first submission to its decision, on average."""
        return self.waited / self.rounds if self.rounds else 0.0
