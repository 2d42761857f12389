"""`/metrics`, `/healthz` and `/readyz` on a port of their own, answered also while the service is busy."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

_TIMEOUT_SECONDS = 10.0
_MAX_CONNECTIONS = 64
_RENDERED_A_SECOND = 10


class OperationsServer:
    """Serves a registry and the state of a service.

    Attributes:
        port: The bound port.
    """

    def __init__(self, registry: CollectorRegistry, host: str, port: int, *, ready: Callable[[], bool]) -> None:
        """Starts serving.

        Args:
            registry: The metrics.
            host: Address to listen on.
            port: Port to listen on; 0 picks a free one.
            ready: Whether the service takes work; false while it starts or drains. `/readyz` answers 503 then.

        Raises:
            OSError: If the port cannot be had.
        """

        class Handler(_Handler):
            metrics = _Rendered(registry)
            is_ready = staticmethod(ready)

        try:
            self._server = _Server((host, port), Handler)
        except OSError as error:
            raise OSError(
                f"cannot listen on {host}:{port} for metrics: choose another host or port ({error})"
            ) from error
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="operations", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Rendered:
    """The metrics as text, made by one thread at a time and so often a second: the interpreter is the service's too."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._lock = threading.Lock()
        self._made: deque[float] = deque(maxlen=_RENDERED_A_SECOND)
        self._answers: dict[str, tuple[str, bytes]] = {}  # the latest, by format

    def answer(self, accepts: str) -> tuple[str, bytes]:
        """The format that a scraper accepts, and the metrics in it, as they are or as they were within this second."""
        encode, kind = choose_encoder(accepts)
        with self._lock:
            now = time.monotonic()
            if kind not in self._answers or len(self._made) < _RENDERED_A_SECOND or now - self._made[0] > 1.0:
                self._made.append(now)
                self._answers[kind] = kind, encode(self._registry)
            return self._answers[kind]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._connected: dict[socket.socket, None] = {}
        self._lock = threading.Lock()
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Gives a connection a thread; beyond so many the oldest is let go, so that a scrape always gets in."""
        with self._lock:
            self._connected[request] = None
            oldest = next(iter(self._connected)) if len(self._connected) > _MAX_CONNECTIONS else None
            if oldest is not None:
                del self._connected[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Ends a connection."""
        with self._lock:
            self._connected.pop(request, None)
            super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Connections that break are not worth a line."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    metrics: ClassVar[_Rendered]
    is_ready: ClassVar[staticmethod[[], bool]]
    timeout = _TIMEOUT_SECONDS  # of a read or write: who trickles is let go
    server_version, sys_version = "evenkeel", ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            self._answer(200, *self.metrics.answer(self.headers.get("Accept", "")))
        elif path == "/healthz":
            self._answer(200, "text/plain; charset=utf-8", b"ok\n")
        elif path == "/readyz":
            ready = type(self).is_ready()
            self._answer(200 if ready else 503, "text/plain; charset=utf-8", b"ready\n" if ready else b"not ready\n")
        else:
            self._answer(404, "text/plain; charset=utf-8", b"there are /metrics, /healthz and /readyz\n")

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None:
        """Scrapes are not worth a line."""

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
