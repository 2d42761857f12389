"""Where the ranks are: in which pass, at which round, and which rounds ask the service.

Every rank moves on by the same verdicts, so all ranks are always at the same place, and numbers of rounds are never
used twice. Why that is enough is argued in docs/agreement.md.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from evenkeel.partitioning.speeds import ALL_EQUAL, LearnedSpeeds
from trainer_client.balancing.agreement import Mode, Reason, Verdict
from trainer_client.balancing.breaker import Breaker
from trainer_client.balancing.costs.fits import Fit


class Turns:
    """The place of the ranks, which the worker moves on and the training thread waits for.

    Attributes:
        pass_number: The pass that the ranks agree in.
        round: The round to be agreed on next.
        breaker: After the latest agreement.
        last_end: By which the latest pass ended.
    """

    def __init__(self, name: str, *, depth: int, patience: float, has_service: bool) -> None:
        """Begins with pass 0.

        Args:
            name: Of the loader, for messages.
            depth: Rounds that a rank may submit ahead of their agreement.
            patience: Seconds that a round may take at most.
            has_service: This rank speaks to a service.
        """
        self.pass_number = 0
        self.round = 0
        self.breaker = Breaker()
        self.last_end = Verdict(mode=Mode.END, reason=Reason.NONE)
        self._name = name
        self._depth = depth
        self._patience = patience
        self._has_service = has_service
        self._asks = dict.fromkeys(range(depth), True)  # of rounds that are not agreed on, as far as known
        self._learned: dict[int, LearnedSpeeds] = {}  # by which these rounds are planned; others: all ranks are equal
        self._fits: dict[int, Fit | None] = dict.fromkeys(range(depth))  # that a learned cost follows in them
        self._failure: BaseException | None = None
        self._moved = threading.Condition()

    def asks_now(self) -> bool:
        """Whether the round to be agreed on next asks the service."""
        return self._asks.get(self.round, False)

    def learned_for(self, round_number: int) -> LearnedSpeeds:
        """The speeds to plan a round by, which is not agreed on yet: those known `depth` rounds earlier, on all ranks.

        It must be known whether the round asks the service.
        """
        return self._learned.get(round_number, ALL_EQUAL)

    def enter(self, after: int) -> tuple[int, int]:
        """The pass that follows one that this rank has left or seen the end of, and its first round.

        Waits until that one has ended on all ranks.

        Args:
            after: Number of the pass before; -1 at first.

        Raises:
            BaseException: If an agreement has failed; its own error.
            TimeoutError: If the other ranks do not end theirs.
        """
        with self._moved:
            self._wait(lambda: self.pass_number > after, f"end of pass {after} on all ranks")
            return self.pass_number, self.round

    def asks(self, round_number: int, pass_number: int) -> bool:
        """Whether a round of a pass asks the service: the breaker's state `depth` rounds earlier, as on all ranks.

        Waits until that earlier round has been agreed on, or the pass has ended.

        Raises:
            BaseException: If an agreement has failed; its own error.
            TimeoutError: If the other ranks do not get there.
        """
        if not self._has_service:
            return False
        with self._moved:
            self._wait(
                lambda: round_number in self._asks or self.pass_number > pass_number,
                f"agreement on round {round_number - self._depth}",
            )
            return self.pass_number == pass_number and self._asks[round_number]

    def fit_for(self, round_number: int, pass_number: int) -> Fit | None:
        """The fit that a learned cost follows in a round: that of `depth` rounds earlier, as on all ranks.

        Waits until that earlier round has been agreed on, or the pass has ended.

        Raises:
            BaseException: If an agreement has failed; its own error.
            TimeoutError: If the other ranks do not get there.
        """
        with self._moved:
            self._wait(
                lambda: round_number in self._fits or self.pass_number > pass_number,
                f"agreement on round {round_number - self._depth}",
            )
            return self._fits.get(round_number)

    def move_on(
        self, verdict: Verdict, breaker: Breaker, learned: LearnedSpeeds = ALL_EQUAL, fit: Fit | None = None
    ) -> None:
        """To the next round, or the next pass.

        Args:
            verdict: What all ranks agreed on.
            breaker: After that.
            learned: What is known of the ranks' speeds after that.
            fit: And of a learned cost.
        """
        with self._moved:
            self.breaker = breaker
            self._asks.pop(self.round, None)
            self._learned.pop(self.round, None)
            self._fits.pop(self.round, None)
            if verdict.ends:
                # A rank may have submitted so many rounds more, whose numbers are not used again.
                self.pass_number += 1
                self.round += self._depth
                self._asks = dict.fromkeys(range(self.round, self.round + self._depth), breaker.closed)
                self._learned = dict.fromkeys(self._asks, learned)
                self._fits = dict.fromkeys(self._asks, fit)
                reason = Reason.TOO_FEW_SAMPLES if verdict.last else verdict.reason
                self.last_end = Verdict(mode=Mode.END, reason=reason, ranks=verdict.ranks, taken=verdict.taken)
            else:
                self._asks[self.round + self._depth] = breaker.closed
                self._learned[self.round + self._depth] = learned
                self._fits[self.round + self._depth] = fit
                self.round += 1
            self._moved.notify_all()

    def fail(self, error: BaseException) -> None:
        """Ends all waits with an error."""
        with self._moved:
            self._failure = error
            self._moved.notify_all()

    @property
    def failure(self) -> BaseException | None:
        """What ended the agreements."""
        return self._failure

    def _wait(self, come: Callable[[], bool], what: str) -> None:
        known = self._moved.wait_for(lambda: come() or self._failure is not None, self._patience)
        if self._failure is not None:
            raise self._failure
        if not known:
            raise TimeoutError(f"{self._name}: no {what}")
