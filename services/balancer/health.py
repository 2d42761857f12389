"""`grpc.health.v1`: whether the balancer serves. Needs no token, so it must not be able to hold anything up."""

from __future__ import annotations

import asyncio

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from services.balancer.access import Guard
from services.balancer.shares import Shares

SERVICE = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
_MAX_REQUEST_BYTES = 1024
_Status = health_pb2.HealthCheckResponse


class Health:
    """The state of the services by name.

    Attributes:
        watches: How many may watch at a time.
    """

    def __init__(self, services: tuple[str, ...], *, max_watches: int) -> None:
        """Starts serving.

        Args:
            services: Names that may be asked for.
            max_watches: Watches at a time.
        """
        self.watches = Shares(max_watches)
        self._services = services
        self._status = _Status.SERVING
        self._changed = asyncio.Event()

    def drain(self) -> None:
        """From now on nothing serves. Whoever watches is told; nobody is waited for."""
        self._status = _Status.NOT_SERVING
        self._changed.set()

    async def check(self, request: health_pb2.HealthCheckRequest, context: Guard) -> health_pb2.HealthCheckResponse:
        """The state of a service."""
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return _Status(status=self._status)

    async def watch(self, request: health_pb2.HealthCheckRequest, context: Guard) -> None:
        """The state of a service, and again when it changes."""
        holder = (context.caller.name, "")
        if not self.watches.take(holder):
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{self.watches.held(holder[0])} watches of this caller, as many as are left to it: use Check",
            )
        try:
            known = request.service in self._services
            await context.write(_Status(status=self._status if known else _Status.SERVICE_UNKNOWN))
            if self._status != _Status.NOT_SERVING:
                await self._changed.wait()
                if known:
                    await context.write(_Status(status=self._status))
            await asyncio.get_running_loop().create_future()  # until the client or the server has had enough
        finally:
            self.watches.give(holder)

    def add_to_server(self, server: grpc.aio.Server) -> None:
        """Registers the service."""
        methods = {
            "Check": grpc.unary_unary_rpc_method_handler(self.check, _read, _Status.SerializeToString),
            "Watch": grpc.unary_stream_rpc_method_handler(self.watch, _read, _Status.SerializeToString),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))


def _read(data: bytes) -> health_pb2.HealthCheckRequest:
    if len(data) > _MAX_REQUEST_BYTES:
        raise DecodeError("no name of a service is so long")
    return health_pb2.HealthCheckRequest.FromString(data)
