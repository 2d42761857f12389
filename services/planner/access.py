"""Who may ask an HTTP service, how often and how much, as ASGI middlewares; health and the page need no token."""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.planner.problems import FieldProblem, ServiceError, problem_response
from services.security.addresses import network_of
from services.security.rates import Buckets
from services.security.tokens import AuthenticationError, TokenStore

log = structlog.get_logger(__name__)

_OPEN_TO_ALL = frozenset({"/healthz", "/readyz"})


class Head:
    """Answers HEAD as GET: the server leaves out the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        head = scope["type"] == "http" and scope["method"] == "HEAD"
        await self._app({**scope, "method": "GET"} if head else scope, receive, send)


class Access:
    """Lets requests through that have a token that holds, up to a rate per address; others get a problem document."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        tokens: TokenStore | None,
        service: str = "planner",
        requests_per_second: float = 50.0,
        burst: float = 200.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Wraps an application.

        Args:
            app: The application.
            tokens: Who may ask; None: everybody, within the rate.
            service: The name of the service in the token file.
            requests_per_second: Requests of one address, on average.
            burst: The same at once.
            clock: Seconds.
        """
        self._app = app
        self._tokens = tokens
        self._service = service
        self._rate = requests_per_second
        self._buckets = Buckets(rate=requests_per_second, burst=burst)
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http" or scope["path"] in _OPEN_TO_ALL:
            await self._app(scope, receive, send)
            return
        client = scope.get("client")
        address = network_of(client[0]) if client else "unknown"
        if not self._buckets.try_take(address, self._clock()):
            detail = f"more than {self._rate:g} requests a second from one address; slow down"
            await _refusal(scope, 429, "Too many requests", detail, {"Retry-After": "1"})(scope, receive, send)
            return
        if self._tokens is not None and not _is_page(scope):
            headers = [value for name, value in scope["headers"] if name == b"authorization"]
            try:
                if len(headers) > 1:
                    raise AuthenticationError("more than one authorization header: send one")
                header = headers[0].decode("utf-8", "replace") if headers else None
                identity = self._tokens.authenticate(header, self._service)
            except AuthenticationError as error:
                log.warning("request refused", reason="token", peer=address, caller=address)
                headed = {"WWW-Authenticate": "Bearer"}
                await _refusal(scope, 401, "Unauthorized", str(error), headed)(scope, receive, send)
                return
            scope = {**scope, "state": {**scope.get("state", {}), "identity": identity}}
        await self._app(scope, receive, send)


class BodyLimit:
    """Refuses bodies above a size, by their announced length or while they arrive, and more than can be held."""

    def __init__(self, app: ASGIApp, max_bytes: int, max_held_bytes: int) -> None:
        """Wraps an application.

        Args:
            app: The application.
            max_bytes: Of one body.
            max_held_bytes: Of all bodies that have arrived and are not answered.
        """
        self.app, self.max_bytes, self.max_held_bytes = app, max_bytes, max_held_bytes
        self.held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > self.max_bytes:
            error = self._too_large(int(announced))
            path = scope["path"]
            refusal = problem_response(path, error.status, error.kind, error.title, error.detail, error.errors)
            await refusal(scope, receive, send)
            return
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            size = len(message.get("body", b""))
            seen += size
            self.held += size
            if seen > self.max_bytes:
                raise self._too_large(seen)
            if self.held > self.max_held_bytes:
                detail = f"requests of {self.held} bytes wait for answers; try again in 5 s"
                raise ServiceError(503, "overloaded", "Overloaded", detail, {"Retry-After": "5", "Connection": "close"})
            return message

        try:
            await self.app(scope, counted, send)
        finally:
            self.held -= seen

    def _too_large(self, size: int) -> ServiceError:
        remedy = f"send at most {self.max_bytes} bytes: fewer tables at once or coarser histograms"
        wrong = FieldProblem.of("body", size, "has too many bytes", remedy)
        return ServiceError(413, "too-large", "Body too large", wrong.sentence, errors=(wrong,))


def _is_page(scope: Scope) -> bool:
    """The page's own files hold no secrets, and without a token it can do nothing but ask for one."""
    return scope["method"] in ("GET", "HEAD") and (scope["path"] == "/" or scope["path"].startswith("/page/"))


def _refusal(scope: Scope, status: int, title: str, detail: str, header: dict[str, str]) -> Response:
    # The body of a refused request is not read: the connection ends instead.
    kind = title.lower().replace(" ", "-")
    return problem_response(scope["path"], status, kind, title, detail, headers={"Connection": "close", **header})
