"""`python -m services.planner`: serves until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Coroutine
from typing import Any

import structlog
import uvicorn
from starlette.types import ASGIApp

from services.operations.http import OperationsServer
from services.operations.nursery import Zygote
from services.operations.program import run_service, stop_on_signals, write_port
from services.planner import worker
from services.planner.app import create_app
from services.planner.settings import PREFIX, Settings, load_settings
from services.security.http_server import follow_certificates, impatient_protocol

log = structlog.get_logger(__name__)


class _Server(uvicorn.Server):
    """A server that leaves signals to `serve` and tells its port."""

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        yield

    @property
    def port(self) -> int:
        """The bound port."""
        return int(self.servers[0].sockets[0].getsockname()[1])


def _server(app: ASGIApp, settings: Settings) -> _Server:
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        log_config=None,
        access_log=False,
        lifespan="on",
        timeout_graceful_shutdown=max(1, round(settings.drain_seconds)),
        server_header=False,
        http=impatient_protocol(max_connections=settings.max_connections),
    )
    return _Server(config)


def serve(settings: Settings) -> Coroutine[Any, Any, int]:
    """Forks the workers' zygote; what it returns runs a planner until it is asked to stop, to the exit code."""
    settings.transport().check(settings.host, prefix=PREFIX)
    return _serve(settings, Zygote.begin(worker.__name__, worker.TRADE))


async def _serve(settings: Settings, zygote: Zygote) -> int:
    transport = settings.transport()
    app = create_app(settings, zygote=zygote)
    server = _server(app, settings)

    def stop() -> None:
        app.state.ready = False
        server.should_exit = True

    stop_on_signals(stop)
    with contextlib.ExitStack() as stack:
        operations = None
        if settings.metrics_port is not None:
            operations = OperationsServer(
                app.state.metrics.registry,
                settings.metrics_host,
                settings.metrics_port,
                ready=lambda: bool(app.state.ready and app.state.solvers.is_ready),
            )
            stack.callback(operations.close)
        if transport.secure:
            server.config.load()
            server.config.ssl = transport.context()
            renewal = asyncio.create_task(follow_certificates(transport, server.config.ssl))
            stack.callback(renewal.cancel)
        serving = asyncio.create_task(_run(server))
        while not (server.started and app.state.solvers.is_ready):
            if serving.done():
                return 1
            await asyncio.sleep(0.01)
        write_port(settings.metrics_port_file, None if operations is None else operations.port)
        write_port(settings.port_file, server.port)
        log.info("planner_ready", host=settings.host, port=server.port)
        await serving
    log.info("planner_stopped")
    return 0


async def _run(server: _Server) -> None:
    try:
        await server.serve()
    except SystemExit:
        # uvicorn's way to say that the address could not be had; it has logged why.
        log.error("cannot_listen", host=server.config.host, port=server.config.port)


if __name__ == "__main__":
    sys.exit(run_service(load_settings, serve, sys.argv[1:]))
