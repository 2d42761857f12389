"""The application: routes, problems, limits, health."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.routing import Route

import evenkeel
from services.planner.endpoints import router
from services.planner.limits import BodyLimit, JsonByDefault, Measure
from services.planner.metrics import Metrics
from services.planner.openapi import install_openapi
from services.planner.problems import install_problem_handlers
from services.planner.settings import Settings
from services.planner.solving import ClientGoneError, SolverPool
from services.security.asgi import Access
from services.security.tokens import TokenStore

_PAGE = Path(__file__).parent / "page"
_SECURITY = {
    "Content-Security-Policy": "default-src 'self'; style-src 'self' 'unsafe-inline'",
    "X-Content-Type-Options": "nosniff",
}
_FILES = {"index.html": "text/html", "planner.js": "text/javascript", "planner.css": "text/css"}


def create_app(settings: Settings, metrics: Metrics | None = None) -> FastAPI:
    """The planner as an ASGI application."""
    metrics = metrics or Metrics()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.pool = SolverPool(settings.workers, settings.queue_size, metrics)
        app.state.ready = True
        metrics.lag.start()
        yield
        metrics.lag.stop()
        app.state.ready = False
        app.state.pool.close()

    app = FastAPI(
        title="Evenkeel planner",
        summary="Where each embedding table should live.",
        description="Exact placement of embedding tables in HBM and host memory, with its cost and its alternatives.",
        version=evenkeel.__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    app.state.settings, app.state.metrics, app.state.ready = settings, metrics, False
    install_problem_handlers(app)
    install_openapi(app)
    app.include_router(router)

    @app.exception_handler(ClientGoneError)
    async def client_gone(request: Request, error: ClientGoneError) -> Response:
        del request, error
        return Response(status_code=499)

    @app.get("/healthz", include_in_schema=False)
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/readyz", include_in_schema=False)
    async def readyz() -> Response:
        return _ready(app)

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return HTMLResponse((_PAGE / "index.html").read_text("utf-8"), headers=_SECURITY)

    @app.get("/page/{name}", include_in_schema=False)
    async def page_file(name: str) -> Response:
        if name not in _FILES:
            return JSONResponse({"detail": "no such file"}, 404)
        return Response((_PAGE / name).read_bytes(), media_type=_FILES[name], headers=_SECURITY)

    app.add_middleware(JsonByDefault)
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    tokens = None if settings.token_file is None else TokenStore(settings.token_file)
    app.add_middleware(Access, tokens=tokens, requests_per_second=settings.requests_per_second)
    app.add_middleware(Measure, metrics=metrics)
    return app


def create_metrics_app(app: FastAPI) -> Starlette:
    """The application of the metrics port: `/metrics`, `/healthz`, `/readyz`."""

    async def show(request: Request) -> Response:
        del request
        return Response(generate_latest(app.state.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def alive(request: Request) -> Response:
        del request
        return JSONResponse({"status": "ok"})

    async def ready(request: Request) -> Response:
        del request
        return _ready(app)

    return Starlette(routes=[Route("/metrics", show), Route("/healthz", alive), Route("/readyz", ready)])


def _ready(app: FastAPI) -> Response:
    ready = bool(app.state.ready)
    return JSONResponse({"status": "ready" if ready else "not ready"}, 200 if ready else 503)
