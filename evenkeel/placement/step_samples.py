"""Whole steps of tables as they are measured: what each was made of, and the request that describes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from evenkeel.placement.access import power_law
from evenkeel.placement.bounds import Length, Range, check_bounds
from evenkeel.placement.hardware import HardwareProfile
from evenkeel.placement.model import (
    MAX_DIM,
    MAX_RANKS,
    MAX_ROWS,
    Mode,
    Optimizer,
    Runtime,
    Sharding,
    Step,
    Table,
    Topology,
)
from evenkeel.placement.request import PlanRequest

EXPONENT = 1.05


@dataclass(frozen=True, slots=True, kw_only=True)
class TablePart:
    """Equal tables of a step.

    Attributes:
        count: Number of tables.
        rows: Rows of each.
        mode: Their mode.
        ratio: Fraction of the rows in HBM, of a cached table.
        dim: Width of an embedding.
        ids: Lookups of a sample and table, from a power law of exponent 1.05.
        pooled: Whether lookups of a sample are added up.
        sharding: How they are spread over the ranks.
    """

    count: Annotated[int, Range(1, 10_000)]
    rows: Annotated[int, Range(1, MAX_ROWS)]
    mode: Mode = Mode.HBM_ONLY
    ratio: float = 0.0
    dim: Annotated[int, Range(1, MAX_DIM)] = 128
    ids: Annotated[int, Range(1, 1_000_000)] = 1
    pooled: bool = True
    sharding: Sharding = Sharding.ROW_WISE

    def __post_init__(self) -> None:
        check_bounds(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSample:
    """A step that is measured: pooled tables are in one module, those of sequences in another.

    Attributes:
        name: What it is called.
        samples: Samples of a batch on a rank.
        parts: Its tables.
        optimizer: Fused optimizer of all tables.
        ranks: Ranks that it was measured on.
        seconds: Forward and backward of one step, in steady state; 0 where it is not measured yet.
    """

    name: Annotated[str, Length(1, 512)]
    samples: Annotated[int, Range(1, 10**9)]
    parts: Annotated[tuple[TablePart, ...], Length(1, 1_000)]
    optimizer: Optimizer = Optimizer.ROWWISE_ADAGRAD
    ranks: Annotated[int, Range(1, MAX_RANKS)] = 2
    seconds: Annotated[float, Range(0, 3600)] = 0.0

    def __post_init__(self) -> None:
        check_bounds(self)


def table_name(part: int, index: int) -> str:
    """Name of a table of a part."""
    return f"t{part}_{index}"


def request_of(sample: StepSample, hardware: str | HardwareProfile = "h200") -> PlanRequest:
    """The request that describes the step, every table pinned to its mode."""
    tables = [
        Table(
            name=table_name(number, index),
            rows=part.rows,
            dim=part.dim,
            ids_per_sample=float(part.ids),
            optimizer=sample.optimizer,
            access=power_law(EXPONENT, part.rows),
            pooled=part.pooled,
            group="bags" if part.pooled else "rows",
            sharding=part.sharding,
            modes=(part.mode,),
            ratio=part.ratio if part.mode is Mode.CACHING else None,
        )
        for number, part in enumerate(sample.parts)
        for index in range(part.count)
    ]
    return PlanRequest(
        tables=tuple(tables),
        topology=Topology(ranks=sample.ranks, hbm_bytes=1 << 45, host_bytes=None),
        hardware=hardware,
        runtime=Runtime.TORCHREC,
        step=Step(samples_per_rank=sample.samples),
    )
