"""What every HTTP request passes, as one ASGI middleware: counts, rates, tokens, sizes of bodies."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import structlog
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from evenkeel.placement import InvalidInputError
from services.planner.metrics import Metrics
from services.planner.problems import ServiceError
from services.planner.settings import Settings
from services.security.rates import Buckets, network_of
from services.security.tokens import AuthenticationError, TokenStore

log = structlog.get_logger(__name__)

_OPEN_TO_ALL = frozenset({"/healthz", "/readyz"})
_CLOSE = {"Connection": "close"}  # the body of a refused request is not read


class Edge:
    """Lets requests through that have a valid token and a body of a size that fits, up to a rate per address.

    Health and the page need no token.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        settings: Settings,
        metrics: Metrics,
        tokens: TokenStore | None = None,
        routes: Sequence[Route] = (),
        burst: float = 200.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app, self._settings, self._metrics, self._tokens, self._clock = app, settings, metrics, tokens, clock
        self._routes = routes
        self._buckets = Buckets(rate=settings.requests_per_second, burst=burst)
        self._held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin, status, seen = time.perf_counter(), 499, 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            size = len(message.get("body", b""))
            seen += size
            self._held_bytes += size
            self._check_size(seen)
            if self._held_bytes > self._settings.max_held_body_bytes:
                detail = f"requests of {self._held_bytes} bytes wait for answers; try again in 5 s"
                raise ServiceError(503, "Overloaded", detail, headers={"Retry-After": "5", **_CLOSE})
            return message

        async def noted(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            self._check(scope)
            await self._app(scope, counted, noted)
        except ServiceError as error:
            await error.response(scope["path"])(scope, receive, noted)
        except Exception:
            status = 500  # which is answered outside of this
            raise
        finally:
            self._held_bytes -= seen
            name = next((known.path for known in self._routes if known.endpoint is scope.get("endpoint")), "other")
            self._metrics.requests.labels(name, str(status)).inc()
            self._metrics.seconds.labels(name).observe(time.perf_counter() - begin)

    def _check(self, scope: Scope) -> None:
        if scope["path"] in _OPEN_TO_ALL:
            return
        client = scope.get("client")
        address = network_of(client[0]) if client else "unknown"
        if not self._buckets.try_take(address, self._clock()):
            rate = self._settings.requests_per_second
            detail = f"more than {rate:g} requests a second from one address; slow down"
            raise ServiceError(429, "Too many requests", detail, headers={"Retry-After": "1", **_CLOSE})
        headers = [value for name, value in scope["headers"] if name == b"authorization"]
        # The page's files hold no secrets, and without a token it can do nothing but ask for one.
        is_page = scope["method"] in ("GET", "HEAD") and (scope["path"] == "/" or scope["path"].startswith("/page/"))
        try:
            if len(headers) > 1:
                raise AuthenticationError("more than one authorization header: send one")
            if self._tokens is not None and not is_page:
                header = headers[0].decode("utf-8", "replace") if headers else None
                scope.setdefault("state", {})["identity"] = self._tokens.authenticate(header, "planner")
        except AuthenticationError as error:
            log.warning("request refused", reason="token", peer=address, caller=address)
            told = {"WWW-Authenticate": "Bearer", **_CLOSE}
            raise ServiceError(401, "Unauthorized", str(error), headers=told) from None
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        self._check_size(int(announced) if announced.isdigit() else 0)

    def _check_size(self, size: int) -> None:
        most = self._settings.max_body_bytes
        if size > most:
            remedy = f"send at most {most} bytes: fewer tables at once or coarser histograms"
            wrong = InvalidInputError("body", size, "has too many bytes", remedy)
            raise ServiceError(413, "Too large", wrong)
