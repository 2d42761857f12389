"""What the service answers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from evenkeel.placement import (
    Comparison,
    InvalidInputError,
    Plan,
    PlanRequest,
    WhatIf,
    builtin_profiles,
    compare,
    plan,
    what_if,
)
from evenkeel.placement.application import lines_to_paste
from evenkeel.placement.codec import encode
from evenkeel.placement.hardware import HardwareProfile, builtin_profile
from evenkeel.placement.hit_rates import step_keys
from services.planner.json_schema import add_schema
from services.planner.metrics import Metrics
from services.planner.problems import MEDIA_TYPE, ProblemDocument, ServiceError
from services.planner.requests import CompareRequest, HitRatesRequest, WhatIfRequest, read

R = TypeVar("R", bound=PlanRequest)

SCHEMAS: dict[str, Any] = {}
"""Of all that is sent and answered, by name: see `services.planner.json_schema`."""

_PROBLEM: dict[str, Any] = {"content": {MEDIA_TYPE: {"schema": add_schema(ProblemDocument, SCHEMAS)}}}
_RESPONSES: dict[int | str, dict[str, Any]] = {
    400: {**_PROBLEM, "description": "The body is no JSON."},
    401: {**_PROBLEM, "description": "A token is wanted, and none that holds was sent."},
    403: {**_PROBLEM, "description": "The token does not allow this."},
    413: {**_PROBLEM, "description": "The body is too large."},
    422: {**_PROBLEM, "description": "A field is wrong; `errors` names it."},
    429: {**_PROBLEM, "description": "Too many requests from one address."},
    500: {**_PROBLEM, "description": "The service failed."},
    503: {**_PROBLEM, "description": "Too many requests wait, or the search did not end within its time limit."},
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAnswer:
    """A plan, and how to use it.

    Attributes:
        plan: The plan.
        code: Python lines that put the plan into a job of its runtime; empty where nothing fits.
    """

    plan: Plan
    code: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HitRates:
    """What a step asks of a table, and what caches miss.

    Attributes:
        unique_keys: Expected number of different keys of a step.
        miss_rates: Fraction of those that each cache misses.
    """

    unique_keys: float
    miss_rates: tuple[float, ...]


def _answers(kind: type, *, several: bool = False) -> dict[int | str, dict[str, Any]]:
    schema = add_schema(kind, SCHEMAS)
    listed = {"type": "array", "items": schema} if several else schema
    return {200: {"description": "The answer.", "content": {"application/json": {"schema": listed}}}}


def _takes(kind: type, example: dict[str, Any]) -> dict[str, Any]:
    content = {"schema": add_schema(kind, SCHEMAS), "example": example}
    return {"requestBody": {"required": True, "content": {"application/json": content}}}


router = APIRouter(prefix="/v1", responses=_RESPONSES)


async def _read_request(request: Request, kind: type[R]) -> R:
    """The request for plans in the body, its time limit cut to what the service allows."""
    settings = request.app.state.settings
    asked = await read(request, kind)
    if len(asked.tables) > settings.max_tables:
        remedy = f"send at most {settings.max_tables}"
        raise InvalidInputError("tables", len(asked.tables), "is too many tables for this service", remedy)
    request.app.state.metrics.tables.observe(len(asked.tables))
    limit = min(asked.solver.time_limit_s, settings.max_time_limit_seconds)
    return replace(asked, solver=replace(asked.solver, time_limit_s=limit))


async def _solve(request: Request, asked: PlanRequest, work: Callable[[Callable[[], bool]], object]) -> JSONResponse:
    """The answer that `work` makes on a thread of its own."""
    pool, limit = request.app.state.pool, asked.solver.time_limit_s
    return JSONResponse(await pool.run(lambda stop: encode(work(stop)), request.is_disconnected, limit))


@router.post(
    "/plans",
    summary="The best placement of all tables",
    responses=_answers(PlanAnswer),
    openapi_extra=_takes(PlanRequest, _EXAMPLE),
)
async def make_plan(request: Request) -> JSONResponse:
    """Chooses HBM_ONLY, CACHING, HYBRID or HOST_ONLY and a size for every table, or says why nothing fits."""
    asked = await _read_request(request, PlanRequest)
    metrics: Metrics = request.app.state.metrics

    def work(should_stop: Callable[[], bool]) -> PlanAnswer:
        begin = time.perf_counter()
        found = plan(asked, should_stop=should_stop)
        metrics.planned(found, time.perf_counter() - begin)
        return PlanAnswer(plan=found, code=lines_to_paste(asked, found))

    return await _solve(request, asked, work)


@router.post(
    "/plans:compare",
    summary="A plan of your own against the best",
    responses=_answers(Comparison),
    openapi_extra=_takes(
        CompareRequest, {**_EXAMPLE, "own": [{"table": t["name"], "mode": "CACHING"} for t in _EXAMPLE["tables"]]}
    ),
)
async def compare_plans(request: Request) -> JSONResponse:
    """Judges your own plan as the runtime would really run it, and says where and why the best one differs."""
    asked = await _read_request(request, CompareRequest)
    return await _solve(request, asked, lambda should_stop: compare(asked, asked.own, should_stop=should_stop))


@router.post(
    "/whatif",
    summary="What other budgets would buy",
    responses=_answers(WhatIf),
    openapi_extra=_takes(WhatIfRequest, {**_EXAMPLE, "points": 10}),
)
async def ask_what_if(request: Request) -> JSONResponse:
    """Plans again under other HBM sizes, and prices the next GiB."""
    asked = await _read_request(request, WhatIfRequest)

    def work(should_stop: Callable[[], bool]) -> WhatIf:
        return what_if(asked, points=asked.points, hbm_bytes=asked.curve_hbm_bytes, should_stop=should_stop)

    return await _solve(request, asked, work)


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
        raise ServiceError(404, "not-found", "Not found", str(error)) from None


@router.post(
    "/hit-rates",
    summary="What caches of a table miss",
    responses=_answers(HitRates),
    openapi_extra=_takes(
        HitRatesRequest, {"rows": 10_000_000, "lookups_per_step": 262_144, "cache_rows": [100_000, 1_000_000]}
    ),
)
async def hit_rates(request: Request) -> JSONResponse:
    """Unique keys of a step, and the miss rates among them of caches of the given sizes."""
    asked = await read(request, HitRatesRequest)
    keys = step_keys(asked.access, asked.rows, asked.lookups_per_step, asked.eviction)
    rates = keys.misses(np.array(asked.cache_rows, dtype=np.float64))
    return JSONResponse(encode(HitRates(unique_keys=keys.unique, miss_rates=tuple(rates.tolist()))))
