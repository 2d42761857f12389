"""Who may call what: an interceptor that checks tokens, binds them to jobs, and bounds rates."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import structlog
from google.protobuf.message import DecodeError

from evenkeel.protocol import balancer_pb2 as pb
from services.balancer.refusals import Code, Refusal, RefusedError, shorten
from services.security.addresses import network_of
from services.security.identity import Identity
from services.security.rates import Bucket, Buckets
from services.security.tokens import AuthenticationError, TokenStore

log = structlog.get_logger(__name__)

_MALFORMED: Any = object()
_RECHECKS_AT_ONCE = 64
_OPEN_TO_ALL = "/grpc.health.v1.Health/"
_SERVICE = f"/{pb.DESCRIPTOR.services_by_name['BalancerService'].full_name}/"


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessOptions:
    """How much a caller may do.

    Attributes:
        calls_per_second: Calls and streams that one address may start, on average.
        call_burst: The same at once: all ranks of a node may reconnect in one moment.
        messages_per_second: Messages of one stream, on average; more are read late, not refused.
        message_burst: The same at once.
        recheck_seconds: How often the tokens of open streams and calls are checked again.
    """

    calls_per_second: float = 500.0
    call_burst: float = 10_000.0
    messages_per_second: float = 500.0
    message_burst: float = 1000.0
    recheck_seconds: float = 1.0


class AccessInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Lets calls through that have a token for what they ask; health checks need none."""

    def __init__(
        self,
        tokens: TokenStore | None,
        options: AccessOptions,
        *,
        refused: Callable[[str], None] = lambda _reason: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Makes an interceptor.

        Args:
            tokens: Who may call; None: everybody, within the rates.
            options: How much.
            refused: Told of each refusal: `token`, `job` or `rate`.
            clock: Seconds.
        """
        self._tokens = tokens
        self._options = options
        self._refused = refused
        self._clock = clock
        self._calls = Buckets(rate=options.calls_per_second, burst=options.call_burst)
        self._probes = Buckets(
            rate=options.calls_per_second, burst=options.call_burst
        )  # those of others must get through
        self._guards: set[Guard] = set()
        self._follower: asyncio.Task[None] | None = None

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        """Wraps the handler of a call."""
        method: str = handler_call_details.method
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        authorization = _authorization(handler_call_details.invocation_metadata)
        is_open = method.startswith(_OPEN_TO_ALL)
        try:
            identity = None if is_open else self._authenticate(authorization)
        except AuthenticationError as error:
            return self._refusing(handler, grpc.StatusCode.UNAUTHENTICATED, str(error))
        if not is_open and not method.startswith(_SERVICE):
            return handler

        calls = self._probes if is_open else self._calls

        def guard(context: grpc.aio.ServicerContext) -> Guard:
            caller = Caller(network_of(context.peer()) if identity is None else f"token {identity.name}", identity)
            return Guard(self, caller, authorization, context)

        if handler.request_streaming:

            async def stream(requests: Any, context: grpc.aio.ServicerContext) -> None:
                await self._admit(context, calls)
                with self._following(guard(context)) as guarded:
                    await handler.stream_stream(requests, guarded)

            return _with(handler, stream, handler.request_deserializer)

        async def unary(request: Any, context: grpc.aio.ServicerContext) -> Any:
            await self._admit(context, calls)
            if request is _MALFORMED:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the request is no message of this call's type")
            with self._following(guard(context)) as guarded:
                return await (handler.unary_stream or handler.unary_unary)(request, guarded)

        return _with(handler, unary, _tolerant(handler.request_deserializer))

    def start(self) -> None:
        """Follows the tokens until `stop`; must be called with the event loop running."""
        if self._tokens is not None:
            self._follower = asyncio.create_task(self._follow(self._tokens), name="tokens")

    def stop(self) -> None:
        """Follows them no more."""
        if self._follower is not None:
            self._follower.cancel()

    def check(self, authorization: str | None, job: str | None, peer: str) -> Refusal | None:
        """Why a token does not hold any more, or not for a job; None if it does."""
        try:
            identity = self._authenticate(authorization)
        except AuthenticationError as error:
            self.refuse("token", peer, None)
            return _unauthenticated("token", str(error), "send a token that holds")
        if job is not None and not _allows(identity, job):
            self.refuse("job", peer, identity)
            return _unauthenticated("job", shorten(job), not_for(identity, job))
        return None

    def refuse(self, reason: str, peer: str, identity: Identity | None) -> None:
        """Counts a refusal and logs it."""
        self._refused(reason)
        holder = None if identity is None else identity.name
        log.warning("call refused", reason=reason, peer=peer, holder=holder, caller=network_of(peer))

    def bucket(self) -> Bucket:
        """A bucket for the messages of a new stream."""
        options = self._options
        return Bucket.full(rate=options.messages_per_second, burst=options.message_burst, now=self._clock())

    @property
    def options(self) -> AccessOptions:
        """How much a caller may do."""
        return self._options

    def now(self) -> float:
        """Seconds on the clock of tokens and connections."""
        return self._clock()

    @contextlib.contextmanager
    def _following(self, guard: Guard) -> Iterator[Guard]:
        self._guards.add(guard)
        try:
            yield guard
        finally:
            self._guards.discard(guard)

    async def _follow(self, tokens: TokenStore) -> None:
        """Reads the file where the loop does not wait for it, and ends what goes on under tokens that hold no more."""
        tokens.read_elsewhere = True
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._options.recheck_seconds)
            await loop.run_in_executor(None, tokens.refresh)
            for number, guard in enumerate(list(self._guards)):
                if number % _RECHECKS_AT_ONCE == _RECHECKS_AT_ONCE - 1:
                    await asyncio.sleep(0)
                if guard in self._guards:  # has not ended meanwhile
                    guard.recheck()

    def _authenticate(self, authorization: str | None) -> Identity | None:
        return None if self._tokens is None else self._tokens.authenticate(authorization, "balancer")

    async def _admit(self, context: grpc.aio.ServicerContext, calls: Buckets) -> None:
        if not calls.try_take(network_of(context.peer()), self._clock()):
            self._refused("rate")
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"more than {self._options.calls_per_second:g} calls a second from one address: slow down",
            )

    def _refusing(self, handler: Any, code: grpc.StatusCode, message: str) -> Any:
        async def refuse(_request: Any, context: grpc.aio.ServicerContext) -> None:
            await self._admit(
                context, self._calls
            )  # guessing is bounded by the rate, and so is what it can make us log
            self.refuse("token", context.peer(), None)
            await context.abort(code, message)

        return _with(handler, refuse, None)  # who may not call is not read either


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls.

    Attributes:
        name: The token's name, or the network of the address where there are no tokens: who shares what there is.
        identity: Of the token; None: there are no tokens.
    """

    name: str
    identity: Identity | None = None

    def allows(self, job: str) -> bool:
        """Whether the caller may join and read this job."""
        return _allows(self.identity, job)


class Guard:
    """A call's context that knows the caller, and reads at the stream's rate.

    When the call has ended, gRPC's own context must not be asked for anything: asked for the peer, it ends the process.

    Attributes:
        caller: Who calls.
        job: The job that it joined; None before.
    """

    def __init__(
        self, access: AccessInterceptor, caller: Caller, authorization: str | None, context: grpc.aio.ServicerContext
    ) -> None:
        self.caller = caller
        self.job: str | None = None
        self._access = access
        self._authorization = authorization
        self._context = context
        self.write, self._read, self._done = context.write, context.read, context.done  # what each message needs
        self._peer: str = context.peer()
        self._bucket = access.bucket()
        self._withdraw: Callable[[Refusal], None] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def peer(self) -> str:
        """The address of the caller, also when the call has ended."""
        return self._peer

    @property
    def is_over(self) -> bool:
        """Whether the call has ended: the client is gone, or has been told its status."""
        return bool(self._done())

    async def read(self) -> bytes | None:
        """The next message, when it may be read; None when the client has ended its requests."""
        delay = self._bucket.take(self._access.now())
        if delay > 0:
            await asyncio.sleep(delay)
        message = await self._read()
        return None if message is grpc.aio.EOF else message

    def charge(self, messages: float) -> None:
        """Counts what was read as further messages."""
        if messages > 0:
            self._bucket.take(self._access.now(), messages)

    def authorize(self, job: str) -> None:
        """Checks that the caller may join a job.

        Raises:
            RefusedError: If not.
        """
        refusal = self._access.check(self._authorization, job, self._peer)
        if refusal is not None:
            raise RefusedError(refusal)
        self.job = job

    def refuse(self, reason: str) -> None:
        """Counts a refusal and logs it."""
        self._access.refuse(reason, self._peer, self.caller.identity)

    def when_withdrawn(self, withdraw: Callable[[Refusal], None]) -> None:
        """Notes what to do when the caller's token holds no more."""
        self._withdraw = withdraw

    def recheck(self) -> None:
        """Ends the call if its token holds no more."""
        if self._withdraw is not None:
            refusal = self._access.check(self._authorization, self.job, self._peer)
            if refusal is not None:
                self._withdraw(refusal)
                self._withdraw = None


async def denied(context: Guard, job: str) -> None:
    """Ends a call for a job that is not the caller's."""
    context.refuse("job")
    await context.abort(grpc.StatusCode.PERMISSION_DENIED, not_for(context.caller.identity, job))


def not_for(identity: Identity | None, job: str) -> str:
    """What to tell the holder of a token for other jobs."""
    assert identity is not None
    jobs = ", ".join(identity.jobs) or "no job"
    return f"token {identity.name!r} is for {jobs}, not for job {shorten(job)!r}: use a token of that job"


def _allows(identity: Identity | None, job: str) -> bool:
    return identity is None or identity.allows(job)


def _unauthenticated(field: str, value: str, remedy: str) -> Refusal:
    return Refusal(code=Code.UNAUTHENTICATED, field=field, value=value, remedy=remedy, fatal=True)


def _authorization(metadata: Any) -> str | None:
    for key, value in metadata or ():
        if key == "authorization":
            return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    return None


def _tolerant(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """As `deserialize`, but bytes that are no message are the caller's error, not one of the server's."""
    if deserialize is None:
        return None

    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return _MALFORMED

    return read


def _with(
    handler: Any, behavior: Callable[[Any, Any], Awaitable[Any]], deserialize: Callable[[bytes], Any] | None
) -> Any:
    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[handler.request_streaming, handler.response_streaming]
    return make(behavior, deserialize, handler.response_serializer)
