"""What the planner's processes do: one request each time, in bounded memory."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from evenkeel.placement import PlanRequest, Table, Topology, plan, what_if
from evenkeel.placement.access import step_keys
from evenkeel.placement.application import lines_to_paste
from evenkeel.placement.fields import encode
from evenkeel.placement.report import make_report
from evenkeel.placement.request import with_time
from evenkeel.plan_cache import PlanCache
from services.planner.requests import AnyRequest, HitRates, HitRatesRequest, PlanAnswer, WhatIfRequest

_NICE = 10
_PR_SET_PDEATHSIG = 1
_OUT_OF_MEMORY_FIRST = 900
"""Of 1000: the kernel ends workers before their service."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer, and what the service counts of it.

    Attributes:
        document: The body of the response.
        plan_status: Outcome of the plan, if one was made for its own sake.
        gap: Its gap.
        binding: The budget that is too small, if nothing fits.
        plan_seconds: Time that it took.
    """

    document: bytes
    plan_status: str | None = None
    gap: float | None = None
    binding: str | None = None
    plan_seconds: float = 0.0


def begin_worker(memory_bytes: int) -> None:
    """Prepares a worker: it ends with its service, gives way to it, and takes so much more memory at most."""
    for number in (signal.SIGINT, signal.SIGHUP):  # those of a terminal reach all processes
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    os.nice(_NICE)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(_OUT_OF_MEMORY_FIRST))
    tables = tuple(Table(name=str(i), rows=1000 << i, dim=8, group=str(i % 2)) for i in range(5))
    plan(PlanRequest(tables=tables, topology=Topology(ranks=2, hbm_bytes=1_300 << 20, host_bytes=1 << 20)))
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + memory_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is no reason to fill a disk


def ready() -> None:
    """Does nothing: who can do that can work."""


def answer(request: AnyRequest, deadline: float, plan_cache: Path | None = None) -> Answer:
    """The answer to a request.

    Args:
        request: The request.
        deadline: When its time is over, by the monotonic clock of the machine.
        plan_cache: Folder of plans that were made before.
    """
    if isinstance(request, HitRatesRequest):
        return Answer(document=_written(_hit_rates(request)))
    timed = with_time(request, deadline - time.monotonic())
    if isinstance(timed, WhatIfRequest):
        found = what_if(timed, points=timed.points, hbm_bytes=timed.curve_hbm_bytes, host_points=timed.host_points)
        return Answer(document=_written(found))
    return _plan(request, timed, plan_cache)


def _plan(request: PlanRequest, timed: PlanRequest, plan_cache: Path | None) -> Answer:
    begin = time.monotonic()
    made = plan(timed) if plan_cache is None else PlanCache(folder=plan_cache).plan(request, lambda: plan(timed))
    answer = PlanAnswer(plan=made, code=lines_to_paste(request, made), report=make_report(request, made))
    return Answer(
        document=_written(answer),
        plan_status=made.status.value,
        gap=made.gap,
        binding=None if made.shortage is None else made.shortage.binding,
        plan_seconds=time.monotonic() - begin,
    )


def _hit_rates(request: HitRatesRequest) -> HitRates:
    keys = step_keys(request.access, request.rows, request.lookups_per_step, request.eviction)
    rates = keys.misses(np.array(request.cache_rows, dtype=np.float64))
    return HitRates(unique_keys=keys.unique, miss_rates=tuple(rates.tolist()))


def _written(value: object) -> bytes:
    return json.dumps(encode(value)).encode()
