"""The balancer's page beside its metrics, and what the page reads: docs/operate/watching.md documents it. Read-only.

Tokens and TLS are those of the balancer. The page's own files hold no secrets, and without a token it can do nothing
but ask for one. In plaintext nothing is shown to other machines, unless the operator allows plaintext: who is forwarded
to this machine, as by `kubectl port-forward` or `ssh -L`, is on it.
"""

from __future__ import annotations

import json
import ssl
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from evenkeel.credentials import is_loopback
from services.balancer.history import StreamName
from services.balancer.views import Views
from services.operations.http import Request, Response
from services.security.rates import Buckets, network_of
from services.security.tokens import AuthenticationError, Identity, TokenStore
from services.security.transport import Transport

_FOLDER = Path(__file__).parent / "page"
_MEDIA_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # files of two versions never meet
}
_DATA_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
_REQUESTS_PER_SECOND, _BURST = 10.0, 200.0
_MOST_FIELDS = 8  # of a query
_ANYBODY = Identity(name="", jobs=("*",))


class _ProblemError(Exception):
    def __init__(self, status: int, detail: str, **headers: str) -> None:
        super().__init__(detail)
        self.status, self.detail, self.headers = status, detail, headers


class BalancerSite:
    """Answers what is asked beside `/metrics`."""

    def __init__(
        self,
        views: Views,
        *,
        transport: Transport,
        tokens: TokenStore | None,
        refused: Callable[[str, str], None] = lambda _status, _reason: None,
    ) -> None:
        """Reads the page's files.

        Args:
            views: What there is to see.
            transport: How the balancer may be reached.
            tokens: Who may see what; None: everybody everything.
            refused: Called at each refusal with status and reason, as of calls.

        Raises:
            ValueError: If a file of TLS cannot be used.
        """
        self._views = views
        self._transport = transport
        self._tokens = tokens
        self._refused = refused
        self._lock = threading.Lock()
        self._rates = Buckets(rate=_REQUESTS_PER_SECOND, burst=_BURST)
        self._followed = transport.follow()
        self._context = transport.context() if transport.secure else None
        self._files = {file.name: file.read_bytes() for file in _FOLDER.iterdir() if file.suffix in _MEDIA_TYPES}

    def tls(self) -> ssl.SSLContext | None:
        """With what connections are encrypted; a renewed certificate holds from the next one on."""
        if self._context is not None:
            with self._lock:
                self._context = self._followed.load(self._transport.context) or self._context
        return self._context

    def answer(self, request: Request) -> Response | None:
        """The answer to a GET; None where there is nothing."""
        try:
            url = urlsplit(request.target)
            fields = parse_qs(url.query, keep_blank_values=True, max_num_fields=_MOST_FIELDS)
        except ValueError as error:
            return _problem(_ProblemError(400, f"the address cannot be read: {error}"))
        query = {name: values[-1] for name, values in fields.items()}
        try:
            if url.path == "/" or url.path.startswith("/page/"):
                return self._file(request, url.path.removeprefix("/page/") if url.path != "/" else "index.html")
            if url.path == "/v1/streams":
                return _json(self._views.overview(self._identify(request).allows))
            return _json(self._stream(self._identify(request), query)) if url.path == "/v1/stream" else None
        except _ProblemError as problem:
            return _problem(problem)

    def _file(self, request: Request, name: str) -> Response | None:
        if name not in self._files:
            return None
        host = request.headers.get("host")
        if self._transport.secure and not self._may_read_plainly(request) and host:
            return Response(status=307, headers={"Location": f"https://{host}{request.target}"})
        kind = f"{_MEDIA_TYPES[Path(name).suffix]}; charset=utf-8"
        return Response(kind=kind, body=self._files[name], headers=_PAGE_HEADERS)

    def _may_read_plainly(self, request: Request) -> bool:
        allowed = self._transport.allow_plaintext and not self._transport.secure
        return request.is_secure or is_loopback(request.peer) or allowed

    def _identify(self, request: Request) -> Identity:
        if not self._may_read_plainly(request):
            remedy = "use https://" if self._transport.secure else "set EVENKEEL_BALANCER_TLS_CERTIFICATE and …_TLS_KEY"
            raise _ProblemError(403, f"this is shown in plaintext only on the balancer's own machine: {remedy}")
        with self._lock:
            if not self._rates.try_take(network_of(request.peer), time.monotonic()):
                self._refused("RESOURCE_EXHAUSTED", "rate")
                detail = f"more than {_REQUESTS_PER_SECOND:g} requests a second from one address; slow down"
                raise _ProblemError(429, detail, Retry_After="1")
        if self._tokens is None:
            return _ANYBODY
        try:
            return self._tokens.authenticate(request.headers.get("authorization"), "balancer")
        except AuthenticationError as error:
            self._refused("UNAUTHENTICATED", "token")
            raise _ProblemError(401, str(error), WWW_Authenticate="Bearer") from None

    def _stream(self, identity: Identity, query: dict[str, str]) -> dict[str, Any]:
        name = StreamName(query.get("job", ""), query.get("group", "default"), query.get("loader", "train"))
        since = query.get("since", "0")
        if not name.job:
            raise _ProblemError(400, "no job is named: ask for ?job=NAME&group=default&loader=train")
        if not (since.isascii() and since.isdecimal()):
            raise _ProblemError(400, f"since is {since[:40]!a}: give the number of a round")
        every = query.get("ranks") == "all"
        view = self._views.stream(name, since=int(since), all_ranks=every) if identity.allows(name.job) else None
        if view is None:
            text = f"there is no stream {'/'.join(name)[:200]} here, or the token is not for its job"
            raise _ProblemError(404, f"{text}; a job is seen at the replica that its rank 0 is connected to")
        return view


def _problem(problem: _ProblemError) -> Response:
    document = {"status": problem.status, "title": HTTPStatus(problem.status).phrase, "detail": problem.detail}
    headers = {name.replace("_", "-"): value for name, value in problem.headers.items()}
    return _json(document, status=problem.status, kind="application/problem+json", **headers)


def _json(document: dict[str, Any], *, status: int = 200, kind: str = "application/json", **headers: str) -> Response:
    body = json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
    return Response(status=status, kind=kind, body=body, headers=_DATA_HEADERS | headers)
