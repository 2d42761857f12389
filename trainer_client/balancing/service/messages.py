"""Between numpy arrays and the messages of wire version 1."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from evenkeel import __version__
from evenkeel.partitioning.parts import PIECE_WIDTH, check_further, read_parts, read_splits
from evenkeel.partitioning.rounds import FIGURES, Figures, RankPlan, RoundOptions
from evenkeel.partitioning.samples import Lengths, RankSamples
from evenkeel.partitioning.slices import Slice
from evenkeel.partitioning.speeds import ALL_EQUAL, LearnedSpeeds
from evenkeel.partitioning.splits import Cuts, SplitSample, check_splits
from evenkeel.protocol import balancer_pb2 as pb
from trainer_client.balancing.agreement import Mode, Reason, Verdict

if TYPE_CHECKING:  # it opens streams
    from trainer_client.balancing.opening import SessionName

PROTOCOL_VERSIONS = (1,)

_COUNTS = {"equal": pb.COUNTS_EQUAL, "free": pb.COUNTS_FREE}
_KINDS = {"dense": pb.Field.KIND_DENSE, "jagged": pb.Field.KIND_JAGGED, "shared": pb.Field.KIND_SHARED}

# Reasons for which balancing on the ranks would fail as it failed on the service. What ended a process there would end
# a rank here, and what took too long there would hold up training here.
_FINAL_REASONS = frozenset(
    {
        pb.Decision.REASON_NOT_FOUND,
        pb.Decision.REASON_PARTITION_FAILED,
        pb.Decision.REASON_WORKER_STUCK,
        pb.Decision.REASON_WORKER_DIED,
        pb.Decision.REASON_TOO_COSTLY,
        pb.Decision.REASON_QUARANTINED,
    }
)


# Verdicts that follow what the service has answered, or that it has no decision to follow, unless the ranks plan then.
_FOLLOWED = frozenset({Reason.NONE, Reason.SERVICE_IDENTITY, Reason.UNDECIDED})
_UNFOLLOWED = {
    Reason.INVALID_COSTS: pb.Decision.REASON_INVALID_COSTS,
    Reason.COMPILING: pb.Decision.REASON_COMPILING,
    Reason.NO_DECISION: pb.Decision.REASON_NO_DECISION,
    Reason.BREAKER_OPEN: pb.Decision.REASON_BREAKER_OPEN,
    Reason.DECISIONS_DIFFER: pb.Decision.REASON_DECISIONS_DIFFER,
    Reason.TRANSFERS_DIFFER: pb.Decision.REASON_TRANSFERS_DIFFER,
}
_MOST_NAMED = 32


class MalformedAnswerError(ValueError):
    """The service's answer contradicts itself or the submission."""


