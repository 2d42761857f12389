"""What is sent to the planner and what it answers, beside the dataclasses of the core."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from evenkeel.placement import Plan, PlanRequest
from evenkeel.placement.access import Access, Zipf
from evenkeel.placement.bounds import Length, Range, check_bounds
from evenkeel.placement.compare import OwnPlacement
from evenkeel.placement.hit_rates import Eviction
from evenkeel.placement.model import MAX_ROWS, Bytes, Rows
from evenkeel.placement.report import Report
from evenkeel.placement.request import MAX_TABLES
from evenkeel.placement.what_if import MAX_POINTS


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareRequest(PlanRequest):
    """A request, and the user's own plan.

    Attributes:
        own: The user's placement of every table.
    """

    own: Annotated[tuple[OwnPlacement, ...], Length(0, MAX_TABLES)]


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
