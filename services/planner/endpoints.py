"""What the service answers."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from starlette.requests import ClientDisconnect

from evenkeel.placement import Comparison, InvalidInputError, PlanRequest, WhatIf, builtin_profiles
from evenkeel.placement.codec import encode
from evenkeel.placement.hardware import HardwareProfile, builtin_profile
from services.planner.json_schema import add_schema
from services.planner.problems import MEDIA_TYPE, FieldProblem, ProblemDocument, ServiceError
from services.planner.requests import CompareRequest, HitRates, HitRatesRequest, PlanAnswer, WhatIfRequest
from services.planner.settings import Settings
from services.planner.solving import ClientGoneError, Solvers
from services.planner.worker import Job

_READ_AS_JSON = ("", "application/json", "application/x-www-form-urlencoded", "text/json")

SCHEMAS: dict[str, Any] = {}
"""Of all that is sent and answered, by name: see `services.planner.json_schema`."""

_PROBLEM: dict[str, Any] = {"content": {MEDIA_TYPE: {"schema": add_schema(ProblemDocument, SCHEMAS)}}}
_RESPONSES: dict[int | str, dict[str, Any]] = {
    400: {**_PROBLEM, "description": "The body is no JSON."},
    401: {**_PROBLEM, "description": "A token is wanted, and none that holds was sent."},
    403: {**_PROBLEM, "description": "The token does not allow this."},
    405: {**_PROBLEM, "description": "The address has other methods."},
    413: {**_PROBLEM, "description": "The body is too large."},
    415: {**_PROBLEM, "description": "The body says that it is no JSON."},
    422: {**_PROBLEM, "description": "A field is wrong; `errors` names it, its value and what to give instead."},
    429: {**_PROBLEM, "description": "Too many requests from one address."},
    500: {**_PROBLEM, "description": "The service failed."},
    503: {**_PROBLEM, "description": "Too many requests wait: `Retry-After` says when to come back."},
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


def _answers(kind: type, *, several: bool = False) -> dict[int | str, dict[str, Any]]:
    schema = add_schema(kind, SCHEMAS)
    listed = {"type": "array", "items": schema} if several else schema
    return {200: {"description": "The answer.", "content": {"application/json": {"schema": listed}}}}


def _takes(kind: type, example: dict[str, Any]) -> dict[str, Any]:
    content = {"schema": add_schema(kind, SCHEMAS), "example": example}
    return {"requestBody": {"required": True, "content": {"application/json": content}}}


router = APIRouter(prefix="/v1", responses=_RESPONSES)


async def _answer(request: Request, kind: str) -> Response:
    """What a worker answers to the body of a request."""
    state = request.app.state
    _check_media_type(request.headers.get("content-type"))
    try:
        body = await request.body()
    except ClientDisconnect:
        raise ClientGoneError from None
    settings: Settings = state.settings
    job = Job(
        kind=kind,
        path=request.url.path,
        max_tables=settings.max_tables,
        max_time_limit_s=settings.max_time_limit_seconds,
        plan_cache=None if settings.plan_cache is None else str(settings.plan_cache),
    )
    solvers: Solvers = state.solvers
    found = await solvers.run(job, body, lambda: _gone(request))
    state.metrics.answered(found.facts)
    status = found.facts.status
    return Response(found.document, status, media_type=MEDIA_TYPE if status >= 400 else "application/json")


def _check_media_type(given: str | None) -> None:
    """Refuses bodies that say that they are no JSON; `curl -d` says that they are a form, and nothing says nothing."""
    media_type = (given or "").partition(";")[0].strip().lower()
    if media_type in _READ_AS_JSON or media_type.endswith("+json"):
        return
    wrong = FieldProblem.of("Content-Type", given, "is no JSON", "send application/json")
    raise ServiceError(415, "media-type", "Unsupported media type", wrong.sentence, errors=(wrong,))


async def _gone(request: Request) -> None:
    """Ends when the client has gone away; its body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


@router.post(
    "/plans",
    summary="The best placement of all tables",
    responses=_answers(PlanAnswer),
    openapi_extra=_takes(PlanRequest, _EXAMPLE),
)
async def make_plan(request: Request) -> Response:
    """Chooses HBM_ONLY, CACHING, HYBRID or HOST_ONLY and a size for every table, or says why nothing fits."""
    return await _answer(request, "plans")


@router.post(
    "/plans:compare",
    summary="A plan of your own against the best",
    responses=_answers(Comparison),
    openapi_extra=_takes(
        CompareRequest, {**_EXAMPLE, "own": [{"table": t["name"], "mode": "CACHING"} for t in _EXAMPLE["tables"]]}
    ),
)
async def compare_plans(request: Request) -> Response:
    """Judges your own plan as the runtime would really run it, and says where and why the best one differs."""
    return await _answer(request, "compare")


@router.post(
    "/whatif",
    summary="What other budgets would buy",
    responses=_answers(WhatIf),
    openapi_extra=_takes(WhatIfRequest, {**_EXAMPLE, "points": 10}),
)
async def ask_what_if(request: Request) -> Response:
    """Plans again under other sizes of HBM and host memory, and prices the next GiB."""
    return await _answer(request, "whatif")


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
        wrong = FieldProblem.of("name", name, error.problem, error.remedy)
        raise ServiceError(404, "not-found", "Not found", wrong.sentence, errors=(wrong,)) from None


@router.post(
    "/hit-rates",
    summary="What caches of a table miss",
    responses=_answers(HitRates),
    openapi_extra=_takes(
        HitRatesRequest, {"rows": 10_000_000, "lookups_per_step": 262_144, "cache_rows": [100_000, 1_000_000]}
    ),
)
async def hit_rates(request: Request) -> Response:
    """Unique keys of a step, and the miss rates among them of caches of the given sizes."""
    return await _answer(request, "hit-rates")
