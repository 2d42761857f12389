"""What the balancer says, as messages of the wire; answers as bytes, put together from parts that all ranks share.

A message that holds a message is its tag, its length and its content; contents of one field that are concatenated are
merged. So the answer to a rank is a concatenation of its arrays' bytes with what is the same for all ranks.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import lru_cache
from itertools import pairwise
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar
from weakref import ref

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.rounds import FIGURES, Figures, RoundPlan
from evenkeel.partitioning.speeds import ALL_EQUAL
from evenkeel.protocol import balancer_pb2 as pb
from services.balancer.decisions import Decision, Outcome
from services.balancer.limits import Limits
from services.balancer.refusals import Refusal, shorten
from services.balancer.session import Session

T = TypeVar("T")


def answer_bytes(instance: int, round_number: int, rank: int, result: Decision | Refusal) -> bytes:
    """A `pb.Answer`, serialised: a round's outcome as one rank is told it."""
    if isinstance(result, Refusal):
        return pb.Answer(round=round_number, rank=rank, error=error_message(result)).SerializeToString()
    decision = identity_bytes(instance, result) if result.plan is None else _balanced(instance, rank, result.plan)
    return b"".join((_ROUND, varint(round_number), _RANK, varint(rank), _DECISION, varint(len(decision)), decision))


def response_bytes(answer: bytes) -> bytes:
    """A `pb.BalanceResponse` of one serialised answer."""
    return b"".join((_ANSWER, varint(len(answer)), answer))


def member_bytes(instance: int, round_number: int, rank: int, result: Decision | Refusal) -> bytes:
    """A rank's answer as a part of a group."""
    answer = answer_bytes(instance, round_number, rank, result)
    return b"".join((_MEMBER, varint(len(answer)), answer))


def group_bytes(members: Sequence[bytes]) -> bytes:
    """A `pb.BalanceResponse` of answers that are parts of a group."""
    group = b"".join(members)
    return b"".join((_GROUP, varint(len(group)), group))


def error_message(refusal: Refusal) -> pb.Error:
    """A refusal as the wire says it."""
    return pb.Error(
        code=int(refusal.code),  # type: ignore[arg-type]
        field=refusal.field,
        value=refusal.value,
        remedy=refusal.remedy,
        message=refusal.message,
        fatal=refusal.fatal,
    )


def limits_message(limits: Limits, max_message_bytes: int) -> pb.Limits:
    """What a client must keep to."""
    return pb.Limits(
        max_ranks=limits.max_ranks,
        max_samples_per_rank=limits.max_samples_per_rank,
        max_rounds_ahead=limits.max_rounds_ahead,
        max_message_bytes=max_message_bytes,
        max_sessions=limits.max_sessions,
    )


def statistics_message(session: Session, now: float, joined_ranks: int) -> pb.SessionStats:
    """What has become of a session's rounds."""
    statistics = session.statistics
    message = pb.SessionStats(
        job=session.id.key.job,
        group=session.id.key.group,
        loader=session.id.key.loader,
        run_id=session.id.run_id,
        restart_count=session.id.restart_count,
        world_size=session.terms.world_size,
        joined_ranks=joined_ranks,
        last_round=statistics.last_round,
        rounds_balanced=statistics.balanced,
        rounds_identity={reason.label: count for reason, count in statistics.identity.items()},
        seconds_since_last_message=max(0.0, now - session.last_message_at),
        mean_round_wait_seconds=statistics.mean_wait,
    )
    if statistics.last_balance is not None:
        figures, seconds, before, after = statistics.last_balance
        message.last_balance.CopyFrom(balance_message(figures, seconds))
        message.last_loads_before = before.astype("<f8").tobytes()
        message.last_loads_after = after.astype("<f8").tobytes()
    if statistics.last_learned != ALL_EQUAL:
        message.last_learned.CopyFrom(pb.LearnedSpeeds(**asdict(statistics.last_learned)))
    return message


def balance_message(figures: Figures, seconds: float) -> pb.Balance:
    """How even a round, or a batch of a window, is.

    Args:
        figures: How even the plan is.
        seconds: That its plan took.
    """
    return pb.Balance(partition_seconds=seconds, **dict(zip(FIGURES, _values(figures), strict=True)))


