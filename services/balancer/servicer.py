"""The gRPC edge: `PlanRound` as bytes, `GetServerInfo`, and health."""

from __future__ import annotations

import asyncio
import pickle
import time

import grpc
import structlog
from grpc_health.v1 import health, health_pb2

from evenkeel.partitioning import strategies
from evenkeel.protocol import balancer_pb2 as pb
from services.balancer.access import SERVICE, Occupancy, caller
from services.balancer.planning import CallError
from services.balancer.settings import Settings
from services.balancer.summary import Observer, RoundSummary
from services.balancer.workers import WorkerPool
from services.security.rates import network_of

log = structlog.get_logger(__name__)


class BalancerServicer:
    """Implements `evenkeel.balancer.v2.BalancerService`.

    Attributes:
        draining: Whether the balancer is shutting down.
    """

    def __init__(
        self,
        settings: Settings,
        pool: WorkerPool,
        occupancy: Occupancy,
        observer: Observer,
        *,
        version: str,
        instance: int,
    ) -> None:
        self.draining = False
        self._settings = settings
        self._pool = pool
        self._occupancy = occupancy
        self._observer = observer
        self._version, self._instance = version, instance

    async def plan_round(self, _requests: object, context: grpc.aio.ServicerContext) -> bytes:
        """Plans a round in a worker; the body is read once the call is admitted."""
        began, job, peer = time.perf_counter(), caller.get().job, context.peer()
        try:
            _require_deadline(context)
            with self._occupancy.call(context):
                data = await context.read()
                if data is grpc.aio.EOF and not context.peer():  # gRPC itself has ended the call
                    raise CallError(
                        "RESOURCE_EXHAUSTED",
                        "limit",
                        f"the message has more than {self._settings.max_message_bytes} bytes, or the caller has gone; "
                        "raise the balancer's max_message_bytes",
                    )
                if data is grpc.aio.EOF:
                    raise CallError("INVALID_ARGUMENT", "request", "the call has no message; send a PlanRoundRequest")
                with self._occupancy.body(len(data)):
                    packed, response = await self._pool.plan(job, data)
        except CallError as error:
            await self.fail(context, error, job, began, peer)
        except asyncio.CancelledError:  # the deadline has passed, or the lead has planned by itself
            self._observer.failed(job, "CANCELLED", "deadline", time.perf_counter() - began)
            raise
        # Once the response is on its way.
        asyncio.get_running_loop().call_soon(self._note, job, packed, time.perf_counter() - began)
        return response

    def _note(self, job: str, packed: bytes, seconds: float) -> None:
        summary: RoundSummary = pickle.loads(packed)  # of our own process
        self._observer.planned(summary, seconds)
        log.debug("round planned", job=job, round=summary.names.round, ranks=summary.ranks, seconds=seconds)

    async def get_server_info(self, _request: bytes, context: grpc.aio.ServicerContext) -> pb.GetServerInfoResponse:
        """Who answers, and within which limits."""
        settings = self._settings
        try:
            _require_deadline(context)
        except CallError as error:
            await self.fail(context, error, "")
        return pb.GetServerInfoResponse(
            server_version=self._version,
            instance=self._instance,
            draining=self.draining,
            limits=pb.Limits(
                max_ranks=settings.max_ranks,
                max_samples=settings.max_samples,
                max_batches=settings.max_batches,
                max_message_bytes=settings.max_message_bytes,
                max_calls=settings.max_calls,
            ),
            strategies=strategies(),
        )

    async def fail(
        self,
        context: grpc.aio.ServicerContext,
        error: CallError,
        job: str,
        began: float | None = None,
        peer: str = "",
    ) -> None:
        """Ends a call that fails, and says so to whom it concerns; does not return."""
        seconds = 0.0 if began is None else time.perf_counter() - began
        self._observer.failed(job, error.status, error.reason, seconds)
        peer = peer or context.peer()
        log.info(
            "call failed", status=error.status, reason=error.reason, job=job, peer=peer, caller=network_of(peer),
            message=error.message,
        )  # fmt: skip
        await context.abort(grpc.StatusCode[error.status], error.message)

    def add_to_server(self, server: grpc.aio.Server) -> None:
        """Registers the service as the generated function does, but that rounds come and go as bytes."""
        methods = {
            # As a stream, so that nothing is read of a call that is refused.
            "PlanRound": grpc.stream_unary_rpc_method_handler(self.plan_round),
            "GetServerInfo": grpc.unary_unary_rpc_method_handler(
                self.get_server_info, None, pb.GetServerInfoResponse.SerializeToString
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))


class Health(health.aio.HealthServicer):  # type: ignore[misc]
    """The library's, with a bound on who watches."""

    def __init__(self, occupancy: Occupancy) -> None:
        super().__init__()
        self._occupancy = occupancy

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext) -> None:  # noqa: N802
        """The state of a service, and again when it changes."""
        try:
            with self._occupancy.call(context):
                await super().Watch(request, context)
        except CallError as error:
            await context.abort(grpc.StatusCode[error.status], error.message)


def _require_deadline(context: grpc.aio.ServicerContext) -> None:
    left = context.time_remaining()
    if left is None:
        raise CallError("INVALID_ARGUMENT", "deadline", "the call has no deadline; set one")
    if left <= 0:
        raise CallError("DEADLINE_EXCEEDED", "deadline", "the deadline has passed; set a later one")
