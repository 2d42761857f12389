"""What the service answers."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from starlette.requests import ClientDisconnect

from evenkeel.placement import InvalidInputError, PlanRequest, WhatIf, builtin_profiles
from evenkeel.placement.fields import encode
from evenkeel.placement.hardware import HardwareProfile, builtin_profile
from services.planner.json_schema import add_schema
from services.planner.pool import ClientGoneError, Pool
from services.planner.problems import MEDIA_TYPE, ProblemDocument, ServiceError
from services.planner.requests import (
    AnyRequest,
    HitRates,
    HitRatesRequest,
    PlanAnswer,
    R,
    WhatIfRequest,
    read_request,
)
from services.planner.settings import Settings

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
        raise ClientGoneError from None
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
