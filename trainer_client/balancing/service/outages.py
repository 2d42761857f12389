"""Why a stream has ended: what lasts until somebody mends it, and how long to wait for what passes by itself."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass

import grpc

from evenkeel.addresses import endpoints
from evenkeel.credentials import Credentials
from evenkeel.handshakes import shake_hands
from evenkeel.protocol import balancer_pb2 as pb
from evenkeel.variables import misspelt

FIRST_SECONDS = 0.1
REFUSED_SECONDS = 5.0  # longest pause after the service itself has said no
ATTEMPTS_PER_SECOND = 200  # of all streams together, about, while nobody answers
HERD_PER_SECOND = 2000  # opened together, about, once one of them has got through


class Backoff:
    """Pauses between attempts; the streams of a job share the work of finding out that the service is back.

    While nobody answers, pauses double from 0.1 s up to 0.5 s, and more with the number of streams (5 s at 1000), so
    that the first of many finds a service that has returned within some milliseconds, and any within 0.75 s (of up to
    100). The others hear of that in the next agreement (`encouraged`) and do not sit out their own pauses.
    """

    def __init__(self, num_streams: int) -> None:
        self._longest = min(max(0.5, num_streams / ATTEMPTS_PER_SECOND), REFUSED_SECONDS)
        self._herd_seconds = num_streams / HERD_PER_SECOND
        self._last = 0.0

    def after(self, *, joined: bool, refused: bool) -> float:
        """Seconds to wait after an attempt, with jitter.

        Args:
            joined: The stream had been joined before it ended.
            refused: The service answered that it does not want it.
        """
        longest = REFUSED_SECONDS if refused else self._longest
        self._last = FIRST_SECONDS if joined else min(2 * max(self._last, FIRST_SECONDS / 2), longest)
        return self._last * random.uniform(0.5, 1.5)

    def encouraged(self) -> float:
        """Seconds to wait instead when another rank has got through."""
        self._last = 0.0
        return random.uniform(0.0, self._herd_seconds)


_PROBE_SECONDS = 2.0
_PROBES_SECONDS = 5.0  # a name may have any number of addresses
_KINDS = {
    pb.ERROR_CODE_UNAUTHENTICATED: "authentication",
    pb.ERROR_CODE_VERSION: "protocol versions",
    pb.ERROR_CODE_INVALID_ARGUMENT: "options",
    pb.ERROR_CODE_RANKS_DIFFER: "ranks that differ",
}
_STATUSES = {
    grpc.StatusCode.UNAUTHENTICATED: "authentication",
    grpc.StatusCode.PERMISSION_DENIED: "authentication",
    grpc.StatusCode.UNIMPLEMENTED: "address",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why waiting does not help.

    Attributes:
        kind: In a word or two: authentication, certificates, strategy, options, protocol versions, address,
            ranks that differ, superseded.
        text: What is wrong and what to do.
    """

    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


def _no_token(environment: Mapping[str, str]) -> str:
    for name, meant in misspelt(environment).items():
        if meant == "EVENKEEL_TOKEN_FILE":
            return f"{name} is set, and nothing reads it: did you mean {meant}?"
    return "set EVENKEEL_TOKEN_FILE to a file with a token of this balancer"


def of_refusal(error: pb.Error) -> Cause | None:
    """The lasting cause that the service's refusal of a stream names; None if it may pass."""
    kind = "superseded" if is_superseded(error) else _KINDS.get(error.code)
    if kind is None:
        return None
    return Cause(
        kind="strategy" if error.field == "options.strategy" else kind,
        # `error.message` would name the kind again
        text=f"{error.field} is {error.value}; {error.remedy}" if error.field else error.message,
    )


def is_superseded(error: pb.Error) -> bool:
    """Whether a later attempt of the same run has joined: what is left of this one must not take its name again."""
    return error.code == pb.ERROR_CODE_SUPERSEDED and error.field == "restart_count"


def of_call(error: grpc.Call, address: str, credentials: Credentials) -> Cause | None:
    """The lasting cause of a stream's end; None if it may pass. Tries the connection by hand where gRPC does not tell.

    Args:
        error: How the call ended.
        address: Of the balancer or balancers.
        credentials: What the call was made with.
    """
    code, details = error.code(), error.details() or ""
    kind = _STATUSES.get(code)
    if kind is not None:
        remedy = "; give the address of a balancer, host:port" if kind == "address" else ""
        if code is grpc.StatusCode.UNAUTHENTICATED and credentials.token_file is None:
            remedy = f"; {_no_token(os.environ)}"
        return Cause(kind=kind, text=f"{details or code.name}{remedy}")
    if code is not grpc.StatusCode.UNAVAILABLE:
        return None
    deadline = time.monotonic() + _PROBES_SECONDS
    try:
        places = endpoints(address)
    except OSError:
        return None  # the name is not known just now: an outage
    for place in places:
        if time.monotonic() > deadline:
            break
        try:
            found = shake_hands(place, credentials, _PROBE_SECONDS)
        except OSError:
            continue  # nobody there: an outage, or one of several has gone
        if found.problem:
            return Cause(kind="certificates", text=f"{place}: {found.problem}; {found.remedy}")
    return None
