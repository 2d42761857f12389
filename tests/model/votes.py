"""What the ranks may vote in a round, and what follows from it: the real `decide`, `Vote`, checksums and breaker."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from services.balancer.decisions import Outcome
from tests.model.sessions import Said, Sessions, plan_of
from trainer_client.balancing.agreement import Mode, check_order, decide
from trainer_client.balancing.breaker import Breaker
from trainer_client.balancing.votes import Held, Vote, transfer_checksum

Held_ = tuple[int, Said]
"""What a rank was told of a round: the instance, and the decision."""


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank between two agreements.

    Attributes:
        round: The round that its worker is at.
        breaker: After the round before.
        asks: Whether each round that is submitted and not agreed on asks the service, from `round` on.
    """

    round: int
    breaker: Breaker
    asks: tuple[bool, ...]

    @property
    def waits(self) -> bool:
        return self.asks[0] and self.breaker.closed


class Agreements:
    """From what the ranks were told to what they do next.

    Attributes:
        ranks: States of a rank, by number; all ranks are always in the same one, which `after` asserts.
        verdicts: (round, mode, reason) that occurred.
    """

    def __init__(self, sessions: Sessions, *, ranks: int, rounds: int, depth: int) -> None:
        self._sessions = sessions
        self._num_ranks, self._rounds, self._depth = ranks, rounds, depth
        self.ranks = [Rank(0, Breaker(), (True,) * min(depth, rounds))]
        self._numbers = {self.ranks[0]: 0}
        self._known: dict[tuple[int, tuple[tuple[Held_, ...], ...]], tuple[tuple[str, int], ...]] = {}
        self._votes: dict[tuple[int, int, bool, Held_ | None], Vote] = {}
        self.verdicts: set[tuple[int, Mode, str]] = set()

    def after(self, number: int, told: tuple[tuple[Held_, ...], ...]) -> tuple[tuple[str, int], ...]:
        """Every way in which the round may end: (what the ranks hold, number of the rank's next state), each next once.

        Args:
            number: Of the ranks' state.
            told: What each rank was told of the round, and may hold or have missed.
        """
        known = self._known.get((number, told))
        if known is None:
            found: dict[int, str] = {}
            for votes in itertools.product(*(self._may_vote(number, at, said) for at, said in enumerate(told))):
                holding = ", ".join(f"{vote.held.name} of {vote.instance}" for vote in votes)
                found.setdefault(self._agree(self.ranks[number], votes), f"the ranks hold {holding}")
            known = self._known[number, told] = tuple((label, after) for after, label in found.items())
        return known

    # ------------------------------------------------------------------ inside

    def _may_vote(self, number: int, at: int, told: tuple[Held_, ...]) -> Iterator[Vote]:
        rank = self.ranks[number]
        nothing = self._vote(at, rank.round, rank.asks[0], None)
        yield nothing  # no answer in time, or none waited for
        if rank.waits:
            for said in told:
                yield self._vote(at, rank.round, rank.asks[0], said)
        elif not rank.breaker.closed:
            yield replace(nothing, ready=False)

    def _vote(self, at: int, number: int, asked: bool, said: Held_ | None) -> Vote:
        known = self._votes.get((at, number, asked, said))
        if known is None:
            samples = self._sessions.submissions[at, number].num_samples
            known = Vote(round=number, samples=samples, asked=asked, ready=True)
            if said is not None:
                known = self._holding(known, at, *said)
            self._votes[at, number, asked, said] = known
        return known

    def _holding(self, vote: Vote, at: int, instance: int, decision: Said) -> Vote:
        outcome, what, _ = decision
        if outcome != Outcome.BALANCED.name:
            return replace(vote, held=Held.UNDECIDED, instance=instance, digest=self._digest(decision))
        plan = plan_of(self._sessions.inputs(vote.round))
        assert what == plan.digest.hex()
        lengths = self._sessions.submissions[at, vote.round].samples.lengths.astype(np.int64)
        return replace(
            vote,
            held=Held.BALANCED,
            instance=instance,
            digest=int.from_bytes(plan.digest[:8], "little"),
            moved=plan.figures.moved_samples,
            checksum=transfer_checksum(plan.slices[at], lengths),
        )

    def _digest(self, decision: Said) -> int:
        return int.from_bytes(repr(decision).encode()[-8:], "little")

    def _agree(self, rank: Rank, votes: tuple[Vote, ...]) -> int:
        """What `RoundWorker` does after the all-gather, on each rank with its own breaker."""
        check_order(votes)
        verdicts = [
            decide(votes, waited=rank.waits, has_service=True, balance=True, fallback="embedded")
            for _ in range(self._num_ranks)
        ]
        verdict = verdicts[0]
        assert len(set(verdicts)) == 1, f"ranks differ: {verdicts}"
        self.verdicts.add((rank.round, verdict.mode, verdict.reason.value))
        if verdict.mode is Mode.SERVICE:
            assert {vote.held for vote in votes} == {Held.BALANCED}
            assert len({(vote.instance, vote.digest) for vote in votes}) == 1
        breaker = rank.breaker.after(
            rank.round, waited=rank.waits, served=verdict.served, all_ready=all(vote.ready for vote in votes)
        )
        if rank.waits and any(vote.held is Held.NOTHING for vote in votes):
            assert not breaker.closed, "a miss must open the breaker"
        ahead = rank.round + self._depth < self._rounds
        following = Rank(rank.round + 1, breaker, (*rank.asks[1:], *([breaker.closed] if ahead else [])) or (False,))
        number = self._numbers.get(following)
        if number is None:
            number = self._numbers[following] = len(self.ranks)
            self.ranks.append(following)
        return number
