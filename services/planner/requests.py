"""What is sent to the planner, read once, and what it answers, beside the dataclasses of the core."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, TypeAlias, TypeVar

from evenkeel.placement import InvalidInputError, Plan, PlanRequest
from evenkeel.placement.access import Access, Eviction, Zipf
from evenkeel.placement.fields import Checked, Length, Range, decode
from evenkeel.placement.model import MAX_ROWS, Bytes, Rows
from evenkeel.placement.report import Report
from evenkeel.placement.what_if import MAX_POINTS
from evenkeel.plan_requests import parse_json, unpacked, with_measured
from services.planner.problems import ServiceError
from services.planner.settings import Settings

_EXCERPT = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfRequest(PlanRequest):
    """A request, and the memory sizes to plan for.

    Attributes:
        points: Number of HBM sizes between the smallest that works and the largest that is of use.
        curve_hbm_bytes: HBM sizes to plan for instead.
        host_points: Number of sizes of a host's memory to plan for, between the same two ends.
    """

    points: Annotated[int, Range(0, MAX_POINTS)] = 25
    curve_hbm_bytes: Annotated[tuple[Bytes, ...], Length(0, MAX_POINTS)] = ()
    host_points: Annotated[int, Range(0, MAX_POINTS)] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HitRatesRequest(Checked):
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAnswer:
    """A plan, and how to use it.

    Attributes:
        plan: The plan.
        code: Python lines that put the plan into a job of its runtime; empty where nothing fits.
        report: The plan by rank, host and table; null where nothing fits.
    """

    plan: Plan
    code: str
    report: Report | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HitRates:
    """What a step asks of a table, and what caches miss.

    Attributes:
        unique_keys: Expected number of different keys of a step.
        miss_rates: Fraction of those that each cache misses.
    """

    unique_keys: float
    miss_rates: tuple[float, ...]


AnyRequest: TypeAlias = PlanRequest | HitRatesRequest
R = TypeVar("R", bound=AnyRequest)


def read_request(kind: type[R], body: bytes, settings: Settings) -> R:
    """The request in a body, its time limit cut to that of the service."""
    content = _json(body)
    if not issubclass(kind, PlanRequest):
        return decode(kind, content)
    value, measured = unpacked(content)
    request: Any = with_measured(decode(kind, value), measured)
    if len(request.tables) > settings.max_tables:
        what, remedy = "is too many tables for this service", f"send at most {settings.max_tables}"
        raise InvalidInputError("tables", len(request.tables), what, remedy)
    limit = min(request.solver.time_limit_s, settings.max_time_limit_seconds)
    request = replace(request, solver=replace(request.solver, time_limit_s=limit))
    found: R = request
    return found


def _json(body: bytes) -> Any:
    try:
        return parse_json(body)
    except InvalidInputError:
        raise
    except json.JSONDecodeError as error:
        # Of bytes that are no text, such as a mark of their order alone, nothing is left to show.
        excerpt = error.doc[max(0, error.pos - _EXCERPT) : error.pos + _EXCERPT].strip() or repr(body[:_EXCERPT])
        why = f"{error.msg} at line {error.lineno}, column {error.colno}"
    except UnicodeDecodeError as error:
        excerpt = repr(body[max(0, error.start - _EXCERPT) : error.start + _EXCERPT])
        why = f"byte {error.start} is no {error.encoding}"
    except (ValueError, RecursionError) as error:
        excerpt, why = body[:_EXCERPT].decode("utf-8", "replace"), str(error)
    wrong = InvalidInputError("body", excerpt if body else "nothing", f"is no JSON: {why}", "send one JSON object")
    raise ServiceError(400, "Not JSON", wrong, kind="no-json")
