"""The application: its addresses, health, the page, and the OpenAPI document."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.middleware import Middleware
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Route

from evenkeel.placement import InvalidInputError, PlanRequest, builtin_profile, builtin_profiles
from evenkeel.placement.fields import encode
from services.planner.answers import HitRatesRequest, R, WhatIfRequest, read_request
from services.planner.edge import Edge
from services.planner.metrics import Metrics
from services.planner.pool import Pool
from services.planner.problems import ServiceError, answer_problem, client_gone
from services.planner.settings import Settings
from services.security.tokens import TokenStore

_READ_AS_JSON = ("", "application/json", "application/x-www-form-urlencoded", "text/json")
_HERE = Path(__file__).parent
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # files of two versions never meet
}
_MEDIA_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_FILES = {file.name: file.read_bytes() for file in (_HERE / "page").iterdir() if file.suffix in _MEDIA_TYPES}


async def make_plan(request: Request) -> Response:
    """Chooses HBM_ONLY, CACHING, HYBRID or HOST_ONLY and a size for every table, or says why nothing fits."""
    return await _answer(request, PlanRequest)


async def ask_what_if(request: Request) -> Response:
    """Plans again under other sizes of HBM and host memory, and prices the next GiB."""
    return await _answer(request, WhatIfRequest)


async def hit_rates(request: Request) -> Response:
    """Unique keys of a step, and the miss rates among them of caches of the given sizes."""
    return await _answer(request, HitRatesRequest)


async def _answer(request: Request, kind: type[R]) -> Response:
    """What a process answers to the body of a request."""
    state = request.app.state
    settings: Settings = state.settings
    _check_media_type(request.headers.get("content-type"))
    try:
        body = await request.body()
    except ClientDisconnect:
        raise client_gone() from None
    asked, spent = await state.pool.read(partial(read_request, kind, body, settings))
    limit = asked.solver.time_limit_s if isinstance(asked, PlanRequest) else settings.max_time_limit_seconds
    found = await state.pool.solve(asked, limit, spent, partial(_gone, request))
    state.metrics.answered(asked, found)
    return Response(found.document, media_type="application/json")


def _check_media_type(given: str | None) -> None:
    """Refuses bodies that say that they are no JSON; `curl -d` says that they are a form, and nothing says nothing."""
    media_type = (given or "").partition(";")[0].strip().lower()
    if media_type not in _READ_AS_JSON and not media_type.endswith("+json"):
        wrong = InvalidInputError("Content-Type", given, "is no JSON", "send application/json")
        raise ServiceError(415, "Media type", wrong)


async def _gone(request: Request) -> None:
    """Ends when the client has gone away; its body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def list_profiles(_request: Request) -> Response:
    """All built-in profiles, with their sources."""
    return JSONResponse(encode(list(builtin_profiles().values())))


async def get_profile(request: Request) -> Response:
    """The profile called `name`."""
    try:
        return JSONResponse(encode(builtin_profile(request.path_params["name"])))
    except InvalidInputError as error:
        wrong = InvalidInputError("name", request.path_params["name"], error.problem, error.remedy)
        raise ServiceError(404, "Not found", wrong) from None


async def _document(request: Request) -> Response:
    """The OpenAPI document with the limits of this service."""
    document: dict[str, Any] = json.loads((_HERE / "openapi.json").read_bytes())
    schemas, settings = document["components"]["schemas"], request.app.state.settings
    for name in ("PlanRequest", "WhatIfRequest"):
        schemas[name]["properties"]["tables"]["maxItems"] = settings.max_tables
        schemas[name]["description"] += f" At most {settings.max_body_bytes} bytes as JSON."
    limit = schemas["SolverOptions"]["properties"]["time_limit_s"]
    limit["description"] += f" Cut to {settings.max_time_limit_seconds:g} s at this service."
    return JSONResponse(document)


async def _healthz(_request: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def _readyz(request: Request) -> Response:
    ready = bool(request.app.state.ready)
    return JSONResponse({"status": "ready" if ready else "not ready"}, 200 if ready else 503)


async def _page(_request: Request) -> Response:
    return HTMLResponse(_FILES["index.html"], headers=_PAGE_HEADERS)


async def _page_file(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in _FILES:
        raise HTTPException(404)
    return Response(_FILES[name], media_type=_MEDIA_TYPES[Path(name).suffix], headers=_PAGE_HEADERS)


ROUTES = [
    Route("/v1/plans", make_plan, methods=["POST"]),
    Route("/v1/whatif", ask_what_if, methods=["POST"]),
    Route("/v1/hit-rates", hit_rates, methods=["POST"]),
    Route("/v1/hardware-profiles", list_profiles),
    Route("/v1/hardware-profiles/{name}", get_profile),
    Route("/openapi.json", _document),
    Route("/healthz", _healthz),
    Route("/readyz", _readyz),
    Route("/", _page),
    Route("/page/{name}", _page_file),
]


def create_app(settings: Settings) -> FastAPI:
    """The planner as an ASGI application."""
    metrics = Metrics()
    tokens = None if settings.token_file is None else TokenStore(settings.token_file)

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
        openapi_url=None,  # the document is a file, see `_document`
        routes=[*ROUTES],
        middleware=[Middleware(Edge, settings=settings, metrics=metrics, tokens=tokens, routes=ROUTES)],
        exception_handlers=dict.fromkeys((ServiceError, InvalidInputError, HTTPException, Exception), answer_problem),
        lifespan=lifespan,
    )
    app.state.settings, app.state.metrics, app.state.ready = settings, metrics, False
    return app