def identity_bytes(instance: int, decision: Decision) -> bytes:
    """A `pb.Decision`, serialised, of a round without a plan."""
    return pb.Decision(
        instance=instance,
        outcome=int(decision.outcome),  # type: ignore[arg-type]
        reason=int(decision.reason),  # type: ignore[arg-type]
        detail=shorten(decision.detail, 512),
        missing_ranks=decision.missing_ranks,
        digest=decision.digest,
    ).SerializeToString()


@lru_cache(maxsize=256)
def opening_bytes(instance: int, detail: str) -> bytes:
    """What a `pb.Decision` with a plan says that does not follow from the plan, serialised."""
    balanced = Outcome.BALANCED
    return pb.Decision(instance=instance, outcome=int(balanced), detail=detail).SerializeToString()  # type: ignore[arg-type]


def _balanced(instance: int, rank: int, plan: RoundPlan) -> bytes:
    shared = _shared(plan)
    begin, end = shared.home_begin[rank], shared.home_begin[rank + 1]
    first, last = shared.source_begin[rank * shared.num_batches], shared.source_begin[(rank + 1) * shared.num_batches]
    arrays = (
        shared.destinations[4 * begin : 4 * end],
        shared.sources[4 * first : 4 * last],
        shared.source_counts[4 * first : 4 * last],
        shared.source_totals[shared.row * first : shared.row * last],
    )
    steps = b"" if shared.steps is None else _batches(shared, rank)
    cuts = b"" if plan.parts is None else as_bytes(plan.parts.further_of(rank, plan.slices), "<i8")
    return b"".join(
        (
            opening_bytes(instance, plan.detail),
            shared.head,
            _DESTINATIONS, varint(len(arrays[0])), arrays[0],
            _SOURCES, varint(len(arrays[1])), arrays[1],
            _SOURCE_COUNTS, varint(len(arrays[2])), arrays[2],
            _SOURCE_TOTALS, varint(len(arrays[3])), arrays[3],
            shared.balance,
            _OWN_LOADS.pack(_LOAD_BEFORE, shared.own_before[rank], _LOAD_AFTER, shared.own_after[rank]),
            steps,
            *((_CUTS, varint(len(cuts)), cuts) if cuts else ()),
        )
    )  # fmt: skip


def _batches(shared: _Shared, rank: int) -> bytes:
    """What a rank is told of the batches of a window of several."""
    assert shared.steps is not None
    begin, end, count = shared.home_begin[rank], shared.home_begin[rank + 1], shared.num_batches
    ends = shared.source_begin[rank * count : (rank + 1) * count + 1]
    groups = b"".join(varint(till - since) for since, till in pairwise(ends))
    parts: list[bytes | memoryview] = [
        _DESTINATION_STEPS,
        varint(4 * (end - begin)),
        shared.steps[4 * begin : 4 * end],
    ]
    parts += (_SOURCE_GROUPS, varint(len(groups)), groups)
    for balance, before, after in zip(shared.batches, shared.loads_before, shared.loads_after, strict=True):
        parts += (balance, _OWN_LOADS.pack(_LOAD_BEFORE, before[rank], _LOAD_AFTER, after[rank]))
    return b"".join(parts)


def of_latest_plans(make: Callable[[RoundPlan], T]) -> Callable[[RoundPlan], T]:
    """Keeps what a function makes of the latest plans; of one that nobody remembers any more, nothing."""
    kept: dict[ref[RoundPlan], T] = {}

    def forget(gone: ref[RoundPlan]) -> None:
        kept.pop(gone, None)

    def find(plan: RoundPlan) -> T:
        found = kept.get(ref(plan))
        if found is None:
            made = make(plan)
            if len(kept) >= _LATEST_PLANS:
                forget(next(iter(kept)))
            found = kept[ref(plan, forget)] = made
        return found

    return find


