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
    """A server that leaves signals to `serve` and knows its port."""

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        yield

    @property
    def port(self) -> int:
        """The bound port."""
        return int(self.servers[0].sockets[0].getsockname()[1])


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
                ready=lambda: bool(app.state.ready),
            )
            stack.callback(operations.close)
        if transport.secure:
            config.load()
            config.ssl = transport.context()
            renewal = asyncio.create_task(follow_certificates(transport, config.ssl))
            stack.callback(renewal.cancel)
        serving = asyncio.create_task(_run(server))
        while not server.started:  # the application's processes have started by then
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
