"""What several ranks are told of a round: pieces of arrays that are laid out once for all ranks of a plan."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.rounds import RoundPlan
from evenkeel.protocol import balancer_pb2 as pb
from services.balancer.decisions import Decision
from services.balancer.encoding import (
    as_bytes,
    balance_message,
    identity_bytes,
    of_latest_plans,
    opening_bytes,
    tag_of,
    varint,
)
from services.balancer.submissions import runs_of


class _Column(NamedTuple):
    """An array of which each rank is told a part, one rank after another."""

    tag: bytes
    data: bytes
    width: int  # bytes of an element
    begins: Sequence[int]  # element with which each rank's part begins, and the end


class _Laid(NamedTuple):
    """All that ranks are told of a plan."""

    head: bytes  # of the decision
    arrays: list[_Column]  # of the decision
    beside: list[_Column]
    num_fields: bytes


Told = tuple[bytes, bytes]
"""What ranks are told of a plan: in the decision after its opening, and beside the decision."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ToldPlan(RoundPlan):
    """A plan with what ranks are told of it.

    Attributes:
        told: By those who are told together.
    """

    told: Mapping[tuple[int, ...], Told]

    @property
    def nbytes(self) -> int:
        """Memory of its arrays, and of what is told."""
        return super().nbytes + sum(len(inside) + len(beside) for inside, beside in self.told.values())


def node_bytes(instance: int, round_number: int, ranks: tuple[int, ...], decision: Decision) -> bytes:
    """A `pb.AnswerNode` as a part of a group, serialised.

    Args:
        instance: The balancer's.
        round_number: The round.
        ranks: Whose answer it is.
        decision: The round's.
    """
    plan = decision.plan
    if plan is None:
        opening, inside, beside = identity_bytes(instance, decision), b"", _named(ranks)
    else:
        told = plan.told.get(ranks) if isinstance(plan, ToldPlan) else None
        opening, (inside, beside) = opening_bytes(instance, plan.detail), told or _tell(_laid(plan), ranks)
    number, length = varint(round_number), varint(len(opening) + len(inside))
    parts = (_ROUND, number, _DECISION, length, opening, inside, beside)
    return b"".join((_NODE, varint(sum(map(len, parts))), *parts))


def tell(plan: RoundPlan, together: Iterable[tuple[int, ...]]) -> list[Told]:
    """What ranks are told of a plan, of each some that are told together."""
    laid = _lay_out(plan)
    return [_tell(laid, ranks) for ranks in together]


def _tell(laid: _Laid, ranks: tuple[int, ...]) -> Told:
    runs = [(ranks[begin], ranks[end - 1] + 1) for begin, end in runs_of(ranks)]
    beside = b"".join((_named(ranks), *_cut(laid.beside, runs), laid.num_fields))
    return b"".join((laid.head, *_cut(laid.arrays, runs))), beside


def _named(ranks: tuple[int, ...]) -> bytes:
    return b"".join((_RANKS, varint(4 * len(ranks)), struct.pack(f"<{len(ranks)}I", *ranks)))


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


def _lay_out(plan: RoundPlan) -> _Laid:
    slices, parts, windowed = plan.slices, plan.parts, plan.slices.steps is not None
    decision = pb.Decision(
        digest=plan.digest,
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
    return _Laid(decision.SerializeToString(), arrays, beside, _NUM_FIELDS + varint(totals.shape[1]))


_laid = of_latest_plans(_lay_out)


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