class VersionError(ValueError):
    """The service answers in a version of the wire that this client does not speak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceDecision:
    """A decision of the service as one rank sees it.

    Attributes:
        instance: The balancer's incarnation.
        final: For IDENTITY: no other way of balancing would find a plan either.
        reason: Readable reason of an IDENTITY.
        digest: 64 bits of the digest of the whole plan, and of the pieces that all ranks must have got alike.
        plan: What the rank is told of the plan; None for IDENTITY.
    """

    instance: int
    final: bool
    reason: str
    digest: int
    plan: RankPlan | None

    @property
    def moved_samples(self) -> int:
        """Samples that change rank, over all ranks and batches."""
        return 0 if self.plan is None else self.plan.moved_samples


def join_request(
    session: SessionName,
    *,
    world_size: int,
    rank: int,
    node: str,
    options: RoundOptions,
    schema_hash: bytes,
    schema_fields: Iterable[tuple[str, str, str, tuple[int, ...]]],
    roles: Sequence[int] = (),
    window: int = 1,
) -> pb.Join:
    """The first message of a stream.

    Args:
        session: What all ranks call themselves.
        world_size: How many they are.
        rank: Who speaks.
        node: Its host.
        options: How to partition.
        schema_hash: Of the batch's fields.
        schema_fields: (path, dtype, kind, shape of one value) of each field of the batch.
        roles: Of the jagged fields, what each is to a sample in parts; empty where none is split.
        window: Batches of a round.
    """
    split = options.split
    return pb.Join(
        protocol_versions=PROTOCOL_VERSIONS,
        job=session.job,
        group=session.group,
        loader=session.loader,
        run_id=session.run_id,
        restart_count=session.restart_count,
        opening=session.opening,
        world_size=world_size,
        rank=rank,
        node=node,
        window=window,
        options=pb.PartitionOptions(
            strategy=options.strategy,
            counts=_COUNTS[options.counts],
            tolerance=options.tolerance,
            move_price=options.move_price,
            speeds=_f64(options.speeds),
            memory_caps=_f64(options.memory_caps),
            min_samples=options.min_samples,
            split=None if split is None else pb.Split(**asdict(split)),
        ),
        schema=pb.Schema(
            hash=schema_hash,
            fields=[
                pb.Field(path=path, dtype=dtype, kind=_KINDS[kind], shape=shape)
                for path, dtype, kind, shape in schema_fields
            ],
            roles=() if split is None else roles,
        ),
        client_version=__version__,
    )


def check_version(joined: pb.Joined) -> None:
    """Checks that the service has chosen a version that this client speaks.

    Raises:
        VersionError: If not; the message names both sides' versions.
    """
    if joined.protocol_version not in PROTOCOL_VERSIONS:
        spoken = ", ".join(map(str, PROTOCOL_VERSIONS))
        raise VersionError(
            f"the balancer ({joined.server_version or 'unknown version'}) answers in protocol version "
            f"{joined.protocol_version}, this client speaks {spoken}: upgrade whichever is older"
        )


def submit_request(
    round_number: int,
    rank: int,
    samples: RankSamples,
    *,
    exhausted: bool,
    timeout_ms: int,
    traceparent: str = "",
    learned: LearnedSpeeds = ALL_EQUAL,
) -> pb.Submit:
    """One rank's part in a round."""
    costs, memory = samples.costs, samples.memory
    message = pb.Submit(
        round=round_number,
        num_samples=len(samples),
        memory=b"" if memory is None else memory.astype("<f8").tobytes(),
        sizes=samples.moving_sizes.astype("<i8").tobytes(),
        lengths=samples.lengths.astype("<u4").tobytes(),
        batch_sizes=samples.batch_sizes if len(samples.batch_sizes) > 1 else (),
        exhausted=exhausted,
        timeout_ms=timeout_ms,
        rank=rank,
        traceparent=traceparent,
        divisible=b"" if samples.divisible is None else samples.divisible.astype("<f8").tobytes(),
    )
    if learned != ALL_EQUAL and rank == 0:  # all ranks know the same
        message.learned.CopyFrom(_learned_message(learned))
    if costs.dtype == np.float64:
        message.costs_f64 = costs.astype("<f8").tobytes()
    else:
        message.costs_i64 = costs.astype("<i8").tobytes()
    return message


def unfollowed(round_number: int, verdict: Verdict) -> pb.Unfollowed | None:
    """That the ranks did not follow the service in a round, and why; None if they did."""
    if verdict.mode in (Mode.END, Mode.DROP):
        return not_trained(round_number)
    by_ranks = verdict.mode is Mode.EMBEDDED
    if verdict.reason in _FOLLOWED and not by_ranks:
        return None
    reason = _UNFOLLOWED.get(verdict.reason, pb.Decision.REASON_NOT_FOLLOWED)
    return pb.Unfollowed(round=round_number, reason=reason, ranks=verdict.ranks[:_MOST_NAMED], by_ranks=by_ranks)


def not_trained(round_number: int) -> pb.Unfollowed:
    """That nobody has trained a round."""
    return pb.Unfollowed(round=round_number, reason=pb.Decision.REASON_NOT_TRAINED)


@lru_cache(maxsize=4)  # what is learned changes seldom, and may be of hundreds of ranks
def _learned_message(learned: LearnedSpeeds) -> pb.LearnedSpeeds:
    return pb.LearnedSpeeds(**asdict(learned))


def read_decision(
    decision: pb.Decision,
    *,
    rank: int,
    world_size: int,
    lengths: Lengths,
    window: int = 1,
) -> ServiceDecision:
    """Reads and checks a decision.

    Args:
        decision: The message.
        rank: This rank.
        world_size: Ranks of the session.
        lengths: (samples, jagged fields) as submitted.
        window: Batches of the round.

    Raises:
        MalformedAnswerError: If an array has a wrong length or a value out of range.
    """
    balanced = decision.outcome == pb.Decision.OUTCOME_BALANCED
    if not balanced and decision.outcome != pb.Decision.OUTCOME_IDENTITY:
        raise MalformedAnswerError(f"outcome is {decision.outcome}, neither BALANCED nor IDENTITY")
    known = pb.Decision.Reason.DESCRIPTOR.values_by_number.get(decision.reason)  # a newer service may know more
    reason = known.name.removeprefix("REASON_").lower() if known is not None else f"reason {decision.reason}"
    return ServiceDecision(
        instance=decision.instance,
        final=decision.reason in _FINAL_REASONS,
        reason=f"{reason}: {decision.detail}" if decision.detail else reason,
        digest=_named(decision.digest, decision.pieces),
        plan=_read_plan(decision, rank, world_size, lengths.shape, window) if balanced else None,
    )


