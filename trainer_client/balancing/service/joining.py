"""The submissions of a node's ranks, joined into arrays for the balancer, and its answers to them, cut apart again."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.divisible import WIDTH
from evenkeel.protocol import balancer_pb2 as pb
from trainer_client.balancing.service.messages import MalformedAnswerError

_WIDTHS = (1, 2, 4, 8)


def join_submits(messages: Iterable[pb.Submit], join: pb.Join) -> tuple[list[pb.SubmitNode], list[pb.Submit]]:
    """Submissions as arrays: of each round one message, more where ranks say different kinds of things.

    Args:
        messages: Of some ranks and rounds.
        join: With which the stream was joined.

    Returns:
        The joined ones, and those that contradict themselves: the balancer tells each of these what is wrong with it.
    """
    num_fields = sum(field.kind == pb.Field.KIND_JAGGED for field in join.schema.fields)
    alike: dict[tuple[object, ...], list[pb.Submit]] = {}
    odd = []
    for one in messages:
        n, costs = one.num_samples, one.costs_f64 or one.costs_i64
        sizes = (len(costs), len(one.memory) or 8 * n, len(one.sizes) or 8 * n)
        if sizes != (8 * n, 8 * n, 8 * n) or len(one.lengths) != 4 * n * num_fields or len(one.divisible) % _ROW:
            odd.append(one)
            continue
        kind = (one.round, one.WhichOneof("costs"), not one.memory, not one.sizes) if n else (one.round,)
        alike.setdefault(kind, []).append(one)
    return [_join(group, join) for group in alike.values()], odd


def _join(group: list[pb.Submit], join: pb.Join) -> pb.SubmitNode:
    group.sort(key=lambda one: one.rank)
    ranks = [one.rank for one in group]
    node = pb.SubmitNode(
        round=group[0].round,
        ranks=b"" if ranks == list(join.ranks) else _u32(ranks),
        num_samples=_u32([one.num_samples for one in group]),
        memory=b"".join([one.memory for one in group]),
        sizes=_narrow(b"".join([one.sizes for one in group]), "<i8"),
        lengths=_narrow(b"".join([one.lengths for one in group]), "<u4"),
        timeout_ms=min(one.timeout_ms for one in group),
    )
    if any(one.costs_f64 for one in group):
        node.costs_f64 = b"".join([one.costs_f64 for one in group])
    else:
        node.costs_int = _narrow(b"".join([one.costs_i64 for one in group]), "<i8")
    if join.window > 1:
        none = [0] * join.window
        sizes = [[*(one.batch_sizes or (one.num_samples,)), *none][: join.window] for one in group]
        node.batch_sizes = _u32(sizes)
    if any(one.exhausted for one in group):
        node.exhausted = bytes(one.exhausted for one in group)
    if any(one.divisible for one in group):
        node.divisible = b"".join([one.divisible for one in group])
        node.num_divisible = _u32([len(one.divisible) // _ROW for one in group])
    if any(one.held for one in group):
        node.held = _u32([one.held for one in group])
    if any(one.traceparent for one in group):
        node.traceparents.extend(one.traceparent for one in group)
    for one in group:
        if one.rank == 0 and one.HasField("learned"):
            node.learned.CopyFrom(one.learned)
    return node


def split_answer(node: pb.AnswerNode, own: Collection[int] | None = None) -> list[pb.Answer]:
    """What each rank is told.

    Args:
        node: The answer.
        own: The ranks of the stream; None: any.

    Raises:
        MalformedAnswerError: If arrays do not fit each other, or it is not of ranks of the stream.
    """
    ranks = _numbers("ranks", node.ranks)
    if own is not None and not (len(ranks) and set(own).issuperset(ranks.tolist())):
        raise MalformedAnswerError(f"it is to rank(s) {ranks[:8].tolist()}, which this stream does not speak for")
    if node.decision.outcome != pb.Decision.OUTCOME_BALANCED:
        return [pb.Answer(round=node.round, rank=rank, decision=node.decision) for rank in ranks.tolist()]
    told, num_ranks = node.decision, len(ranks)
    arrays = {name: getattr(told, name) for name in (*_OF_PARTS, *_OF_SOURCES, "source_totals", "cuts")}
    for name in arrays:
        told.ClearField(name)
    parts = _numbers("num_parts", node.num_parts, num_ranks)
    of_batches = _numbers("num_sources", node.num_sources)
    if num_ranks == 0 or of_batches.size % num_ranks:
        raise MalformedAnswerError(f"num_sources has {of_batches.size} numbers for {num_ranks} ranks")
    of_batches = of_batches.reshape(num_ranks, -1)
    sources = of_batches.sum(axis=1)
    cuts = _numbers("num_cuts", node.num_cuts, num_ranks) if node.num_cuts else np.zeros(num_ranks, np.int64)
    cut = {name: _cut(name, arrays[name], parts, 1, "<i4") for name in _OF_PARTS if arrays[name] or name in _ALWAYS}
    cut |= {name: _cut(name, arrays[name], sources, 1, "<i4") for name in _OF_SOURCES}
    cut["source_totals"] = _cut("source_totals", arrays["source_totals"], sources, node.num_fields, "<i8")
    cut["cuts"] = _cut("cuts", arrays["cuts"], cuts, 2, "<i8")
    balances = 1 + len(told.batch_balances)
    loads = np.frombuffer(node.loads, "<f8") if len(node.loads) == 16 * num_ranks * balances else None
    if loads is None:
        raise MalformedAnswerError(f"loads has {len(node.loads)} bytes for {balances} balances of {num_ranks} ranks")
    answers = []
    for at, (rank, its) in enumerate(zip(ranks.tolist(), loads.reshape(num_ranks, balances, 2).tolist(), strict=True)):
        answer = pb.Answer(round=node.round, rank=rank, decision=told)
        decision = answer.decision
        for name, pieces in cut.items():
            setattr(decision, name, pieces[at])
        if balances > 1:
            decision.source_groups.extend(of_batches[at].tolist())
        for balance, (before, after) in zip((decision.balance, *decision.batch_balances), its, strict=True):
            balance.own_load_before, balance.own_load_after = before, after
        answers.append(answer)
    return answers


def _cut(name: str, data: bytes, counts: NDArray[Any], width: int, dtype: str) -> list[bytes]:
    """The bytes of each rank's part of an array of rows, in the type that a rank's answer has it in."""
    total = int(counts.sum()) * width
    each = next((size for size in _WIDTHS if len(data) == size * total), 0)
    if not each:
        raise MalformedAnswerError(f"{name} has {len(data)} bytes, not {total} numbers")
    values = np.frombuffer(data, "<i8" if each == 8 else f"<u{each}")
    wide = values.astype(dtype)
    if each > wide.itemsize and not np.array_equal(wide, values):
        raise MalformedAnswerError(f"{name} holds values out of range")
    told, row = wide.tobytes(), width * wide.itemsize
    return [told[row * begin : row * end] for begin, end in pairwise(accumulate(counts.tolist(), initial=0))]


def _numbers(name: str, data: bytes, count: int | None = None) -> NDArray[np.int64]:
    if len(data) % 4 or (count is not None and len(data) != 4 * count):
        raise MalformedAnswerError(f"{name} has {len(data)} bytes, not {count} numbers of 4")
    return np.frombuffer(data, "<u4").astype(np.int64)


def _narrow(data: bytes, dtype: str) -> bytes:
    """Integers in the narrowest type that holds them; as they are where some are negative, which nobody takes."""
    if not data:
        return b""
    values = np.frombuffer(data, dtype)
    least, most = int(values.min()), int(values.max())
    for width in _WIDTHS:
        if least >= 0 and width < values.itemsize and most < 1 << 8 * width:
            return values.astype(f"<u{width}").tobytes()
    return data


def _u32(numbers: Sequence[Any]) -> bytes:
    return np.array(numbers, "<u4").tobytes()


_ROW = WIDTH * 8  # bytes of a sample that may be split
_OF_PARTS = ("destinations", "destination_steps")
_ALWAYS = ("destinations",)
_OF_SOURCES = ("sources", "source_counts")