class _Shared(NamedTuple):
    """What all ranks of a plan are told alike, and the arrays that each is told a part of."""

    head: bytes
    balance: bytes  # of the round; the rank's own loads follow
    batches: list[bytes]  # the same of each batch of a window
    num_batches: int
    own_before: list[float]  # by rank, in the least even batch
    own_after: list[float]
    loads_before: list[list[float]]  # by batch of a window, and rank
    loads_after: list[list[float]]
    home_begin: list[int]
    source_begin: list[int]
    destinations: memoryview
    steps: memoryview | None
    sources: memoryview
    source_counts: memoryview
    source_totals: memoryview
    row: int  # bytes of one source's totals


@of_latest_plans
def _shared(plan: RoundPlan) -> _Shared:
    pieces = b"" if plan.parts is None else bytes(as_bytes(plan.parts.pieces, "<i8"))
    head = pb.Decision(digest=plan.digest, pieces=pieces).SerializeToString()
    slices = plan.slices
    windowed = slices.steps is not None
    return _Shared(
        head=head,
        balance=_open_balance(_BALANCE, plan.figures, plan.seconds),
        batches=[_open_balance(_BATCH_BALANCES, figures, plan.seconds) for figures in plan.batches] if windowed else [],
        num_batches=slices.num_batches,
        own_before=plan.loads_before[plan.worst].tolist(),
        own_after=plan.loads_after[plan.worst].tolist(),
        loads_before=plan.loads_before.tolist() if windowed else [],
        loads_after=plan.loads_after.tolist() if windowed else [],
        home_begin=slices.home_begin.tolist(),
        source_begin=slices.source_begin.tolist(),
        destinations=as_bytes(slices.destinations, "<i4"),
        steps=None if slices.steps is None else as_bytes(slices.steps, "<i4"),
        sources=as_bytes(slices.sources, "<i4"),
        source_counts=as_bytes(slices.source_counts, "<i4"),
        source_totals=as_bytes(slices.source_totals, "<i8"),
        row=8 * slices.source_totals.shape[1],
    )


def _open_balance(tag: bytes, figures: Figures, seconds: float) -> bytes:
    """A balance to which a rank's own loads are still to be added."""
    balance = balance_message(figures, seconds).SerializeToString()
    return tag + varint(len(balance) + _OWN_LOADS.size) + balance


def as_bytes(array: NDArray[Any], dtype: str) -> memoryview:
    """The array's bytes on the wire, not copied; an empty array's memory cannot be cast."""
    return np.ascontiguousarray(array, dtype).data.cast("B") if array.size else memoryview(b"")


def tag_of(message: type, field: str) -> bytes:
    """What stands before a field's content: also before its length, where it has one."""
    descriptor = message.DESCRIPTOR.fields_by_name[field]  # type: ignore[attr-defined]
    kind = {descriptor.TYPE_MESSAGE: 2, descriptor.TYPE_BYTES: 2, descriptor.TYPE_DOUBLE: 1}.get(descriptor.type, 0)
    return varint(descriptor.number << 3 | kind)


def varint(value: int) -> bytes:
    """A number as protocol buffers write it."""
    if value < 128:
        return _SMALL[value]
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


_LATEST_PLANS = 4
_values = attrgetter(*FIGURES)
_SMALL = [bytes((value,)) for value in range(128)]
_ROUND, _RANK, _DECISION = (tag_of(pb.Answer, field) for field in ("round", "rank", "decision"))
_DESTINATIONS, _DESTINATION_STEPS, _SOURCES, _SOURCE_COUNTS, _SOURCE_TOTALS, _BALANCE, _BATCH_BALANCES = (
    tag_of(pb.Decision, field)
    for field in (
        "destinations", "destination_steps", "sources", "source_counts", "source_totals", "balance", "batch_balances"
    )
)  # fmt: skip
_CUTS = tag_of(pb.Decision, "cuts")
_SOURCE_GROUPS = varint(pb.Decision.DESCRIPTOR.fields_by_name["source_groups"].number << 3 | 2)  # packed
_ANSWER, _GROUP = (tag_of(pb.BalanceResponse, field) for field in ("answer", "answers"))
_MEMBER = tag_of(pb.AnswerGroup, "answers")
_LOAD_BEFORE, _LOAD_AFTER = (tag_of(pb.Balance, field)[0] for field in ("own_load_before", "own_load_after"))
_OWN_LOADS = struct.Struct("<BdBd")
