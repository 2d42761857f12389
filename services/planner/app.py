"""The application: routes, problems, limits, health, the page, and the OpenAPI document.

python -m services.planner.app services/planner/openapi.json [--check]     # writes the document, or compares it
"""

from __future__ import annotations

import copy
import difflib
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.exceptions import HTTPException

import evenkeel
from services.planner.edge import Edge
from services.planner.endpoints import SCHEMAS, router
from services.planner.metrics import Metrics
from services.planner.pool import ClientGoneError, Pool
from services.planner.problems import install_problem_handlers
from services.planner.settings import Settings
from services.security.tokens import TokenStore

_PAGE = Path(__file__).parent / "page"
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # files of two versions never meet
}
_MEDIA_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


def create_app(settings: Settings) -> FastAPI:
    """The planner as an ASGI application."""
    metrics = Metrics()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.pool = pool = Pool(settings, metrics)
        await pool.start()
        app.state.ready = True
        metrics.lag.start()
        yield
        metrics.lag.stop()
        app.state.ready = False
        pool.close()

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
    app.include_router(router)
    app.openapi = partial(_document, app)  # type: ignore[method-assign]

    @app.exception_handler(ClientGoneError)
    async def client_gone(request: Request, error: ClientGoneError) -> Response:
        del request, error
        return Response(status_code=499)

    @app.get("/healthz", include_in_schema=False)
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/readyz", include_in_schema=False)
    async def readyz() -> Response:
        ready = bool(app.state.ready)
        return JSONResponse({"status": "ready" if ready else "not ready"}, 200 if ready else 503)

    files = {file.name: file.read_bytes() for file in _PAGE.iterdir() if file.suffix in _MEDIA_TYPES}

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return HTMLResponse(files["index.html"], headers=_PAGE_HEADERS)

    @app.get("/page/{name}", include_in_schema=False)
    async def page_file(name: str) -> Response:
        if name not in files:
            raise HTTPException(404)
        return Response(files[name], media_type=_MEDIA_TYPES[Path(name).suffix], headers=_PAGE_HEADERS)

    tokens = None if settings.token_file is None else TokenStore(settings.token_file)
    app.add_middleware(Edge, settings=settings, metrics=metrics, tokens=tokens)
    return app


def _document(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document, with the schemas of what is sent and answered and the limits of this service."""
    if app.openapi_schema is None:
        schemas = copy.deepcopy(SCHEMAS)
        settings: Settings = app.state.settings
        for name in ("PlanRequest", "WhatIfRequest"):
            schemas[name]["properties"]["tables"]["maxItems"] = settings.max_tables
            schemas[name]["description"] += f" At most {settings.max_body_bytes} bytes as JSON."
        limit = schemas["SolverOptions"]["properties"]["time_limit_s"]
        limit["description"] += f" Cut to {settings.max_time_limit_seconds:g} s at this service."
        document = get_openapi(
            title=app.title, version=app.version, summary=app.summary, description=app.description, routes=app.routes
        )
        app.openapi_schema = {**document, "components": {"schemas": schemas}}
    return app.openapi_schema


def write_document(arguments: list[str]) -> int:
    """Writes the OpenAPI document to a file, or with `--check` says whether the file is up to date."""
    path = Path(arguments[0])
    text = json.dumps(create_app(Settings()).openapi(), indent=1, sort_keys=True) + "\n"
    if "--check" not in arguments:
        path.write_text(text)
        return 0
    old = path.read_text() if path.is_file() else ""
    difference = list(difflib.unified_diff(old.splitlines(), text.splitlines(), str(path), "the service", lineterm=""))
    print(*difference[:100], sep="\n")
    return 1 if difference else 0


if __name__ == "__main__":
    sys.exit(write_document(sys.argv[1:]))
