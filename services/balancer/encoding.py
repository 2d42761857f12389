"""Answers as bytes of the wire: what `answers` builds as messages, put together from parts that all ranks share.

A message that holds a message is its tag, its length and its content; contents of one field that are concatenated are
merged. So the answer to a rank is a concatenation of its arrays' bytes with what is the same for all ranks.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenkeel.protocol import balancer_pb2 as pb
from services.balancer.answers import answer_message, balance_message
from services.balancer.decisions import Decision, Outcome, Plan
from services.balancer.refusals import Refusal


def answer_bytes(instance: int, round_number: int, rank: int, result: Decision | Refusal) -> bytes:
    """A `pb.Answer`, serialised: a round's outcome as one rank is told it."""
    if isinstance(result, Refusal) or result.plan is None or result.plan.window is not None:
        return answer_message(instance, round_number, rank, result).SerializeToString()
    plan = result.plan
    shared = _shared(instance, plan)
    begin, end = shared.home_begin[rank], shared.home_begin[rank + 1]
    first, last = shared.source_begin[rank], shared.source_begin[rank + 1]
    arrays = (
        shared.destinations[4 * begin : 4 * end],
        shared.sources[4 * first : 4 * last],
        shared.source_counts[4 * first : 4 * last],
        shared.source_totals[shared.row * first : shared.row * last],
    )
    decision = b"".join(
        (
            shared.head,
            _DESTINATIONS, _varint(len(arrays[0])), arrays[0],
            _SOURCES, _varint(len(arrays[1])), arrays[1],
            _SOURCE_COUNTS, _varint(len(arrays[2])), arrays[2],
            _SOURCE_TOTALS, _varint(len(arrays[3])), arrays[3],
            shared.balance,
            _OWN_LOADS.pack(_LOAD_BEFORE, shared.loads_before[rank], _LOAD_AFTER, shared.loads_after[rank]),
        )
    )  # fmt: skip
    return b"".join((_ROUND, _varint(round_number), _RANK, _varint(rank), _DECISION, _varint(len(decision)), decision))


def response_bytes(answer: bytes) -> bytes:
    """A `pb.BalanceResponse` of one serialised answer."""
    return b"".join((_ANSWER, _varint(len(answer)), answer))


def group_bytes(answers: Sequence[bytes]) -> bytes:
    """A `pb.BalanceResponse` of a group of serialised answers."""
    group = b"".join(part for answer in answers for part in (_MEMBER, _varint(len(answer)), answer))
    return b"".join((_GROUP, _varint(len(group)), group))


class _Shared(NamedTuple):
    """What all ranks of a plan are told alike, and the arrays that each is told a part of."""

    head: bytes
    balance: bytes
    loads_before: list[float]
    loads_after: list[float]
    home_begin: list[int]
    source_begin: list[int]
    destinations: memoryview
    sources: memoryview
    source_counts: memoryview
    source_totals: memoryview
    row: int  # bytes of one source's totals


@lru_cache(maxsize=4)
def _shared(instance: int, plan: Plan) -> _Shared:
    outcome = int(Outcome.BALANCED)
    head = pb.Decision(
        instance=instance,
        outcome=outcome,  # type: ignore[arg-type]
        digest=plan.digest,
        detail=plan.detail,
    ).SerializeToString()
    balance = balance_message(plan.summary).SerializeToString()
    slices = plan.slices
    return _Shared(
        head=head,
        balance=_BALANCE + _varint(len(balance) + _OWN_LOADS.size) + balance,
        loads_before=plan.loads_before.tolist(),
        loads_after=plan.loads_after.tolist(),
        home_begin=slices.home_begin.tolist(),
        source_begin=slices.source_begin.tolist(),
        destinations=_as_bytes(slices.destinations, "<i4"),
        sources=_as_bytes(slices.sources, "<i4"),
        source_counts=_as_bytes(slices.source_counts, "<i4"),
        source_totals=_as_bytes(slices.source_totals, "<i8"),
        row=8 * slices.source_totals.shape[1],
    )


def _as_bytes(array: NDArray[Any], dtype: str) -> memoryview:
    """The array's bytes on the wire, not copied; an empty array's memory cannot be cast."""
    return np.ascontiguousarray(array, dtype).data.cast("B") if array.size else memoryview(b"")


def _tag(message: type, field: str) -> bytes:
    descriptor = message.DESCRIPTOR.fields_by_name[field]  # type: ignore[attr-defined]
    kind = {descriptor.TYPE_MESSAGE: 2, descriptor.TYPE_BYTES: 2, descriptor.TYPE_DOUBLE: 1}.get(descriptor.type, 0)
    return _varint(descriptor.number << 3 | kind)


def _varint(value: int) -> bytes:
    if value < 128:
        return _SMALL[value]
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


_SMALL = [bytes((value,)) for value in range(128)]
_ROUND, _RANK, _DECISION = (_tag(pb.Answer, field) for field in ("round", "rank", "decision"))
_DESTINATIONS, _SOURCES, _SOURCE_COUNTS, _SOURCE_TOTALS, _BALANCE = (
    _tag(pb.Decision, field) for field in ("destinations", "sources", "source_counts", "source_totals", "balance")
)
_ANSWER, _GROUP = (_tag(pb.BalanceResponse, field) for field in ("answer", "answers"))
_MEMBER = _tag(pb.AnswerGroup, "answers")
_LOAD_BEFORE, _LOAD_AFTER = (_tag(pb.Balance, field)[0] for field in ("own_load_before", "own_load_after"))
_OWN_LOADS = struct.Struct("<BdBd")