def _read_plan(decision: pb.Decision, rank: int, world_size: int, shape: tuple[int, ...], window: int) -> RankPlan:
    num_samples, num_fields = shape
    further = _array("cuts", decision.cuts, "<i8", None)
    pieces = _array("pieces", decision.pieces, "<i8", None)
    if further.size % 2 or pieces.size % PIECE_WIDTH:
        raise MalformedAnswerError(f"cuts or pieces have rows of other lengths than 2 and {PIECE_WIDTH}")
    further, pieces = further.reshape(-1, 2), pieces.reshape(-1, PIECE_WIDTH)
    if not check_further(further, num_samples):
        raise MalformedAnswerError(f"cuts are not of parts of {num_samples} samples, ascending")
    num_parts = num_samples + len(further)
    destinations = _array("destinations", decision.destinations, "<i4", num_parts)
    sources = _array("sources", decision.sources, "<i4", None)
    counts = _array("source_counts", decision.source_counts, "<i4", len(sources))
    totals = _array("source_totals", decision.source_totals, "<i8", len(sources) * num_fields)
    totals = totals.reshape(len(sources), num_fields)
    for field, values in (("destinations", destinations), ("sources", sources)):
        if len(values) and not (int(values.min()) >= 0 and int(values.max()) < world_size):
            raise MalformedAnswerError(f"{field} names a rank outside 0..{world_size - 1}")
    if np.any(counts <= 0) or np.any(totals < 0):
        raise MalformedAnswerError("source_counts or source_totals hold values out of range")
    # A round of one batch says nothing about batches.
    steps = _array("destination_steps", decision.destination_steps, "<i4", num_parts) if window > 1 else None
    if steps is not None and len(steps) and not (int(steps.min()) >= 0 and int(steps.max()) < window):
        raise MalformedAnswerError(f"destination_steps names a batch outside 0..{window - 1}")
    groups = list(decision.source_groups) if window > 1 else [len(sources)]
    balances = list(decision.batch_balances) if window > 1 else [decision.balance]
    if len(groups) != window or sum(groups) != len(sources) or len(balances) != window:
        raise MalformedAnswerError(
            f"source_groups {groups[:16]} and {len(balances)} batch_balances do not fit a window of "
            f"{window} batches with {len(sources)} sources"
        )
    slices, begin = [], 0
    for batch, size in enumerate(groups):
        received = slice(begin, begin + size)
        begin += size
        if np.any(np.diff(sources[received]) <= 0):
            raise MalformedAnswerError("sources are not ascending")
        slices.append(
            Slice(
                rank=rank,
                destinations=destinations if steps is None else destinations[steps == batch],
                sources=sources[received],
                source_counts=counts[received],
                source_totals=totals[received],
            )
        )
    cuts: tuple[Cuts | None, ...] = ()
    splits: tuple[tuple[SplitSample, ...], ...] = ()
    if len(pieces) or len(further):
        steps, cuts = read_parts(further, num_samples, steps, window)
        splits = read_splits(pieces, window)
        for of_batch in splits:
            check_splits(of_batch, world_size)
    return RankPlan(
        steps=steps,
        slices=tuple(slices),
        cuts=cuts,
        splits=splits,
        figures=tuple(Figures(**{name: getattr(balance, name) for name in FIGURES}) for balance in balances),
        loads=tuple(balance.own_load_after for balance in balances),
        seconds=decision.balance.partition_seconds,
    )


def _array(field: str, data: bytes, dtype: str, length: int | None) -> NDArray[Any]:
    """In memory of its own: kernels are compiled for arrays that can be written to, unlike those of a message."""
    width = int(dtype[-1])
    if len(data) % width or (length is not None and len(data) != length * width):
        raise MalformedAnswerError(f"{field} has {len(data)} bytes, not {length} values of {width} bytes")
    return np.frombuffer(data, dtype=dtype).copy()


def _named(digest: bytes, pieces: bytes) -> int:
    """64 bits of a digest; with pieces, also of these, which no checksum of what moves would tell to be others."""
    if pieces:
        digest = hashlib.sha256(digest + pieces, usedforsecurity=False).digest()
    return int.from_bytes(digest[:8], "little")


def _f64(values: Sequence[float]) -> bytes:
    return np.asarray(values, dtype="<f8").tobytes()
