"""The balancer's page beside its metrics, and what the page reads: docs/watching.md documents it. Read-only.

Tokens and TLS are those of the balancer. The page's own files hold no secrets, and without a token it can do nothing
but ask for one. In plaintext nothing is told to other machines, unless the operator allows plaintext: who is forwarded
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
from services.balancer.feed import MOST_PAGES, Feed, View
from services.balancer.history import ROUNDS
from services.balancer.session import Session
from services.balancer.views import EVENT_ROUNDS, Views, as_json
from services.operations.http import Request, Response
from services.security.addresses import network_of
from services.security.identity import Identity
from services.security.rates import Buckets
from services.security.tokens import AuthenticationError, TokenStore
from services.security.transport import Renewals, Transport

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
    """Answers what is asked beside `/metrics`.

    Attributes:
        feed: The open pages.
    """

    def __init__(
        self,
        views: Views,
        *,
        transport: Transport,
        tokens: TokenStore | None,
        refused: Callable[[str], None] = lambda _reason: None,
    ) -> None:
        """Reads the page's files.

        Args:
            views: What there is to see.
            transport: How the balancer may be reached.
            tokens: Who may see what; None: everybody everything.
            refused: Told of each refusal: `token` or `rate`.

        Raises:
            ValueError: If a file of TLS cannot be used.
        """
        self.feed = Feed()
        self._views = views
        self._transport = transport
        self._tokens = tokens
        self._refused = refused
        self._lock = threading.Lock()
        self._rates = Buckets(rate=_REQUESTS_PER_SECOND, burst=_BURST)
        self._context = transport.context() if transport.secure else None
        self._renewals = Renewals(transport)
        self._files = {file.name: file.read_bytes() for file in _FOLDER.iterdir() if file.suffix in _MEDIA_TYPES}

    def tls(self) -> ssl.SSLContext | None:
        """With what connections are encrypted; a renewed certificate holds from the next one on."""
        if self._context is not None:
            with self._lock:
                self._context = self._renewals.load(self._transport.context) or self._context
        return self._context

    def close(self) -> None:
        """Ends the open pages."""
        self.feed.close()

    def answer(self, request: Request) -> Response | None:
        """The answer to a GET; None where there is nothing."""
        try:
            url = urlsplit(request.target)
            query = parse_qs(url.query, keep_blank_values=True, max_num_fields=_MOST_FIELDS)
        except ValueError as error:
            return _problem(_ProblemError(400, f"the address cannot be read: {error}"))
        try:
            if url.path == "/" or url.path.startswith("/page/"):
                return self._file(request, url.path.removeprefix("/page/") if url.path != "/" else "index.html")
            asked = {"/v1/sessions": self._sessions, "/v1/session": self._session, "/v1/events": self._events}
            if url.path not in asked:
                return None
            identity = self._identify(request)
            return asked[url.path](request, identity, {name: values[-1] for name, values in query.items()})
        except _ProblemError as problem:
            return _problem(problem)

    # ------------------------------------------------------------------ inside

    def _file(self, request: Request, name: str) -> Response | None:
        if name not in self._files:
            return None
        host = request.headers.get("host")
        if self._transport.secure and not self._may_read_plainly(request) and host:
            return Response(status=307, headers={"Location": f"https://{host}{request.target}"})
        kind = f"{_MEDIA_TYPES[Path(name).suffix]}; charset=utf-8"
        return Response(kind=kind, body=self._files[name], headers=_PAGE_HEADERS)

    def _may_read_plainly(self, request: Request) -> bool:
        return request.is_secure or is_loopback(request.peer) or (
            self._transport.allow_plaintext and not self._transport.secure
        )  # fmt: skip

    def _identify(self, request: Request) -> Identity:
        if not self._may_read_plainly(request):
            remedy = "use https://" if self._transport.secure else "set EVENKEEL_BALANCER_TLS_CERTIFICATE and …_TLS_KEY"
            raise _ProblemError(403, f"this is told in plaintext only on the balancer's own machine: {remedy}")
        with self._lock:
            if not self._rates.try_take(network_of(request.peer), time.monotonic()):
                self._refused("rate")
                detail = f"more than {_REQUESTS_PER_SECOND:g} requests a second from one address; slow down"
                raise _ProblemError(429, detail, Retry_After="1")
        try:
            return self._authenticated(request)
        except AuthenticationError as error:
            self._refused("token")
            raise _ProblemError(401, str(error), WWW_Authenticate="Bearer") from None

    def _authenticated(self, request: Request) -> Identity:
        if self._tokens is None:
            return _ANYBODY
        return self._tokens.authenticate(request.headers.get("authorization"), "balancer")

    def _sessions(self, _request: Request, identity: Identity, _query: dict[str, str]) -> Response:
        return _as_json(self._views.overview(identity.allows))

    def _session(self, _request: Request, identity: Identity, query: dict[str, str]) -> Response:
        session = self._named(identity, query)
        return _as_json(self._views.document(session, all_ranks=query.get("ranks") == "all"))

    def _events(self, request: Request, identity: Identity, query: dict[str, str]) -> Response:
        if self.feed.is_full:
            raise _ProblemError(503, f"{MOST_PAGES} pages are open already; close one", Retry_After="10")
        view = self._view_of_session(identity, query) if "job" in query else self._view_of_all(identity)

        def may_go_on() -> bool:
            try:
                return self._authenticated(request).jobs == identity.jobs
            except AuthenticationError:
                return False

        return Response(
            kind="text/event-stream",
            headers=_DATA_HEADERS | {"X-Accel-Buffering": "no"},
            takes_over=lambda connection: self.feed.add(connection, view, may_go_on),
        )

    def _view_of_all(self, identity: Identity) -> View:
        return View(("all", identity.jobs), lambda _since: (self._views.overview(identity.allows), 0))

    def _view_of_session(self, identity: Identity, query: dict[str, str]) -> View:
        session = self._named(identity, query)
        key = session.id.key

        def render(since: int) -> tuple[dict[str, Any], int] | None:
            found = self._views.find(key.job, key.group, key.loader, identity.allows)
            if found is None:
                return None
            document = self._views.document(found, since, most_rounds=EVENT_ROUNDS if since else ROUNDS)
            return document, max(document["rounds"]["number"], default=since - 1) + 1

        return View(("one", key), render)

    def _named(self, identity: Identity, query: dict[str, str]) -> Session:
        names = {field: query.get(field, default) for field, default in _NAMES.items()}
        if not names["job"]:
            raise _ProblemError(400, "no job is named: ask for ?job=NAME&group=default&loader=train")
        session = self._views.find(**names, allows=identity.allows)
        if session is None:
            said = "/".join(names.values())
            raise _ProblemError(404, f"there is no session {said[:200]} here, or the token is not for its job")
        return session


_NAMES = {"job": "", "group": "default", "loader": "train"}


def _problem(problem: _ProblemError) -> Response:
    document = {"status": problem.status, "title": HTTPStatus(problem.status).phrase, "detail": problem.detail}
    return Response(
        status=problem.status,
        kind="application/problem+json",
        body=json.dumps(document).encode(),
        headers=_DATA_HEADERS | {name.replace("_", "-"): value for name, value in problem.headers.items()},
    )


def _as_json(document: dict[str, Any]) -> Response:
    return Response(kind="application/json", body=as_json(document).encode(), headers=_DATA_HEADERS)
