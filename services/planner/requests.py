"""What is sent to the planner: the core's dataclasses, read by the core's codec, and what the service adds to them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Annotated, TypeVar

from fastapi import Request
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from evenkeel.placement import PlanRequest
from evenkeel.placement.access import Access, Zipf
from evenkeel.placement.bounds import Length, Range, check_bounds
from evenkeel.placement.codec import decode
from evenkeel.placement.compare import OwnPlacement
from evenkeel.placement.hit_rates import Eviction
from evenkeel.placement.model import MAX_ROWS, Bytes, Rows
from evenkeel.placement.request import MAX_TABLES
from evenkeel.placement.what_if import MAX_POINTS
from services.planner.problems import ServiceError
from services.planner.solving import ClientGoneError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareRequest(PlanRequest):
    """A request, and the user's own plan.

    Attributes:
        own: The user's placement of every table.
    """

    own: Annotated[tuple[OwnPlacement, ...], Length(0, MAX_TABLES)]


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfRequest(PlanRequest):
    """A request, and the HBM sizes to plan for.

    Attributes:
        points: Number of HBM sizes between the smallest that works and the largest that is of use.
        curve_hbm_bytes: HBM sizes to plan for instead.
    """

    points: Annotated[int, Range(0, MAX_POINTS)] = 25
    curve_hbm_bytes: Annotated[tuple[Bytes, ...], Length(0, MAX_POINTS)] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HitRatesRequest:
    """A table and the caches to judge.

    Attributes:
        rows: Number of rows (keys).
        lookups_per_step: Lookups of a step, over all ranks.
        access: How often the keys are looked up.
        eviction: What a full cache gives up.
        cache_rows: Cache sizes in rows, over all ranks.
    """

    rows: Annotated[int, Range(1, MAX_ROWS)]
    lookups_per_step: Annotated[float, Range(0, 1e15, above=True)]
    access: Access = field(default_factory=Zipf)
    eviction: Eviction = Eviction.LRU
    cache_rows: Annotated[tuple[Rows, ...], Length(1, 10_000)]

    def __post_init__(self) -> None:
        check_bounds(self)


async def read(request: Request, kind: type[T]) -> T:
    """The body of a request, as a dataclass.

    Raises:
        ServiceError: If it is no JSON.
        ClientGoneError: If it does not arrive.
        InvalidInputError: If a field is unknown, missing or wrong.
    """
    try:
        body = await request.body()
    except ClientDisconnect:
        raise ClientGoneError from None
    return await run_in_threadpool(_decode, kind, body)  # seconds for the largest bodies: others are answered meanwhile


def _decode(kind: type[T], body: bytes) -> T:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        detail = f"the body is no JSON: {error}; send a JSON object"
        raise ServiceError(400, "no-json", "Not JSON", detail) from None
    return decode(kind, value)
