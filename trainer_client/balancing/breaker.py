"""The circuit breaker: whether a round asks the service at all.

It is a function of earlier agreements only, so that all ranks open and close it in the same round.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

MAX_HOLD_ROUNDS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Breaker:
    """State of the breaker after some round.

    Attributes:
        closed: Rounds ask the service and wait for it.
        opened_at: Round whose agreement opened it last; meaningful while open.
        misses: Openings in a row without a round served between them. Each doubles the number of rounds for which the
            breaker stays open at least, so that a service that answers probes but misses rounds costs few waits.
    """

    closed: bool = True
    opened_at: int = -1
    misses: int = 0

    def after(self, round_number: int, *, waited: bool, served: bool, all_ready: bool) -> Breaker:
        """The state after the agreement on a round.

        Args:
            round_number: The round agreed on.
            waited: The round asked the service and waited for it.
            served: All ranks held the same decision of the service.
            all_ready: Every rank's stream to the service is joined and not suspected.
        """
        if self.closed:
            if waited and served:
                return replace(self, misses=0)
            if waited:
                return Breaker(closed=False, opened_at=round_number, misses=self.misses + 1)
            return self
        hold = min(1 << (self.misses - 1), MAX_HOLD_ROUNDS)
        if all_ready and round_number >= self.opened_at + hold:
            return replace(self, closed=True)
        return self
