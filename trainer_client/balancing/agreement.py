"""The agreement: from all ranks' votes to the one thing that every rank does.

`decide` is a pure function of the votes and of options that rank 0 broadcast. Every rank evaluates it on the same
votes, so no two ranks can differ. Why that is enough is argued in docs/agreement.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from trainer_client.balancing.options import Fallback
from trainer_client.balancing.votes import Held, Vote, batches_keep_their_sizes, checksums_cancel


class Mode(StrEnum):
    """What all ranks do with a round."""

    SERVICE = "service"  # move by the service's plan
    EMBEDDED = "embedded"  # gather the costs, partition on every rank alike, move
    IDENTITY = "identity"  # every sample stays at home
    SPREAD = "spread"  # every sample stays at home but those that ranks with too few need (min_samples)
    DROP = "drop"  # nobody trains the samples (drop_last)
    END = "end"  # the pass is over on all ranks: none has data left, or one has left its loop


class Reason(StrEnum):
    """Why a round did what it did."""

    NONE = "none"
    LEFT = "left"  # some rank has left its loop
    TOO_FEW_SAMPLES = "too_few_samples"  # for all ranks; the loader has drop_last
    NO_SERVICE = "no_service"  # the balancer is embedded or off
    BREAKER_OPEN = "breaker_open"
    NO_DECISION = "no_decision"  # some rank has none
    UNDECIDED = "undecided"  # the service answered that it could not decide
    SERVICE_IDENTITY = "service_identity"  # the service found no plan
    DECISIONS_DIFFER = "decisions_differ"
    TRANSFERS_DIFFER = "transfers_differ"  # digests agree, what ranks would send and receive does not
    INVALID_COSTS = "invalid_costs"
    PARTITION_FAILED = "partition_failed"
    RESUMED = "resumed"  # by the plan of before the job was stopped within the window
    COMPILING = "compiling"  # some rank's kernels are still being compiled


class ProgramOrderError(RuntimeError):
    """A program uses its loaders in an order that cannot be reconciled between the ranks."""


class SchemaMismatchError(ValueError):
    """Ranks hold batches of different schemas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The outcome of an agreement, the same on every rank.

    Attributes:
        mode: What all ranks do.
        reason: Why.
        ranks: The ranks that the reason is about.
        served: The service decided the round for all ranks alike.
        moved: Whether any sample moves; under `Mode.EMBEDDED` True until the plan is known.
        taken: With `Reason.LEFT`, how many batches the first of the ranks had got when it left.
        batches: The batches of the window that are trained; None: all.
        last: The pass ends with this round.
    """

    mode: Mode
    reason: Reason
    ranks: tuple[int, ...] = ()
    served: bool = False
    moved: bool = False
    taken: int = 0
    batches: tuple[int, ...] | None = None
    last: bool = False

    @property
    def ends(self) -> bool:
        """Whether the pass is over after this round."""
        return self.last or self.mode is Mode.END


def out_of_turn(rank: int) -> ProgramOrderError:
    """The error of all ranks when one has taken its batches in an order of its own."""
    return ProgramOrderError(
        f"rank {rank} redistributes a batch out of turn: redistribute the batches of a loader in the order in which "
        "they were submitted, each once, and leave a loop (Balancer.leave) before beginning it anew"
    )


def check_order(votes: Sequence[Vote]) -> None:
    """Checks what only a program error can break.

    Raises:
        ProgramOrderError: If a rank takes its batches in another order, or the ranks are in different rounds.
    """
    first = votes[0]
    for rank, vote in enumerate(votes):
        if vote.out_of_turn:
            raise out_of_turn(rank)
        if (vote.pass_number, vote.round) != (first.pass_number, first.round):
            raise ProgramOrderError(
                f"rank {rank} is in round {vote.round}, rank 0 in round {first.round}; use the balancers and loaders "
                "of a job in the same order on all ranks"
            )


def schemas_differ(votes: Sequence[Vote]) -> tuple[int, int] | None:
    """The first two ranks whose batches look different, if any; ranks without samples have no say."""
    holding = _ranks(votes, lambda vote: vote.samples > 0)
    for rank in holding[1:]:
        if votes[rank].schema != votes[holding[0]].schema:
            return holding[0], rank
    return None


def shared_values_differ(votes: Sequence[Vote]) -> bool:
    """Whether two ranks' first batches hold other shared values; ranks without samples have no say."""
    return len({vote.shared for vote in votes if vote.shared}) > 1


def teacher(votes: Sequence[Vote]) -> int | None:
    """The rank that tells those without samples what the round's batches look like; None if all of them know."""
    holding = _ranks(votes, lambda vote: vote.samples > 0)
    if not holding or all(vote.schema == votes[holding[0]].schema for vote in votes):
        return None
    return holding[0]


