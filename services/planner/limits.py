"""Limits on what a client may send, and the measuring of requests, outside of the application."""

from __future__ import annotations

import time

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.planner.metrics import Metrics
from services.planner.problems import problem_response


class BodyLimit:
    """Refuses bodies above a size, by their announced length or while they arrive."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app, self.max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        detail = f"the body is above {self.max_bytes} bytes; send fewer tables at once or coarser histograms"
        refusal = problem_response(scope["path"], 413, "too-large", "Body too large", detail)
        if announced.isdigit() and int(announced) > self.max_bytes:
            await refusal(scope, receive, send)
            return
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self.max_bytes:
                raise HTTPException(413, detail)
            return message

        await self.app(scope, counted, send)


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
