"""The planner's workers: each answers one request and ends, so that none leaves anything behind.

A worker is told of its request, and tells of its answer, in frames: a kind, a length, and as many bytes.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np

from evenkeel.placement import InvalidInputError, PlanRequest, Table, Topology, compare, plan, what_if
from evenkeel.placement.codec import decode, encode
from evenkeel.placement.hit_rates import step_keys
from evenkeel.placement.pasted_lines import lines_to_paste
from evenkeel.placement.plan_file import FORMAT
from evenkeel.placement.report import make_report
from evenkeel.plan_cache import PlanCache
from services.operations import zygote
from services.operations.children import ends_with_parent, limit_memory
from services.planner.problems import FieldProblem, invalid_input, problem
from services.planner.requests import CompareRequest, HitRates, HitRatesRequest, PlanAnswer, WhatIfRequest

R = TypeVar("R", bound=PlanRequest)

FRAME = struct.Struct("<cq")
"""To the worker: `J`, the job; `B`, the body. From it: `L`, the time limit; `F`, the facts; `A`, the answer."""
SECONDS = struct.Struct("<d")

_NICE = 10
_EXCERPT = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A request as a worker gets it.

    Attributes:
        kind: What is asked for: one of `KINDS`.
        path: The path that was asked for.
        max_tables: Most tables of a request.
        max_time_limit_s: Longer time limits are cut to it.
        plan_cache: Folder of plans that were made before.
    """

    kind: str
    path: str
    max_tables: int
    max_time_limit_s: float
    plan_cache: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the service counts of an answer.

    Attributes:
        status: The HTTP status.
        tables: Tables of the request, if it asked for a plan.
        plan_status: Outcome of the plan, if one was made for its own sake.
        gap: Its gap.
        binding: The budget that is too small, if nothing fits.
        plan_seconds: Time that it took.
    """

    status: int
    tables: int | None = None
    plan_status: str | None = None
    gap: float | None = None
    binding: str | None = None
    plan_seconds: float = 0.0


def run_worker(end: socket.socket, memory_bytes: int) -> None:
    """Answers the one request that comes over a socket."""
    os.nice(_NICE)
    with end, end.makefile("rb") as source:
        head = FRAME.unpack(source.read(FRAME.size))
        job = Job(**json.loads(source.read(head[1])))
        body = source.read(FRAME.unpack(source.read(FRAME.size))[1])
        limit_memory(memory_bytes)
        gc.disable()  # it ends before garbage matters
        facts, document = answer(job, body, lambda limit: end.sendall(frame(b"L", SECONDS.pack(limit))))
        end.sendall(frame(b"F", json.dumps(asdict(facts)).encode()))
        end.sendall(frame(b"A", document))


def frame(kind: bytes, content: bytes) -> bytes:
    """A kind, a length, and the content."""
    return FRAME.pack(kind, len(content)) + content


@dataclass(slots=True)
class _Asked:
    """A job under way.

    Attributes:
        job: The job.
        body: The request's body.
        began: When, by the monotonic clock.
        announce: Is told the time limit once it is known.
        facts: What is found out.
    """

    job: Job
    body: bytes
    began: float
    announce: Callable[[float], None]
    facts: dict[str, Any] = field(default_factory=dict)

    def plans(self, kind: type[R]) -> R:
        """The request for plans in the body, with what is left of its time limit."""
        given = self.json()
        if isinstance(given, dict) and given.get("format") == FORMAT:  # a plan file: its request is planned again
            given = given.get("request")
        asked = decode(kind, given)
        if len(asked.tables) > self.job.max_tables:
            remedy = f"send at most {self.job.max_tables}"
            raise InvalidInputError("tables", len(asked.tables), "is too many tables for this service", remedy)
        self.facts["tables"] = len(asked.tables)
        limit = min(asked.solver.time_limit_s, self.job.max_time_limit_s)
        self.announce(limit)
        left = self.began + limit - time.monotonic()
        if left < 0.01:
            what = f"was over when the {len(self.body)} bytes of the request were read"
            raise InvalidInputError("solver.time_limit_s", limit, what, "give more time or fewer tables")
        return replace(asked, solver=replace(asked.solver, time_limit_s=left))

    def json(self) -> Any:
        """The body as plain values.

        Raises:
            NotJsonError: If it is none.
        """
        try:
            return json.loads(self.body)
        except json.JSONDecodeError as error:
            excerpt = error.doc[max(0, error.pos - _EXCERPT) : error.pos + _EXCERPT]
            raise NotJsonError(excerpt, f"{error.msg} at line {error.lineno}, column {error.colno}") from None
        except UnicodeDecodeError as error:
            excerpt = repr(self.body[max(0, error.start - _EXCERPT) : error.start + _EXCERPT])
            raise NotJsonError(excerpt, f"byte {error.start} is no {error.encoding}") from None
        except (ValueError, RecursionError) as error:
            raise NotJsonError(self.body[:_EXCERPT].decode("utf-8", "replace"), str(error)) from None


class NotJsonError(Exception):
    """The body is no JSON: what of it, and why."""

    def __init__(self, value: str, why: str) -> None:
        super().__init__(why)
        self.value, self.why = value or "nothing", why


def _plans(asked: _Asked) -> PlanAnswer:
    request = asked.plans(PlanRequest)
    begin = time.monotonic()
    folder = asked.job.plan_cache
    kept = None if folder is None else PlanCache(folder=Path(folder))
    found = plan(request) if kept is None else kept.plan(request, lambda: plan(request))
    shortage = found.shortage
    asked.facts |= {"plan_status": found.status.value, "gap": found.gap, "plan_seconds": time.monotonic() - begin}
    asked.facts["binding"] = None if shortage is None else shortage.binding
    return PlanAnswer(plan=found, code=lines_to_paste(request, found), report=make_report(request, found))


def _compare(asked: _Asked) -> Any:
    request = asked.plans(CompareRequest)
    return compare(request, request.own)


def _what_if(asked: _Asked) -> Any:
    request = asked.plans(WhatIfRequest)
    return what_if(request, points=request.points, hbm_bytes=request.curve_hbm_bytes, host_points=request.host_points)


def _hit_rates(asked: _Asked) -> HitRates:
    request = decode(HitRatesRequest, asked.json())
    asked.announce(asked.job.max_time_limit_s)
    keys = step_keys(request.access, request.rows, request.lookups_per_step, request.eviction)
    rates = keys.misses(np.array(request.cache_rows, dtype=np.float64))
    return HitRates(unique_keys=keys.unique, miss_rates=tuple(rates.tolist()))


KINDS: dict[str, Callable[[_Asked], Any]] = {
    "plans": _plans,
    "compare": _compare,
    "whatif": _what_if,
    "hit-rates": _hit_rates,
}


def answer(job: Job, body: bytes, announce: Callable[[float], None]) -> tuple[Facts, bytes]:
    """The answer to a request: a result or a problem document.

    Args:
        job: What is asked for.
        body: The request's body.
        announce: Is told the time limit of the request, once that is known.
    """
    asked = _Asked(job, body, time.monotonic(), announce)
    try:
        document, status = encode(KINDS[job.kind](asked)), 200
    except InvalidInputError as error:
        document, status = encode(invalid_input(job.path, error)), 422
    except NotJsonError as error:
        wrong = FieldProblem.of("body", error.value, f"is no JSON: {error.why}", "send one JSON object")
        document, status = encode(problem(job.path, 400, "no-json", "Not JSON", wrong.sentence, (wrong,))), 400
    except MemoryError:
        wrong = FieldProblem.of(
            "tables",
            asked.facts.get("tables"),
            "need more memory than a request may take",
            "send fewer tables, fewer solver.ratio_steps or histograms of fewer bins",
        )
        document = encode(problem(job.path, 422, "too-costly", "Too costly", wrong.sentence, (wrong,)))
        status = 422
    return Facts(status=status, **asked.facts), json.dumps(document).encode()


def _prepare() -> tuple[float, dict[str, str]]:
    """One small plan loads and warms whatever plans need."""
    tables = tuple(Table(name=str(i), rows=1000 << i, dim=8, group=str(i % 2)) for i in range(5))
    plan(PlanRequest(tables=tables, topology=Topology(ranks=2, hbm_bytes=1_300 << 20, host_bytes=1 << 20)))
    return 1.0, {}


def _work(fds: list[int], memory_bytes: int) -> None:
    run_worker(socket.socket(fileno=fds[0]), memory_bytes)


TRADE = zygote.Trade(prepare=_prepare, work=_work)


def run(control: socket.socket) -> NoReturn:
    """The zygote as all that a process does."""
    zygote.run(control, TRADE)


if __name__ == "__main__":
    ends_with_parent(int(sys.argv[2]), "evenkeel-zygote")
    run(socket.socket(fileno=int(sys.argv[1])))
