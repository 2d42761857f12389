"""Limits on what a client may send, and the measuring of requests, outside of the application."""

from __future__ import annotations

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.planner.metrics import Metrics
from services.planner.problems import FieldProblem, ServiceError, problem_response


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


class Measure:
    """Counts requests and their time by route."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begin, status = time.perf_counter(), 499

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, noted)
        finally:
            route = scope.get("route")
            name = getattr(route, "path", "other")
            self.metrics.requests.labels(name, str(status)).inc()
            self.metrics.seconds.labels(name).observe(time.perf_counter() - begin)
