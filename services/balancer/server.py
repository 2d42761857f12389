"""Puts a balancer together and takes it down again."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import grpc
import structlog
from grpc_reflection.v1alpha import reflection

from evenkeel.partitioning import strategies
from evenkeel.protocol import balancer_pb2 as pb
from services.balancer import health
from services.balancer.access import AccessInterceptor
from services.balancer.health import Health
from services.balancer.hub import Hub
from services.balancer.metrics import Metrics
from services.balancer.pressure import Pressure
from services.balancer.registry import DRAINING
from services.balancer.servicer import BalancerServicer, EdgeOptions, add_to_server
from services.balancer.settings import PREFIX, Settings
from services.balancer.site import BalancerSite
from services.balancer.streams import StreamOptions
from services.balancer.tracing import open_tracer
from services.balancer.views import Place, Views
from services.balancer.workers.pool import WorkerPool
from services.balancer.workers.staff import Zygote
from services.balancer.workers.tasks import PoolOptions
from services.security.grpc_tls import server_credentials
from services.security.tokens import TokenStore

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

log = structlog.get_logger(__name__)

_MAX_WATCHES = 256
_SPARE_CALLS = 1024  # of those that are being refused
_QUIET_SECONDS = 10.0  # of a start, then it says what it may be doing
_WAITING_CONNECTIONS = 2  # whose calls may all wait to be looked at
_IDLE_CONNECTION_MS = 60_000
_TRACES_SECONDS = 2.5
_LOOK_SECONDS = 0.02  # how often whether all ranks have gone elsewhere
STREAM_WINDOW_BYTES = 1 << 16

SERVICE = pb.DESCRIPTOR.services_by_name["BalancerService"].full_name


class BalancerServer:
    """A balancer on its port: start, serve, drain.

    Attributes:
        instance: This incarnation; a restarted balancer draws another.
        port: The bound port, once started.
        metrics_port: The bound port of the metrics; None without.
        hub: The rounds.
        servicer: The gRPC edge.
        views: What people are shown of the sessions.
        metrics: What it counts.
        stopped: Whether it has been taken down.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        zygote: Zygote | None = None,
        spans: SpanProcessor | None = None,
    ) -> None:
        """Prepares a balancer; must be called with an event loop running.

        Args:
            settings: What the operator wants.
            zygote: Where the processes come from that compute plans; started if None, which is best done before this
                process has threads.
            spans: Gets the spans of traced rounds, instead of the collector that the settings name.

        Raises:
            ValueError: If the strategy does not exist, a file of TLS or tokens cannot be used, the collector's URL is
                none, or plaintext would be served beyond this machine without leave.
        """
        known = tuple(strategies())
        if settings.strategy not in known:
            raise ValueError(f"strategy is {settings.strategy!r}; use one of {', '.join(known)}")
        self._transport = settings.transport()
        self._transport.check(settings.host, prefix=PREFIX)
        tokens = None if settings.token_file is None else TokenStore(settings.token_file)
        self.instance = secrets.randbits(63) | 1
        self.port = 0
        self.stopped = False
        self.metrics_port: int | None = None
        self.metrics = Metrics(version=_version())
        self._settings = settings
        self._access = AccessInterceptor(tokens, settings.access(), refused=self.metrics.refused)
        options = PoolOptions(
            workers=settings.workers,
            queue_size=settings.queue_size,
            budget=settings.partition_timeout_seconds,
            memory_bytes=settings.worker_memory_bytes,
        )
        self._pool = WorkerPool(options, self.metrics, zygote)
        self._tracer = open_tracer(settings.trace_endpoint, instance=self.instance, processor=spans)
        traced = None if self._tracer is None else self._tracer.decided
        self.hub = Hub(settings.limits(), self._pool, self.metrics, traced=traced)
        edge = EdgeOptions(
            version=_version(),
            strategies=known,
            default_strategy=settings.strategy,
            streams=StreamOptions(
                instance=self.instance,
                max_streams=settings.max_streams,
                max_message_bytes=settings.max_message_bytes,
                join_timeout=settings.join_timeout_seconds,
            ),
            max_calls=settings.max_calls,
        )
        self.views = Views(self.hub, Place(version=_version(), instance=self.instance))
        self.servicer = BalancerServicer(self.hub, edge, self.views)
        self._tokens = tokens
        self._health = Health(("", SERVICE), max_watches=_MAX_WATCHES)
        self._server: grpc.aio.Server | None = None
        self._pressure: Pressure | None = None
        self._stop_metrics: Callable[[], None] | None = None

    async def start(self) -> None:
        """Binds the port, compiles what needs compiling, and reports SERVING.

        Raises:
            OSError: If the port cannot be bound.
        """
        settings = self._settings
        # A round that met a kernel not yet compiled would be taken for stuck: the port opens when all is compiled.
        say = partial(
            log.info,
            "still_starting",
            remedy="kernels may be compiling: wait; `evenkeel warm-up` does it ahead of time",
        )
        notice = asyncio.get_running_loop().call_later(_QUIET_SECONDS, say)
        try:
            await self._pool.start()
        finally:
            notice.cancel()
        self._server = self._build()
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        address = f"{host}:{settings.port}"
        try:
            if self._transport.secure:
                self.port = self._server.add_secure_port(address, server_credentials(self._transport))
            else:
                self.port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {address}: choose another host or port ({error})") from error
        await self._server.start()
        self._access.start()
        self._pressure = Pressure(self.servicer.streams, settings.max_memory, ended=self.metrics.streams_ended)
        if settings.metrics_port is not None:
            try:
                self.metrics_port, self._stop_metrics = self.metrics.serve(
                    settings.metrics_host,
                    settings.metrics_port,
                    ready=lambda: not self.hub.registry.draining,
                    site=BalancerSite(
                        self.views, transport=self._transport, tokens=self._tokens, refused=self.metrics.refused
                    ),
                )
            except OSError:
                await self._server.stop(None)  # else it complains of the loop's end
                raise
        self.metrics.lag.start()
        self.metrics.observe("evenkeel_balancer_sessions", "Sessions.", lambda: len(self.hub.registry.sessions))
        self.metrics.observe("evenkeel_balancer_open_rounds", "Rounds that wait for ranks or for a plan.", self._open)
        self.metrics.observe(
            "evenkeel_balancer_queued_partitions", "Plans that wait for a worker.", lambda: self._pool.queued
        )
        self.metrics.observe(
            "evenkeel_balancer_slow_ranks",
            "Ranks known to compute more slowly than their job's median, or to get their batches later.",
            self._slow,
        )
        self.metrics.observe("evenkeel_balancer_streams", "Open streams.", lambda: len(self.servicer.streams))
        registry, servicer = self.hub.registry, self.servicer
        for what, unit, shares in (
            ("memory", "_bytes", registry.memory),
            ("session_slots", "", registry.slots),
            ("stream_slots", "", servicer.streams.slots),
            ("call_slots", "", servicer.calls),
        ):
            self.metrics.observe_shares(what, unit, shares)
        log.info("serving", host=settings.host, port=self.port, metrics_port=self.metrics_port, instance=self.instance)

    async def stop(self) -> None:
        """Drains: the port closes, ranks go elsewhere while rounds go on, who waits is answered, streams end."""
        assert self._server is not None
        grace, streams = self._settings.grace_seconds, self.servicer.streams
        log.info("draining", streams=len(streams))
        self._health.drain()
        self.hub.leave_for_others()
        ended = asyncio.ensure_future(self._server.stop(grace))  # who comes now finds another balancer
        await self._until_moved(len(streams), min(self._settings.drain_seconds, grace / 2), grace / 2)
        self.hub.drain()
        streams.close(DRAINING)
        # Whatever a peer does or leaves undone, each step ends: what is left then ends with the process.
        await _within(grace * 3 / 8, self._server.stop(grace / 4), "calls")
        self._access.stop()
        if self._pressure is not None:
            self._pressure.stop()
        self.metrics.lag.stop()
        self.hub.close()
        self._pool.close()
        if self._stop_metrics is not None:
            await _within(grace / 8, asyncio.to_thread(self._stop_metrics), "metrics")
        if self._tracer is not None:
            await _within(_TRACES_SECONDS, asyncio.to_thread(self._tracer.close), "traces")
        ended.cancel()
        self.stopped = True
        log.info("stopped")

    async def _until_moved(self, streams: int, patience: float, most: float) -> None:
        """Returns when no rank has anything left here, or may have gone elsewhere and has not."""
        loop = asyncio.get_running_loop()
        registry, began = self.hub.registry, loop.time()
        while (waited := loop.time() - began) < most and registry.is_awaited(patient=waited < patience):
            await asyncio.sleep(_LOOK_SECONDS)
        log.debug("drained", streams=streams, left=len(self.servicer.streams), seconds=loop.time() - began)

    def _open(self) -> float:
        # The scrape comes from another thread: what the loop changes meanwhile is counted next time.
        return sum(len(session.open_rounds) for session in list(self.hub.registry.sessions.values()))

    def _slow(self) -> float:
        sessions = list(self.hub.registry.sessions.values())
        return sum(session.statistics.last_learned.num_slow for session in sessions)

    def _build(self) -> grpc.aio.Server:
        settings = self._settings
        server = grpc.aio.server(
            interceptors=(self._access,),
            # Health checks and unary calls must still get through when all streams are in use.
            maximum_concurrent_rpcs=settings.max_streams + settings.max_calls + _MAX_WATCHES + _SPARE_CALLS,
            options=[
                ("grpc.max_receive_message_length", settings.max_message_bytes),
                ("grpc.max_send_message_length", settings.max_message_bytes),
                ("grpc.max_concurrent_streams", settings.max_streams),
                # gRPC drops calls that wait to be looked at, also those of others, without saying why: not before there
                # are more than one connection may open.
                ("grpc.server.max_pending_requests", _WAITING_CONNECTIONS * settings.max_streams),
                ("grpc.server.max_pending_requests_hard_limit", 2 * _WAITING_CONNECTIONS * settings.max_streams),
                ("grpc.max_connection_idle_ms", _IDLE_CONNECTION_MS),
                # What a client may send before it is read is the same for all.
                ("grpc.http2.bdp_probe", 0),
                ("grpc.http2.lookahead_bytes", STREAM_WINDOW_BYTES),
                ("grpc.keepalive_time_ms", round(settings.keepalive_seconds * 1e3)),
                ("grpc.keepalive_timeout_ms", round(settings.keepalive_timeout_seconds * 1e3)),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_ping_interval_without_data_ms", round(settings.min_ping_seconds * 1e3)),
                ("grpc.http2.min_recv_ping_interval_without_data_ms", round(settings.min_ping_seconds * 1e3)),
                ("grpc.max_allowed_incoming_connections", settings.max_connections),
                ("grpc.server_handshake_timeout_ms", round(settings.handshake_seconds * 1e3)),
                ("grpc.so_reuseport", 0),
            ],
        )
        add_to_server(self.servicer, server)
        self._health.add_to_server(server)
        if settings.reflection:
            names = (SERVICE, health.SERVICE, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, server)
        return server


async def _within(seconds: float, step: Coroutine[Any, Any, object], name: str) -> None:
    """Takes a step of the end, but goes on without it after some time."""
    task = asyncio.ensure_future(step)
    done, _ = await asyncio.wait({task}, timeout=seconds)
    if not done:
        log.warning("did not end in time, going on without it", what=name, seconds=seconds)


def _version() -> str:
    try:
        return version("evenkeel")
    except PackageNotFoundError:
        return "unpackaged"
