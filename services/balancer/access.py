"""Who may call what: an interceptor that checks tokens and jobs before a body is read, and what a caller may hold."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import grpc

from evenkeel.protocol import balancer_pb2 as pb
from evenkeel.protocol.plan_round import MAX_TEXT
from services.balancer.planning import CallError
from services.security.rates import network_of
from services.security.tokens import AuthenticationError, Identity, TokenStore

SERVICE = pb.DESCRIPTOR.services_by_name["BalancerService"].full_name
PLAN_ROUND = f"/{SERVICE}/PlanRound"
_HEALTH = "/grpc.health.v1.Health/"
_OLD = "/evenkeel.balancer.v1."


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who calls.

    Attributes:
        identity: Of the token; None: there are no tokens.
        job: That the call is for; empty for calls that are for none.
    """

    identity: Identity | None = None
    job: str = ""


_ANYBODY = Caller()
caller: ContextVar[Caller] = ContextVar("caller")
"""Who makes the call that is being handled."""


class AccessInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Lets calls through that have a token for what they ask; health checks need none."""

    def __init__(
        self,
        tokens: TokenStore | None,
        version: str,
        fail: Callable[[grpc.aio.ServicerContext, CallError, str], Awaitable[None]],
    ) -> None:
        """Makes an interceptor.

        Args:
            tokens: Who may call; None: everybody.
            version: Of evenkeel, to install in the trainers.
            fail: Ends a call, given why, and the job where that is known.
        """
        self._tokens = tokens
        self._version = version
        self._fail = fail

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        """Notes who calls, or refuses the call."""
        method: str = handler_call_details.method
        if method.startswith(_HEALTH):
            return await continuation(handler_call_details)
        metadata = dict(handler_call_details.invocation_metadata or ())
        job = unquote(_text(metadata.get("evenkeel-job")))
        try:
            caller.set(self._admit(method, _text(metadata.get("authorization")), job))
        except CallError as error:
            return self._refusing(error, job[:MAX_TEXT])
        return await continuation(handler_call_details)

    def _admit(self, method: str, authorization: str, job: str) -> Caller:
        if method.startswith(_OLD):
            raise CallError(
                "FAILED_PRECONDITION",
                "version",
                f"this balancer speaks evenkeel.balancer.v2 only: install evenkeel {self._version} in the trainers",
            )
        try:
            identity = None if self._tokens is None else self._tokens.authenticate(authorization, "balancer")
        except AuthenticationError as error:
            raise CallError("UNAUTHENTICATED", "token", str(error)) from None
        if method != PLAN_ROUND:
            return Caller(identity=identity)
        if not job or len(job) > MAX_TEXT or not job.isprintable():
            remedy = f"name the training job, percent-encoded, in at most {MAX_TEXT} printable characters"
            raise CallError("INVALID_ARGUMENT", "request", f"metadata evenkeel-job is {job[:40]!a}; {remedy}")
        if identity is not None and not identity.allows(job):
            jobs = ", ".join(identity.jobs) or "no job"
            raise CallError(
                "PERMISSION_DENIED",
                "job",
                f"token {identity.name!r} is for {jobs}, not for job {job!r}: use a token of that job",
            )
        return Caller(identity=identity, job=job)

    def _refusing(self, error: CallError, job: str) -> Any:
        async def refuse(_requests: Any, context: grpc.aio.ServicerContext) -> None:
            await self._fail(context, error, job)

        return grpc.stream_unary_rpc_method_handler(refuse)  # of a stream: the body is not read


class Occupancy:
    """How many calls each caller has under way, and how many bytes all of them have."""

    def __init__(self, *, max_calls: int, max_bytes: int) -> None:
        """Starts empty.

        Args:
            max_calls: Of a token; of an address (or network of IPv6) where there are no tokens.
            max_bytes: Of all requests.
        """
        self._max_calls, self._max_bytes = max_calls, max_bytes
        self._calls: Counter[str] = Counter()
        self.num_bytes = 0

    @property
    def num_calls(self) -> int:
        """Calls under way."""
        return self._calls.total()

    @contextlib.contextmanager
    def call(self, context: grpc.aio.ServicerContext) -> Iterator[None]:
        """Counts a call while it is under way.

        Raises:
            CallError: If the caller has too many.
        """
        identity = caller.get(_ANYBODY).identity
        name = network_of(context.peer()) if identity is None else f"token {identity.name}"
        if self._calls[name] >= self._max_calls:
            raise CallError(
                "RESOURCE_EXHAUSTED",
                "limit",
                f"{self._max_calls} calls of {name} are under way; call later, or raise the balancer's max_calls",
            )
        self._calls[name] += 1
        try:
            yield
        finally:
            self._calls[name] -= 1
            if not self._calls[name]:
                del self._calls[name]

    @contextlib.contextmanager
    def body(self, size: int) -> Iterator[None]:
        """Counts a request's bytes while its call is under way.

        Raises:
            CallError: If there are too many of all callers.
        """
        if self.num_bytes + size > self._max_bytes:
            raise CallError(
                "RESOURCE_EXHAUSTED",
                "limit",
                f"requests of {self.num_bytes} bytes are under way, and this one has {size}; call later, or raise the "
                f"balancer's max_bytes_in_flight, {self._max_bytes}",
            )
        self.num_bytes += size
        try:
            yield
        finally:
            self.num_bytes -= size


def _text(value: str | bytes | None) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value or ""
