"""`python -m services.planner`: serves until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import contextlib
import sys

import structlog
import uvicorn

from services.operations.http import OperationsServer
from services.operations.program import run_service, stop_on_signals, write_port
from services.planner.app import create_app
from services.planner.settings import PREFIX, Settings, load_settings
from services.security.http_server import follow_certificates, impatient_protocol

log = structlog.get_logger(__name__)


class _Server(uvicorn.Server):
    """A server that leaves signals to `serve`, and tells its port once it listens."""

    settings: Settings
    operations: OperationsServer | None = None

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        yield

    async def startup(self, *arguments: object, **options: object) -> None:
        """Starts the application's processes, then listens."""
        await super().startup(*arguments, **options)  # type: ignore[arg-type]
        port = int(self.servers[0].sockets[0].getsockname()[1])
        write_port(self.settings.metrics_port_file, None if self.operations is None else self.operations.port)
        write_port(self.settings.port_file, port)
        log.info("planner_ready", host=self.settings.host, port=port)


async def serve(settings: Settings) -> int:
    """Runs a planner until it is asked to stop; returns the exit code."""
    transport = settings.transport()
    transport.check(settings.host, prefix=PREFIX)
    app = create_app(settings)
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
    server = _Server(config)
    server.settings = settings

    def stop() -> None:
        app.state.ready = False
        server.should_exit = True

    stop_on_signals(stop)
    with contextlib.ExitStack() as stack:
        if settings.metrics_port is not None:
            registry, host, port = app.state.metrics.registry, settings.metrics_host, settings.metrics_port
            server.operations = OperationsServer(registry, host, port, ready=lambda: bool(app.state.ready))
            stack.callback(server.operations.close)
        if transport.secure:
            config.load()
            config.ssl = transport.context()
            renewal = asyncio.create_task(follow_certificates(transport, config.ssl))
            stack.callback(renewal.cancel)
        try:
            await server.serve()
        except SystemExit:  # uvicorn's way to say that the address could not be had; it has logged why
            log.error("cannot_listen", host=settings.host, port=settings.port)
            return 1
    log.info("planner_stopped")
    return 0


if __name__ == "__main__":
    sys.exit(run_service(load_settings, serve, sys.argv[1:]))
