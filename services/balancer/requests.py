"""Requests of streams, read piece by piece: parsing takes a time that follows from what a message may hold.

Protocol buffers are parsed as a whole, and make an object of every two bytes of a message that consists of empty ones.
Small messages are parsed so. Of larger ones the parts are looked at first, and taken one at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple, TypeVar

from google.protobuf.message import DecodeError

from evenkeel.protocol import balancer_pb2 as pb

Part = TypeVar("Part", pb.Submit, pb.SubmitNode)

SMALL_BYTES = 1 << 16
"""A message up to which is parsed as it is: in the worst case that takes some 3 ms."""

_MAX_PARTS = 256  # beside a group's submissions
_SMALL_PART_BYTES = 1024
_LEARNED_BYTES = 1 << 17  # it names half of 4096 ranks as slow, and as late
_JOIN_PARTS = 512
_JOIN_BYTES = 1 << 20
_TOLD_BYTES = 1 << 14

_REQUESTS = pb.BalanceRequest.DESCRIPTOR.fields_by_name
_JOIN, _SUBMIT, _SUBMITS, _TOLD = (_REQUESTS[name].number for name in ("join", "submit", "submits", "told"))
_SUBMITTED, _NODE = (pb.SubmitGroup.DESCRIPTOR.fields_by_name[name].number for name in ("submits", "nodes"))
_SCHEMA = pb.Join.DESCRIPTOR.fields_by_name["schema"].number
_ARRAYS = {
    kind.DESCRIPTOR.name: (
        frozenset(each.number for each in kind.DESCRIPTOR.fields if each.type == each.TYPE_BYTES),
        most,
    )
    for kind, most in ((pb.Submit, 256), (pb.SubmitNode, 4096 + 64))
}
"""The fields of any size, and how many parts there may be: sizes of a window's batches, or traces, come one by one."""
_LEARNED = {
    kind.DESCRIPTOR.name: kind.DESCRIPTOR.fields_by_name["learned"].number for kind in (pb.Submit, pb.SubmitNode)
}
_BYTES = 2  # the wire type of what tells its length


class OversizedError(DecodeError):
    """A message, or a part of it, that is larger than anything that makes sense there."""


class Request(NamedTuple):
    """What a request says.

    Attributes:
        said: A Join, an Elsewhere, the submissions one after another, or None for an empty request.
        told: What the ranks tell of earlier rounds, if they do.
    """

    said: pb.Join | pb.Elsewhere | Iterator[pb.Submit | pb.SubmitNode] | None
    told: pb.Told | None = None


def read_request(data: bytes, *, max_fields: int) -> Request:
    """What a request says.

    Args:
        data: A `pb.BalanceRequest`, serialised.
        max_fields: Fields that a schema may have.

    Raises:
        DecodeError: If it is none; also while the submissions are taken.
        OversizedError: If a part of it is too large.
    """
    if len(data) <= SMALL_BYTES:
        request = pb.BalanceRequest.FromString(data)
        kind, told = request.WhichOneof("request"), request.told if request.HasField("told") else None
        if kind == "join":
            return Request(request.join, told)
        if kind == "submit":
            return Request(iter((request.submit,)), told)
        if kind == "elsewhere":
            return Request(request.elsewhere, told)
        return Request(chain(request.submits.submits, request.submits.nodes) if kind == "submits" else None, told)
    found = list(walk(data, 0, len(data), most=8))
    parts = [part for part in found if part[0] in (_JOIN, _SUBMIT, _SUBMITS)]
    if len(parts) != 1 or parts[0][1] != _BYTES:
        raise DecodeError("not one request")
    told = None
    for number, kind, begin, end in found:
        if number == _TOLD and kind == _BYTES:
            if end - begin > _TOLD_BYTES:
                raise OversizedError(f"a Told of {end - begin} bytes: at most {_TOLD_BYTES} can be needed")
            told = pb.Told.FromString(data[begin:end])
    number, _, begin, end = parts[0]
    if number == _JOIN:
        return Request(read_join_message(data[begin:end], max_fields=max_fields), told)
    if number == _SUBMIT:
        return Request(iter((read_submit_message(data[begin:end], pb.Submit),)), told)
    return Request(_members(data, begin, end), told)