def decide(
    votes: Sequence[Vote],
    *,
    waited: bool,
    has_service: bool,
    balance: bool,
    fallback: Fallback,
    min_samples: int = 0,
    left: tuple[int, ...] | None = None,
) -> Verdict:
    """From the votes of all ranks to the round's outcome.

    Args:
        votes: One vote per rank, by rank.
        waited: The breaker was closed and the round had been asked; the same on all ranks.
        has_service: A service is configured; otherwise the ranks balance by themselves, whatever the fallback.
        balance: False when the balancer is off: every sample stays at home.
        fallback: What a round does that the service did not decide.
        min_samples: Of each rank at least, while a batch has as many for all.
        left: Batches that are left of a window that the ranks go on in, by the plan that they have; None: it is new.
    """
    if left is not None and not any(vote.left for vote in votes):
        return Verdict(mode=Mode.EMBEDDED, reason=Reason.RESUMED, moved=True, batches=left)
    verdict = _choose(votes, waited=waited, has_service=has_service, balance=balance, fallback=fallback)
    if verdict.mode is Mode.END or not (min_samples or any(vote.drop_last for vote in votes)):
        return verdict
    return spread(_drop(verdict, votes, max(1, min_samples) * len(votes)), votes, min_samples)


def spread(verdict: Verdict, votes: Sequence[Vote], min_samples: int) -> Verdict:
    """The verdict, or the one under which no rank has too few samples where every sample would stay at home."""
    if verdict.mode is not Mode.IDENTITY or not min_samples:
        return verdict
    for batch in range(_num_batches(votes)) if verdict.batches is None else verdict.batches:
        samples = [vote.of_batch(batch).samples for vote in votes]
        if min(samples) < min(min_samples, sum(samples) // len(votes)):
            return replace(verdict, mode=Mode.SPREAD, moved=True)
    return verdict


def _drop(verdict: Verdict, votes: Sequence[Vote], least: int) -> Verdict:
    """The verdict without batches that have too few samples; where some rank's data has ended, the pass ends there."""
    if not any(vote.drop_last for vote in votes):
        return verdict
    count = _num_batches(votes)
    enough: list[int] = []
    last = False
    for batch in range(count):
        if sum(vote.of_batch(batch).samples for vote in votes) >= least:
            enough.append(batch)
        elif any(vote.exhausted or vote.num_batches <= batch for vote in votes):
            last = True
            break
    if len(enough) == count:
        return verdict
    if enough:
        return replace(verdict, batches=tuple(enough), last=last)
    mode = Mode.END if last else Mode.DROP
    return Verdict(mode=mode, reason=Reason.TOO_FEW_SAMPLES, served=verdict.served, batches=(), last=last)


def _num_batches(votes: Sequence[Vote]) -> int:
    return max(1, *(vote.num_batches for vote in votes))


def _choose(votes: Sequence[Vote], *, waited: bool, has_service: bool, balance: bool, fallback: Fallback) -> Verdict:
    left = _ranks(votes, lambda vote: vote.left)
    if left:  # says nothing about the service, which may have waited for these ranks
        return Verdict(mode=Mode.END, reason=Reason.LEFT, ranks=left, taken=votes[left[0]].taken)
    if all(vote.exhausted for vote in votes) and not any(vote.samples for vote in votes):
        held = all(vote.held is not Held.NOTHING for vote in votes)  # a miss counts for the breaker here too
        return Verdict(mode=Mode.END, reason=Reason.NONE, served=waited and held)
    if not balance:
        return Verdict(mode=Mode.IDENTITY, reason=Reason.NO_SERVICE)
    without = _ranks(votes, lambda vote: vote.held is Held.NOTHING)
    served = waited and not without  # what follows says nothing against a service that has answered
    for reason, ranks in (
        (Reason.INVALID_COSTS, _ranks(votes, lambda vote: not vote.costs_valid)),
        (Reason.COMPILING, _ranks(votes, lambda vote: vote.compiling)),
    ):
        if ranks:
            return Verdict(mode=Mode.IDENTITY, reason=reason, ranks=ranks, served=served)
    if not has_service:
        return _fall_back("embedded", Reason.NO_SERVICE)  # there is nothing to fall back from
    if not waited:
        return _fall_back(fallback, Reason.BREAKER_OPEN)
    if without:
        return _fall_back(fallback, Reason.NO_DECISION, without)
    first = votes[0]
    differing = _ranks(votes, lambda vote: _decision(vote) != _decision(first))
    if differing:
        return _fall_back(fallback, Reason.DECISIONS_DIFFER, differing)
    if first.held is Held.UNDECIDED:
        return _fall_back(fallback, Reason.UNDECIDED, served=True)
    if first.held is Held.IDENTITY:
        return Verdict(mode=Mode.IDENTITY, reason=Reason.SERVICE_IDENTITY, served=True)
    if not (checksums_cancel(list(votes)) and batches_keep_their_sizes(list(votes))):
        return _fall_back(fallback, Reason.TRANSFERS_DIFFER)
    return Verdict(mode=Mode.SERVICE, reason=Reason.NONE, served=True, moved=first.moved > 0)


def _decision(vote: Vote) -> tuple[object, ...]:
    return vote.held, vote.instance, vote.digest, vote.moved


def _ranks(votes: Sequence[Vote], test: object) -> tuple[int, ...]:
    assert callable(test)
    return tuple(rank for rank, vote in enumerate(votes) if test(vote))


def _fall_back(fallback: Fallback, reason: Reason, ranks: tuple[int, ...] = (), *, served: bool = False) -> Verdict:
    embedded = fallback == "embedded"
    return Verdict(
        mode=Mode.EMBEDDED if embedded else Mode.IDENTITY, reason=reason, ranks=ranks, served=served, moved=embedded
    )
