"""Puts a balancer together, runs it, and takes it down again."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import secrets
from collections.abc import Sequence

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

import evenkeel
from services.balancer.access import SERVICE, AccessInterceptor, Occupancy
from services.balancer.people import open_people
from services.balancer.servicer import BalancerServicer, Health
from services.balancer.settings import PREFIX, Settings, load_settings
from services.balancer.workers import WorkerPool
from services.operations.process import keep_memory
from services.operations.program import run_service, stop_on_signals, write_port
from services.security.tokens import TokenStore
from services.security.transport import Transport

log = structlog.get_logger(__name__)

_QUIET_SECONDS = 10.0  # of a start, then it says what it may be doing
_CHECK_SECONDS = 1.0  # from one look at the files of TLS to the next, at least
_WINDOW_BYTES = 4 << 20  # that a client may send of a call before it is read
_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name


def main(arguments: Sequence[str]) -> int:
    """Runs a balancer from its command line to its end; returns the exit code."""
    keep_memory()
    return run_service(load_settings, serve, arguments)


async def serve(settings: Settings) -> int:
    """Runs a balancer until it is asked to stop; returns the exit code.

    Raises:
        ValueError: If a file of TLS or tokens cannot be used, or plaintext would be served beyond this machine without
            leave.
        OSError: If a port cannot be bound, or no worker starts.
    """
    stop = asyncio.Event()
    stop_on_signals(stop.set)
    balancer = BalancerServer(settings)
    stopping = asyncio.create_task(stop.wait())
    starting = asyncio.create_task(balancer.start())
    try:
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            return 0
        await starting
        gc.collect()
        gc.freeze()  # what was loaded to start stays
        write_port(settings.metrics_port_file, balancer.metrics_port)
        write_port(settings.port_file, balancer.port)
        await stopping
        # The process ends soon after the grace whatever hangs: this timer needs neither the event loop nor Python.
        faulthandler.dump_traceback_later(settings.grace_seconds + 2.0, exit=True)
        return 0
    finally:
        await balancer.stop()


class BalancerServer:
    """A balancer on its port: start, serve, drain.

    Attributes:
        port: The bound port, once started.
        metrics_port: The bound port of the metrics; None without.
    """

    def __init__(self, settings: Settings) -> None:
        """Prepares a balancer; must be called with an event loop running.

        Raises:
            ValueError: If a file of TLS or tokens cannot be used, or plaintext would be served beyond this machine
                without leave.
        """
        self._transport = settings.transport()
        self._transport.check(settings.host, prefix=PREFIX)
        self._tokens = None if settings.token_file is None else TokenStore(settings.token_file)
        self._settings = settings
        self._draining = False
        instance = secrets.randbits(63) | 1
        occupancy = Occupancy(max_calls=settings.max_calls, max_bytes=settings.max_bytes_in_flight)
        self._pool = WorkerPool(settings.limits(), workers=settings.workers, seconds=settings.partition_timeout_seconds)
        self.port = 0
        self._people = open_people(
            settings,
            version=evenkeel.__version__,
            instance=instance,
            draining=lambda: self._draining or not self.port,
            tokens=self._tokens,
            transport=self._transport,
            occupancy=occupancy,
            pool=self._pool,
        )
        self.metrics_port = self._people.metrics_port
        self._servicer = BalancerServicer(
            settings, self._pool, occupancy, self._people, version=evenkeel.__version__, instance=instance
        )
        self._health = Health(occupancy)
        self._server = self._build()
        log.debug("prepared", instance=instance)

    async def start(self) -> None:
        """Starts the workers, binds the port, and reports SERVING.

        Raises:
            OSError: If the port cannot be bound, or no worker starts.
        """
        settings = self._settings
        notice = asyncio.get_running_loop().call_later(
            _QUIET_SECONDS,
            lambda: log.info(
                "still_starting",
                remedy="kernels may be compiling: wait; `evenkeel warm-up` does it ahead of time",
            ),
        )
        try:
            await self._pool.start()
        finally:
            notice.cancel()
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        address = f"{host}:{settings.port}"
        try:
            if self._transport.secure:
                port = self._server.add_secure_port(address, _credentials(self._transport))
            else:
                port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {address}: choose another host or port ({error})") from error
        await self._health.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
        await self._server.start()
        self.port = port
        log.info("serving", host=settings.host, port=self.port, metrics_port=self.metrics_port)

    async def stop(self) -> None:
        """Drains: health says so, the port closes, calls under way end or are ended."""
        log.info("draining")
        self._draining = self._servicer.draining = True
        await self._health.enter_graceful_shutdown()
        await self._server.stop(self._settings.grace_seconds if self.port else None)
        self._pool.close()
        self._people.close()
        log.info("stopped")

    def _build(self) -> grpc.aio.Server:
        settings = self._settings
        server = grpc.aio.server(
            interceptors=(AccessInterceptor(self._tokens, evenkeel.__version__, self._servicer.fail),),
            maximum_concurrent_rpcs=settings.max_calls_of_all,
            compression=grpc.Compression.NoCompression,
            options=[
                ("grpc.max_receive_message_length", settings.max_message_bytes),
                ("grpc.max_send_message_length", settings.max_message_bytes),
                ("grpc.max_allowed_incoming_connections", settings.max_connections),
                ("grpc.server_handshake_timeout_ms", round(settings.handshake_seconds * 1e3)),
                ("grpc.keepalive_time_ms", round(settings.keepalive_seconds * 1e3)),
                ("grpc.keepalive_timeout_ms", round(settings.keepalive_timeout_seconds * 1e3)),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_ping_interval_without_data_ms", round(settings.min_ping_seconds * 1e3)),
                ("grpc.http2.min_recv_ping_interval_without_data_ms", round(settings.min_ping_seconds * 1e3)),
                ("grpc.so_reuseport", 0),
                # Without probing for the bandwidth, large requests arrive in half the time.
                ("grpc.http2.bdp_probe", 0),
                ("grpc.http2.lookahead_bytes", _WINDOW_BYTES),
            ],
        )
        self._servicer.add_to_server(server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        if settings.reflection:
            reflection.enable_server_reflection((SERVICE, _HEALTH, reflection.SERVICE_NAME), server)
        return server


def _credentials(transport: Transport) -> grpc.ServerCredentials:
    """Those of TLS, which follow the files: a renewed certificate holds for the connections from then on."""

    def read() -> grpc.ServerCertificateConfiguration:
        chain, key, authorities = transport.read()
        return grpc.ssl_server_certificate_configuration([(key, chain)], root_certificates=authorities)

    followed = transport.follow(check_seconds=_CHECK_SECONDS)
    return grpc.dynamic_ssl_server_credentials(
        read(), lambda: followed.load(read), require_client_authentication=transport.client_ca is not None
    )