def read_join_message(data: bytes, *, max_fields: int) -> pb.Join:
    """A Join.

    Raises:
        DecodeError: If it is none.
        OversizedError: If it holds more than a Join can need.
    """
    if len(data) > 3 * SMALL_BYTES:
        if len(data) > _JOIN_BYTES:
            raise OversizedError(f"a Join of {len(data)} bytes: at most {_JOIN_BYTES} can be needed")
        for number, kind, begin, end in walk(data, 0, len(data), most=_JOIN_PARTS):
            if number == _SCHEMA and kind == _BYTES:
                for _ in walk(data, begin, end, most=max_fields + 64):
                    pass
    return pb.Join.FromString(data)


def read_submit_message(data: bytes, kind: type[Part]) -> Part:
    """A Submit, or a SubmitNode.

    Raises:
        DecodeError: If it is none.
        OversizedError: If it holds more than its arrays.
    """
    if len(data) > SMALL_BYTES // 16:
        name, learned = kind.DESCRIPTOR.name, 0
        arrays, most = _ARRAYS[name]
        for number, wire, begin, end in walk(data, 0, len(data), most=most):
            size, limit = end - begin, _SMALL_PART_BYTES
            if number == _LEARNED[name]:
                size = learned = learned + size  # it may come in pieces
                limit = _LEARNED_BYTES
            if wire == _BYTES and size > limit and number not in arrays:
                raise OversizedError(f"field {number} of a {name} takes {size} bytes")
    return kind.FromString(data)


def read_round_message(data: bytes, *, max_fields: int) -> pb.BalanceRoundRequest:
    """A BalanceRoundRequest.

    Raises:
        DecodeError: If it is none.
        OversizedError: If its parts hold more than they can need.
    """
    if len(data) <= SMALL_BYTES:
        return pb.BalanceRoundRequest.FromString(data)
    request = pb.BalanceRoundRequest()
    for number, kind, begin, end in walk(data, 0, len(data), most=8):
        if number == 1 and kind == _BYTES:
            request.join.MergeFrom(read_join_message(data[begin:end], max_fields=max_fields))
        elif number == 2 and kind == _BYTES:
            request.submit.MergeFrom(read_submit_message(data[begin:end], pb.Submit))
    return request


def walk(data: bytes, begin: int, end: int, *, most: int) -> Iterator[tuple[int, int, int, int]]:
    """The fields of a serialised message: number, wire type, and where its content begins and ends.

    Raises:
        DecodeError: If it is no message.
        OversizedError: If it has more than `most` fields.
    """
    found = 0
    while begin < end:
        found += 1
        if found > most:
            raise OversizedError(f"a message with more than {most} fields")
        tag, begin = _varint(data, begin, end)
        kind = tag & 7
        if kind == _BYTES:
            size, begin = _varint(data, begin, end)
            after = begin + size
        elif kind == 0:
            _, after = _varint(data, begin, end)
        elif kind in (1, 5):
            after = begin + (8 if kind == 1 else 4)
        else:
            raise DecodeError(f"wire type {kind}")
        if after > end or tag < 8:
            raise DecodeError("a field goes beyond its message")
        yield tag >> 3, kind, begin, after
        begin = after


def _members(data: bytes, begin: int, end: int) -> Iterator[pb.Submit | pb.SubmitNode]:
    others = 0
    for number, kind, first, last in walk(data, begin, end, most=end):
        if number in (_SUBMITTED, _NODE) and kind == _BYTES:
            part = data[first:last]
            yield (
                read_submit_message(part, pb.Submit)
                if number == _SUBMITTED
                else read_submit_message(part, pb.SubmitNode)
            )
            continue
        others += 1
        if others > _MAX_PARTS:
            raise OversizedError(f"a SubmitGroup with more than {_MAX_PARTS} fields beside its submissions")


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    value, shift = 0, 0
    while at < end and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    raise DecodeError("a number goes beyond its message")
