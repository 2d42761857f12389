"""`python -m services.planner`: serves until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import contextlib
import sys

import structlog
import uvicorn
from starlette.types import ASGIApp

from services.operations.program import run_service, stop_on_signals, write_port
from services.planner.app import create_app, create_metrics_app
from services.planner.settings import PREFIX, Settings, load_settings
from services.security.http_protocol import impatient_protocol
from services.security.renewal import follow_certificates

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


def _server(app: ASGIApp, host: str, port: int, drain: float, lifespan: str, connections: int) -> _Server:
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_config=None,
        access_log=False,
        lifespan="on" if lifespan == "on" else "off",
        timeout_graceful_shutdown=max(1, round(drain)),
        server_header=False,
        http=impatient_protocol(max_connections=connections),
    )
    return _Server(config)


async def serve(settings: Settings) -> int:
    """Runs a planner until the process is asked to stop; returns the exit code."""
    transport, limit = settings.transport(), settings.max_connections
    transport.check(settings.host, prefix=PREFIX)
    app = create_app(settings)
    servers = [_server(app, settings.host, settings.port, settings.drain_seconds, "on", limit)]
    files = [settings.port_file]
    if settings.metrics_port is not None:
        metrics = _server(create_metrics_app(app), settings.metrics_host, settings.metrics_port, 1, "off", limit)
        servers.append(metrics)
        files.append(settings.metrics_port_file)

    def stop() -> None:
        app.state.ready = False
        for server in servers:
            server.should_exit = True

    stop_on_signals(stop)
    if transport.secure:
        servers[0].config.load()
        servers[0].config.ssl = transport.context()
        renewal = asyncio.create_task(follow_certificates(transport, servers[0].config.ssl))
    tasks = [asyncio.create_task(_run(server)) for server in servers]
    while not all(server.started for server in servers):
        if any(task.done() for task in tasks):
            stop()
            await asyncio.gather(*tasks)
            return 1
        await asyncio.sleep(0.01)
    for server, file in zip(servers, files, strict=True):
        write_port(file, server.port)
    log.info("planner_ready", host=settings.host, port=servers[0].port)
    await asyncio.gather(*tasks)
    if transport.secure:
        renewal.cancel()
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
