"""What several ranks are told of a round: pieces of arrays that are laid out once for all ranks of a plan."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.rounds import RoundPlan
from evenkeel.protocol import balancer_pb2 as pb
from services.balancer.decisions import Decision, Outcome
from services.balancer.encoding import as_bytes, balance_message, identity_bytes, of_latest_plans, tag_of, varint
from services.balancer.submissions import runs_of


class _Column(NamedTuple):
    """An array of which each rank is told a part, one rank after another."""

    tag: bytes
    data: bytes
    width: int  # bytes of an element
    begins: Sequence[int]  # element with which each rank's part begins, and the end


class _Told(NamedTuple):
    """All that ranks are told of a plan."""

    head: bytes  # of the decision
    arrays: list[_Column]  # of the decision
    beside: list[_Column]
    num_fields: bytes


def node_bytes(instance: int, round_number: int, ranks: tuple[int, ...], decision: Decision) -> bytes:
    """A `pb.AnswerNode` as a part of a group, serialised.

    Args:
        instance: The balancer's.
        round_number: The round.
        ranks: Whose answer it is.
        decision: The round's.
    """
    named = struct.pack(f"<{len(ranks)}I", *ranks)
    parts: list[bytes | memoryview] = [_ROUND, varint(round_number), _RANKS, varint(len(named)), named]
    if decision.plan is None:
        content = identity_bytes(instance, decision)
        parts += (_DECISION, varint(len(content)), content)
    else:
        told = _told(instance, decision.plan)
        runs = [(ranks[begin], ranks[end - 1] + 1) for begin, end in runs_of(ranks)]
        own = _cut(told.arrays, runs)
        parts += (_DECISION, varint(len(told.head) + sum(map(len, own))), told.head, *own)
        parts += _cut(told.beside, runs)
        parts.append(told.num_fields)
    return b"".join((_NODE, varint(sum(map(len, parts))), *parts))


def _cut(columns: list[_Column], runs: list[tuple[int, int]]) -> list[bytes | memoryview]:
    """The fields with the parts of ranks: of those from begin to before end, for each such pair."""
    parts: list[bytes | memoryview] = []
    first, last = runs[0]
    for tag, data, width, begins in columns:
        piece: bytes | memoryview = data[width * begins[first] : width * begins[last]]
        if len(runs) > 1:
            piece = b"".join(data[width * begins[begin] : width * begins[end]] for begin, end in runs)
        if piece:
            parts += (tag, varint(len(piece)), piece)
    return parts


@of_latest_plans
def _told(instance: int, plan: RoundPlan) -> _Told:
    slices, parts, windowed = plan.slices, plan.parts, plan.slices.steps is not None
    decision = pb.Decision(
        instance=instance,
        outcome=int(Outcome.BALANCED),  # type: ignore[arg-type]
        digest=plan.digest,
        detail=plan.detail,
        pieces=b"" if parts is None else bytes(as_bytes(parts.pieces, "<i8")),
        balance=balance_message(plan.figures, plan.seconds),
        batch_balances=[balance_message(figures, plan.seconds) for figures in plan.batches] if windowed else (),
    )
    num_ranks, batches, totals = len(slices), slices.num_batches, slices.source_totals
    ranks, homes, last = range(num_ranks + 1), slices.home_begin.tolist(), num_ranks - 1
    sources = slices.source_begin[::batches].tolist()
    arrays = [
        _narrow(_DESTINATIONS, slices.destinations, homes, last),
        _narrow(_SOURCES, slices.sources, sources, last),
        _narrow(_SOURCE_COUNTS, slices.source_counts, sources),
        _narrow(_SOURCE_TOTALS, totals, sources),
    ]
    shown = [plan.worst, *(range(batches) if windowed else ())]
    loads = np.array((plan.loads_before, plan.loads_after))[:, shown].T
    beside = [
        _column(_NUM_PARTS, _steps(slices.home_begin), _U4, ranks),
        _column(_NUM_SOURCES, _steps(slices.source_begin).reshape(num_ranks, batches), _U4, ranks),
        _column(_LOADS, loads.reshape(num_ranks, -1), _F8, ranks),
    ]
    if slices.steps is not None:
        arrays.append(_narrow(_DESTINATION_STEPS, slices.steps, homes))
    if parts is not None:
        further = parts.begins > 0
        cuts = np.concatenate(([0], np.cumsum(further)))[slices.home_begin]
        rows = np.stack([parts.samples[further], parts.begins[further]], axis=1)
        arrays.append(_column(_CUTS, rows, _I8, cuts.tolist()))
        beside.append(_column(_NUM_CUTS, _steps(cuts), _U4, ranks))
    return _Told(decision.SerializeToString(), arrays, beside, _NUM_FIELDS + varint(totals.shape[1]))


def _narrow(tag: bytes, array: NDArray[Any], begins: Sequence[int], most: int | None = None) -> _Column:
    """A field of the decision in the narrowest type that holds it, or `most`, where that is known."""
    if most is None:
        most = int(np.maximum.reduce(array, axis=None)) if array.size else 0
    dtype = _U1 if most < 1 << 8 else _U2 if most < 1 << 16 else _U4 if most < 1 << 32 else _I8
    return _column(tag, array, dtype, begins)


def _column(tag: bytes, array: NDArray[Any], dtype: np.dtype[Any], begins: Sequence[int]) -> _Column:
    width = dtype.itemsize * (array.shape[1] if array.ndim == 2 else 1)
    return _Column(tag, array.astype(dtype, copy=False).tobytes(), width, begins)


def _steps(array: NDArray[np.int64]) -> NDArray[np.int64]:
    """`np.diff`, which takes ten times as long for a few numbers."""
    return array[1:] - array[:-1]


_U1, _U2, _U4, _I8, _F8 = map(np.dtype, ("<u1", "<u2", "<u4", "<i8", "<f8"))


_NODE = tag_of(pb.AnswerGroup, "nodes")
_ROUND, _RANKS, _DECISION, _NUM_PARTS, _NUM_SOURCES, _NUM_CUTS, _LOADS, _NUM_FIELDS = (
    tag_of(pb.AnswerNode, field)
    for field in ("round", "ranks", "decision", "num_parts", "num_sources", "num_cuts", "loads", "num_fields")
)
_DESTINATIONS, _DESTINATION_STEPS, _SOURCES, _SOURCE_COUNTS, _SOURCE_TOTALS, _CUTS = (
    tag_of(pb.Decision, field)
    for field in ("destinations", "destination_steps", "sources", "source_counts", "source_totals", "cuts")
)
