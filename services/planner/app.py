"""The application: what it answers and how, limits, health, the page, and the OpenAPI document.

python -m services.planner.app services/planner/openapi.json [--check]     # writes the document, or compares it
"""

from __future__ import annotations

import copy
import difflib
import json
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

import evenkeel
from evenkeel.placement import InvalidInputError, PlanRequest, WhatIf, builtin_profiles
from evenkeel.placement.fields import encode
from evenkeel.placement.hardware import HardwareProfile, builtin_profile
from services.planner.answers import (
    AnyRequest,
    HitRates,
    HitRatesRequest,
    PlanAnswer,
    R,
    WhatIfRequest,
    read_request,
)
from services.planner.edge import Edge
from services.planner.json_schema import add_schema
from services.planner.metrics import Metrics
from services.planner.pool import Pool
from services.planner.problems import MEDIA_TYPE, ProblemDocument, ServiceError, answer_problem, client_gone
from services.planner.settings import Settings
from services.security.tokens import TokenStore

_READ_AS_JSON = ("", "application/json", "application/x-www-form-urlencoded", "text/json")

SCHEMAS: dict[str, Any] = {}
"""Of all that is sent and answered, by name: see `services.planner.json_schema`."""

_PROBLEM: dict[str, Any] = {"content": {MEDIA_TYPE: {"schema": add_schema(ProblemDocument, SCHEMAS)}}}
_DESCRIPTIONS = {
    400: "The body is no JSON.",
    401: "A token is wanted, and none that is valid was sent.",
    403: "The token does not allow this.",
    405: "The address has other methods.",
    413: "The body is too large.",
    415: "The body says that it is no JSON.",
    422: "A field is wrong; `errors` names it, its value and what to give instead.",
    429: "Too many requests from one address.",
    500: "The service failed.",
    503: "Too many requests wait: `Retry-After` says when to come back.",
}
_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {**_PROBLEM, "description": text} for status, text in _DESCRIPTIONS.items()
}
_EXAMPLE: dict[str, Any] = {
    "tables": [
        {"name": "user_id", "rows": 400_000_000, "dim": 128, "ids_per_sample": 1},
        {"name": "item_id", "rows": 50_000_000, "dim": 128, "ids_per_sample": 200},
    ],
    "topology": {"ranks": 8, "hbm_bytes": 60 << 30, "host_bytes": 1536 << 30},
    "hardware": "h200",
    "step": {"samples_per_rank": 1024},
}
_CACHES = {"rows": 10_000_000, "lookups_per_step": 262_144, "cache_rows": [100_000, 1_000_000]}


def _answers(kind: type, *, several: bool = False) -> dict[int | str, dict[str, Any]]:
    schema = add_schema(kind, SCHEMAS)
    listed = {"type": "array", "items": schema} if several else schema
    return {200: {"description": "The answer.", "content": {"application/json": {"schema": listed}}}}


def _takes(kind: type, example: dict[str, Any]) -> dict[str, Any]:
    content = {"schema": add_schema(kind, SCHEMAS), "example": example}
    return {"requestBody": {"required": True, "content": {"application/json": content}}}


router = APIRouter(prefix="/v1", responses=_RESPONSES)


def _post(
    path: str, summary: str, kind: type, answers: type, example: dict[str, Any]
) -> Callable[[Callable[[Request], Any]], Callable[[Request], Any]]:
    """A route that takes a request of a kind as JSON."""
    return router.post(path, summary=summary, responses=_answers(answers), openapi_extra=_takes(kind, example))


async def _answer(request: Request, kind: type[R]) -> Response:
    """What a process answers to the body of a request."""
    state = request.app.state
    pool: Pool = state.pool
    settings: Settings = state.settings
    _check_media_type(request.headers.get("content-type"))
    try:
        body = await request.body()
    except ClientDisconnect:
        raise client_gone() from None
    began = time.monotonic()
    asked: AnyRequest = await pool.read(partial(read_request, kind, body, settings))
    limit = asked.solver.time_limit_s if isinstance(asked, PlanRequest) else settings.max_time_limit_seconds
    found = await pool.solve(asked, limit, began, partial(_gone, request))
    state.metrics.answered(asked, found)
    return Response(found.document, media_type="application/json")


def _check_media_type(given: str | None) -> None:
    """Refuses bodies that say that they are no JSON; `curl -d` says that they are a form, and nothing says nothing."""
    media_type = (given or "").partition(";")[0].strip().lower()
    if media_type not in _READ_AS_JSON and not media_type.endswith("+json"):
        wrong = InvalidInputError("Content-Type", given, "is no JSON", "send application/json")
        raise ServiceError(415, "Unsupported media type", wrong, kind="media-type")


async def _gone(request: Request) -> None:
    """Ends when the client has gone away; its body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


@_post("/plans", "The best placement of all tables", PlanRequest, PlanAnswer, _EXAMPLE)
async def make_plan(request: Request) -> Response:
    """Chooses HBM_ONLY, CACHING, HYBRID or HOST_ONLY and a size for every table, or says why nothing fits."""
    return await _answer(request, PlanRequest)


@_post("/whatif", "What other budgets would buy", WhatIfRequest, WhatIf, {**_EXAMPLE, "points": 10})
async def ask_what_if(request: Request) -> Response:
    """Plans again under other sizes of HBM and host memory, and prices the next GiB."""
    return await _answer(request, WhatIfRequest)


@_post("/hit-rates", "What caches of a table miss", HitRatesRequest, HitRates, _CACHES)
async def hit_rates(request: Request) -> Response:
    """Unique keys of a step, and the miss rates among them of caches of the given sizes."""
    return await _answer(request, HitRatesRequest)


@router.get(
    "/hardware-profiles",
    summary="The built-in hardware profiles",
    responses=_answers(HardwareProfile, several=True),
)
async def list_profiles() -> JSONResponse:
    """All built-in profiles, with their sources."""
    return JSONResponse(encode(list(builtin_profiles().values())))


@router.get(
    "/hardware-profiles/{name}",
    summary="One built-in hardware profile",
    responses={**_answers(HardwareProfile), 404: {**_PROBLEM, "description": "There is no such profile."}},
)
async def get_profile(name: str) -> JSONResponse:
    """The profile called `name`."""
    try:
        return JSONResponse(encode(builtin_profile(name)))
    except InvalidInputError as error:
        wrong = InvalidInputError("name", name, error.problem, error.remedy)
        raise ServiceError(404, "Not found", wrong) from None


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
    for kind in (ServiceError, InvalidInputError, HTTPException, Exception):
        app.add_exception_handler(kind, answer_problem)
    app.include_router(router)
    app.openapi = partial(_document, app)  # type: ignore[method-assign]

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
