"""What is sent to the planner, read once, and what its processes answer: one request each time, in bounded memory."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import resource
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar, cast

import numpy as np

from evenkeel.placement import InvalidInputError, Plan, PlanRequest, Table, Topology, plan, what_if
from evenkeel.placement.access import Access, Eviction, Zipf, step_keys
from evenkeel.placement.application import lines_to_paste
from evenkeel.placement.fields import Checked, Length, Range, TimeIsUpError, decode, encode, parse_json
from evenkeel.placement.hardware import Bytes
from evenkeel.placement.report import Report, make_report
from evenkeel.placement.request import MAX_ROWS, Rows, with_time
from evenkeel.placement.what_if import MAX_POINTS
from evenkeel.plan_cache import PlanCache
from evenkeel.plan_requests import unpacked, with_measured
from services.planner.problems import ServiceError
from services.planner.settings import Settings

_EXCERPT = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfRequest(PlanRequest):
    """A request, and the memory sizes to plan for.

    Attributes:
        points: Number of HBM sizes between the smallest that works and the largest that is of use, by default 25.
        curve_hbm_bytes: HBM sizes to plan for instead.
        host_points: Number of sizes of a host's memory to plan for, between the same two ends.
    """

    points: Annotated[int, Range(0, MAX_POINTS)] | None = None
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
    tables = value.get("tables")
    if isinstance(tables, list) and len(tables) > settings.max_tables:  # to read them takes longer than to plan others
        what, remedy = "is too many tables for this service", f"send at most {settings.max_tables}"
        raise InvalidInputError("tables", len(tables), what, remedy)
    request = with_measured(decode(kind, value), measured)
    return cast(R, with_time(request, min(request.solver.time_limit_s, settings.max_time_limit_seconds)))


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
    raise ServiceError(400, "No JSON", wrong)


_NICE = 10
_PR_SET_PDEATHSIG = 1
_OUT_OF_MEMORY_FIRST = 900
"""Of 1000: the kernel ends workers before their service."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer, and what the service counts of it.

    Attributes:
        document: The body of the response.
        plan: The plan without its placements, if one was made for its own sake.
        plan_seconds: Time that it took.
    """

    document: bytes
    plan: Plan | None = None
    plan_seconds: float = 0.0


def begin_worker() -> None:
    """Prepares a worker: it ends with its service, and gives way to it."""
    for number in (signal.SIGINT, signal.SIGHUP):  # those of a terminal reach all processes
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    os.nice(_NICE)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(_OUT_OF_MEMORY_FIRST))
    tables = tuple(Table(name=str(i), rows=1000 << i, dim=8, group=str(i % 2)) for i in range(5))
    plan(PlanRequest(tables=tables, topology=Topology(ranks=2, hbm_bytes=1_300 << 20, host_bytes=1 << 20)))
    _memory_at_first()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is no reason to fill a disk


@functools.cache
def _memory_at_first() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


@contextlib.contextmanager
def _bounded_memory(num_bytes: int) -> Iterator[None]:
    """So much more at most; not outside the block, where the pool's own reading and sending would end the worker."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = _memory_at_first() + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def answer(request: AnyRequest, deadline: float, memory_bytes: int, plan_cache: Path | None = None) -> Answer:
    """The answer to a request.

    Args:
        request: The request.
        deadline: When its time is over, by the monotonic clock of the machine.
        memory_bytes: That it may take beside what the worker began with.
        plan_cache: Folder of plans that were made before.

    Raises:
        MemoryError: If that is too little.
    """
    with _bounded_memory(memory_bytes):
        if isinstance(request, HitRatesRequest):
            return Answer(document=_written(_hit_rates(request)))
        timed = with_time(request, deadline - time.monotonic())
        try:
            if isinstance(timed, WhatIfRequest):
                sizes = timed.curve_hbm_bytes
                found = what_if(timed, points=timed.points, hbm_bytes=sizes, host_points=timed.host_points)
                return Answer(document=_written(found))
            return _plan(request, timed, plan_cache)
        except TimeIsUpError as error:  # of the time that was left: what was sent is the limit
            raise TimeIsUpError(error.field, request.solver.time_limit_s, error.problem, error.remedy) from None


def _plan(request: PlanRequest, timed: PlanRequest, plan_cache: Path | None) -> Answer:
    begin = time.monotonic()
    made = plan(timed) if plan_cache is None else PlanCache(folder=plan_cache).plan(request, lambda: plan(timed))
    answer = PlanAnswer(plan=made, code=lines_to_paste(request, made), report=make_report(request, made))
    document, small = _written(answer), replace(made, placements=(), modules=())
    return Answer(document=document, plan=small, plan_seconds=time.monotonic() - begin)


def _hit_rates(request: HitRatesRequest) -> HitRates:
    keys = step_keys(request.access, request.rows, request.lookups_per_step, request.eviction)
    rates = keys.misses(np.array(request.cache_rows, dtype=np.float64))
    return HitRates(unique_keys=keys.unique, miss_rates=tuple(rates.tolist()))


def _written(value: object) -> bytes:
    return json.dumps(encode(value)).encode()
