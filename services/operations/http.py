"""`/metrics`, `/healthz` and `/readyz` on a port of their own, answered also while the service is busy.

A service may have a site there too: what it answers to the other paths. Where it has TLS, the port takes both: whoever
begins a handshake gets one, and scrapers and probes go on in plaintext; the site decides what it tells to whom.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar, Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

_TIMEOUT_SECONDS = 10.0
_MAX_CONNECTIONS = 64
_HANDSHAKE = b"\x16"  # the first byte of TLS, and of no request


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a site is asked.

    Attributes:
        target: Path and query.
        headers: By name in lower case; the last of several.
        peer: The address of who asks.
        is_secure: Whether it came over TLS.
    """

    target: str
    headers: Mapping[str, str]
    peer: str
    is_secure: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """What a site answers.

    Attributes:
        status: Of HTTP.
        kind: Media type of the body.
        body: The content.
        headers: Others, by name.
    """

    status: int = 200
    kind: str = "text/plain; charset=utf-8"
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


class Site(Protocol):
    """What a service has beside its metrics."""

    def answer(self, request: Request) -> Response | None:
        """The answer to a GET, from any thread; None where there is nothing."""

    def tls(self) -> ssl.SSLContext | None:
        """With what connections are encrypted that ask for it."""


class OperationsServer:
    """Serves a registry and the state of a service.

    Attributes:
        port: The bound port.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        host: str,
        port: int,
        *,
        ready: Callable[[], bool],
        site: Site | None = None,
    ) -> None:
        """Starts serving.

        Args:
            registry: The metrics.
            host: Address to listen on.
            port: Port to listen on; 0 picks a free one.
            ready: Whether the service takes work; false while it starts or drains. `/readyz` answers 503 then.
            site: Answers the other paths.

        Raises:
            OSError: If the port cannot be had.
        """

        class Handler(_Handler):
            metrics = registry
            is_ready = staticmethod(ready)

        Handler.site = site
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

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Answers a connection, encrypted if it begins so."""
        request.settimeout(_TIMEOUT_SECONDS)
        if request.recv(1, socket.MSG_PEEK) != _HANDSHAKE:
            super().finish_request(request, client_address)
            return
        site = self.RequestHandlerClass.site  # type: ignore[attr-defined]
        context = None if site is None else site.tls()
        if context is None:
            return
        # A socket of its own: the plain one has no descriptor any more.
        encrypted = context.wrap_socket(request, server_side=True)
        with self._lock:
            self._connected.pop(request, None)
            self._connected[encrypted] = None
        try:
            super().finish_request(encrypted, client_address)
        finally:
            self.shutdown_request(encrypted)

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
    metrics: ClassVar[CollectorRegistry]
    is_ready: ClassVar[staticmethod[[], bool]]
    site: ClassVar[Site | None] = None
    timeout = _TIMEOUT_SECONDS  # of a read or write: who trickles is let go
    server_version, sys_version = "evenkeel", ""

    def do_GET(self) -> None:
        response = self._response()
        self.send_response(response.status)
        self.send_header("Content-Type", response.kind)
        for name, value in response.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(response.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(response.body)

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None:
        """Scrapes are not worth a line."""

    def _response(self) -> Response:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            encode, kind = choose_encoder(self.headers.get("Accept", ""))
            return Response(kind=kind, body=encode(self.metrics))
        if path == "/healthz":
            return Response(body=b"ok\n")
        if path == "/readyz":
            return Response(body=b"ready\n") if type(self).is_ready() else Response(status=503, body=b"not ready\n")
        request = Request(
            target=self.path,
            headers={name.lower(): value for name, value in self.headers.items()},
            peer=str(self.client_address[0]),
            is_secure=isinstance(self.connection, ssl.SSLSocket),
        )
        response = None if self.site is None else self.site.answer(request)
        return response or Response(status=404, body=b"there are /metrics, /healthz and /readyz\n")
