"""Messages of a node's ranks that are wrong: what is another's, arrays that do not fit, numbers out of range."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from trainer_client.balancing.service.joining import split_answer

from evenkeel.protocol import balancer_pb2 as pb

Change = Callable[[Any], Iterable[Any] | None]
"""From a message to what is passed on in its place; None: it holds nothing that could be changed so."""


def held(message: Any, seconds: float) -> Iterator[Any]:
    """A message after a while."""
    time.sleep(seconds)
    yield message


def _forged(group: type[pb.SubmitGroup | pb.AnswerGroup], forge: Callable[[Any], object]) -> Change:
    """A change that has one message of a node's ranks forged.

    Args:
        group: Of which kind the messages are.
        forge: Changes a `pb.SubmitNode`, or a balanced `pb.AnswerNode`, in which each of several ranks has a sample.
    """

    def change(message: Any) -> list[Any] | None:
        other = group.FromString(message.SerializeToString())
        if len(other.nodes) != 1 or not _is_full(other.nodes[0]):
            return None
        forge(other.nodes[0])
        return [other] if other != message else None

    return change


def _is_full(node: pb.SubmitNode | pb.AnswerNode) -> bool:
    if isinstance(node, pb.SubmitNode):
        return _fills(node.num_samples)
    balanced = node.decision.outcome == pb.Decision.OUTCOME_BALANCED
    return balanced and _fills(node.num_parts) and _fills(node.num_sources)


def _fills(counts: bytes) -> bool:
    # Of two samples, an array of wide integers that is cut short may be one of narrow ones.
    each = np.frombuffer(counts, "<u4")
    return len(each) > 1 and bool(each.all()) and int(each.sum()) > 2


def _u32(numbers: Sequence[int] | NDArray[Any]) -> bytes:
    return np.asarray(numbers, "<u4").tobytes()


def _change_of(field: str, edit: Callable[[bytes], bytes], part: str = "") -> Callable[[Any], None]:
    def change(node: Any) -> None:
        message = getattr(node, part) if part else node
        setattr(message, field, edit(getattr(message, field)))

    return change


def _cut(field: str, part: str = "") -> Callable[[Any], None]:
    return _change_of(field, lambda data: data[:-1], part)


def _vast(field: str, part: str = "") -> Callable[[Any], None]:
    return _change_of(field, lambda data: b"\xff" * len(data), part)


def _wide(value: int, field: str, counts: str) -> Callable[[Any], None]:
    """An array of i64 of one value, as long as the counts say."""

    def change(node: Any) -> None:
        total = int(np.frombuffer(getattr(node, counts), "<u4").sum())
        setattr(node.decision, field, np.full(total, value, "<i8").tobytes())

    return change


def _another_destination(node: pb.AnswerNode) -> None:
    to = bytearray(node.decision.destinations)  # ranks below 256 are bytes
    to[0] = (to[0] + 1) % 2
    node.decision.destinations = bytes(to)


def _other_instance(node: pb.AnswerNode) -> None:
    node.decision.instance ^= 1


def _other_outcome(node: pb.AnswerNode) -> None:
    node.decision.outcome = 77  # type: ignore[assignment]


def _more_fields(node: pb.AnswerNode) -> None:
    node.num_fields = 2**32 - 1


def _ranks_of_another_node(node: pb.SubmitNode) -> None:
    node.ranks = _u32(np.arange(len(node.num_samples) // 4) + 1)


def _one_rank_twice(node: pb.SubmitNode) -> None:
    node.ranks = bytes(len(node.num_samples))


def _ranks_swapped(node: pb.SubmitNode) -> None:
    node.ranks = _u32(np.arange(len(node.num_samples) // 4)[::-1])


def _costs(dtype: str, value: float) -> Callable[[pb.SubmitNode], None]:
    def change(node: pb.SubmitNode) -> None:
        costs = np.ones(int(np.frombuffer(node.num_samples, "<u4").sum()), dtype)
        costs[0] = value
        setattr(node, "costs_int" if dtype == "<i8" else "costs_f64", costs.tobytes())

    return change


def _far_ahead(node: pb.SubmitNode) -> None:
    node.round += 2**40


def _batches_that_do_not_add_up(node: pb.SubmitNode) -> None:
    node.batch_sizes = b"\xff" * len(node.num_samples)


def _pieces_of_nothing(node: pb.SubmitNode) -> None:
    node.divisible, node.num_divisible = bytes(96), _u32([1, *[0] * (len(node.num_samples) // 4 - 1)])


def _one_trace(node: pb.SubmitNode) -> None:
    del node.traceparents[:]
    node.traceparents.append("00-" + "1" * 32 + "-" + "1" * 16 + "-01")


def _nobodys(answer: pb.AnswerNode) -> None:
    answer.ranks = _u32(np.frombuffer(answer.ranks, "<u4") + 100)


def _contradicted(message: pb.SubmitGroup) -> list[pb.SubmitGroup] | None:
    others = _forged(pb.SubmitGroup, _costs("<i8", 7))(message)
    return None if others is None else [message, *others]


def _of_one_rank_less(message: pb.AnswerGroup) -> list[pb.AnswerGroup] | None:
    if len(message.nodes) != 1 or not _is_full(message.nodes[0]):
        return None
    copy = pb.AnswerNode.FromString(message.nodes[0].SerializeToString())
    return [pb.AnswerGroup(answers=[*message.answers, *split_answer(copy)[:-1]])]


_FORGED_ANSWERS: dict[str, Callable[[pb.AnswerNode], object]] = {
    "other incarnation": _other_instance,
    "digest differs": _change_of("digest", lambda _: bytes(16), "decision"),
    "outcome unknown": _other_outcome,
    "another rank's destinations": _change_of("ranks", lambda ranks: _u32(np.frombuffer(ranks, "<u4")[::-1])),
    "another destination": _another_destination,
    "destinations out of range": _vast("destinations", "decision"),
    "destinations of 8 bytes": _wide(2**32, "destinations", "num_parts"),
    "destinations cut short": _cut("destinations", "decision"),
    "counts of nothing": _change_of("source_counts", lambda data: bytes(len(data)), "decision"),
    "counts of 8 bytes": _wide(2**32 + 1, "source_counts", "num_sources"),
    "totals negative": _wide(-1, "source_totals", "num_sources"),
    "ranks cut short": _cut("ranks"),
    "ranks of nobody": _nobodys,
    "fewer ranks": _change_of("ranks", lambda ranks: ranks[:-4]),
    "vast parts": _vast("num_parts"),
    "loads cut short": _cut("loads"),
    "vast fields": _more_fields,
    "cuts of nothing": _change_of("num_cuts", lambda _: _u32([1, 1])),
}

ANSWERS: dict[str, Change] = {name: _forged(pb.AnswerGroup, forge) for name, forge in _FORGED_ANSWERS.items()}
"""What ranks see at once to be wrong, whatever the others do."""

_FORGED_SUBMITS: dict[str, Callable[[pb.SubmitNode], object]] = {
    "ranks of another node": _ranks_of_another_node,
    "one rank twice": _one_rank_twice,
    "ranks swapped": _ranks_swapped,
    "ranks cut short": _change_of("ranks", lambda _: b"\0\0\0"),
    "counts cut short": _cut("num_samples"),
    "vast counts": _vast("num_samples"),
    "costs cut short": _cut("costs_int"),
    "costs negative": _costs("<i8", -1),
    "costs not finite": _costs("<f8", np.nan),
    "sizes cut short": _cut("sizes"),
    "lengths cut short": _cut("lengths"),
    "batches that do not add up": _batches_that_do_not_add_up,
    "pieces of nothing": _pieces_of_nothing,
    "traces of fewer": _one_trace,
    "far ahead": _far_ahead,
}

SUBMITS: dict[str, Change] = {name: _forged(pb.SubmitGroup, forge) for name, forge in _FORGED_SUBMITS.items()}
"""What the service refuses, to the node's ranks: the others wait for its deadline."""

UNTOLD: dict[str, Change] = {
    "lost": lambda message: [],
    "one rank less": _of_one_rank_less,
}
"""Answers of which some ranks, or all, are not told."""

CONTRADICTED: Change = _contradicted
"""A submission, and another to the same round."""
