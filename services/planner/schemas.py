"""The bodies of requests, as the OpenAPI document describes them. The core's dataclasses are the answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from evenkeel.placement import Plan, PlanRequest
from evenkeel.placement.codec import decode
from evenkeel.placement.hardware import parse_profile
from evenkeel.placement.model import MAX_BYTES, MAX_DIM, MAX_RANKS, MAX_ROWS
from evenkeel.placement.request import MAX_RATIO_STEPS

Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Count = Annotated[float, Field(ge=0, le=1e17, allow_inf_nan=False)]
Bytes = Annotated[int, Field(ge=0, le=MAX_BYTES)]
ModeName = Literal["HBM_ONLY", "CACHING", "HYBRID", "HOST_ONLY"]
Name = Annotated[str, Field(min_length=1, max_length=512)]


class Body(BaseModel):
    """Base of all request bodies: strict types, no unknown fields."""

    model_config = ConfigDict(strict=True, extra="forbid", use_attribute_docstrings=True)


class ZipfBody(Body):
    """Key i is looked up with a probability proportional to i ** -exponent."""

    kind: Literal["zipf"]
    exponent: float = Field(default=1.05, ge=0, le=10, allow_inf_nan=False)
    """Zero is uniform; recommendation data is usually between 0.6 and 1.3."""


class HistogramBody(Body):
    """Observed frequencies: bin b holds keys[b] keys that were looked up lookups[b] times together."""

    kind: Literal["histogram"]
    keys: list[Annotated[float, Field(ge=1e-9, le=1e17, allow_inf_nan=False)]] = Field(min_length=1, max_length=100_000)
    """Number of distinct keys of each bin."""
    lookups: list[Count] = Field(min_length=1, max_length=100_000)
    """Number of lookups of all keys of each bin together."""


class MissCurveBody(Body):
    """A measured miss-ratio curve."""

    kind: Literal["miss_curve"]
    cache_fractions: list[Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]] = Field(
        min_length=1, max_length=10_000
    )
    """Cache sizes as fractions of the table's rows, ascending."""
    miss_rates: list[Fraction] = Field(min_length=1, max_length=10_000)
    """Miss rate at each size, among the unique keys of a step."""
    unique_fraction: float = Field(gt=0, le=1, allow_inf_nan=False)
    """Unique keys of a step (all ranks) over its lookups."""


AccessBody = Annotated[ZipfBody | HistogramBody | MissCurveBody, Field(discriminator="kind")]


class TableBody(Body):
    """One embedding table."""

    name: Name = Field(examples=["user_id"])
    """Unique name."""
    rows: int = Field(ge=1, le=MAX_ROWS, examples=[100_000_000])
    """Number of rows (keys), over all ranks."""
    dim: int = Field(ge=1, le=MAX_DIM, examples=[128])
    """Width of an embedding, in elements."""
    ids_per_sample: float = Field(default=1.0, ge=0, le=1e6, allow_inf_nan=False)
    """Mean number of lookups of one sample, over all features that use the table."""
    value_bytes: Literal[2, 4] = 4
    """Bytes of one element."""
    optimizer: Literal["sgd", "adam", "adagrad", "rowwise_adagrad"] = "adam"
    """Decides the state kept beside each row."""
    access: AccessBody = ZipfBody(kind="zipf")
    """How often the keys are looked up."""
    pooled: bool = False
    """Whether the lookups of a sample are summed into one output row of each feature."""
    features: int = Field(default=1, ge=1, le=100_000)
    """Number of features that use the table."""
    eviction: Literal["lru", "lfu"] = "lru"
    """What a full cache gives up."""
    score_words: Literal[1, 2] = 1
    """8-byte scores kept per row."""
    admission_rows: int = Field(default=0, ge=0, le=MAX_ROWS)
    """Rows of the table that counts keys before they are admitted; 0 without admission."""
    dist_type: str = Field(default="hash_roundrobin", max_length=100)
    """How keys are routed to ranks; tables that differ here never fuse."""
    group: str = Field(default="", max_length=512)
    """Name of the module that owns the table; tables of different modules never fuse."""
    sharding: Literal["row_wise", "table_wise", "column_wise", "data_parallel"] = "row_wise"
    """How the table is spread over the ranks."""
    column_shards: int = Field(default=1, ge=1, le=MAX_DIM)
    """Number of column shards of a column-wise table; a divisor of dim."""
    modes: list[ModeName] = Field(default=[], max_length=4)
    """The modes to choose from; all where empty."""
    ratio: Fraction | None = None
    """Pins the fraction of the rows that HBM holds; 0 is HOST_ONLY, 1 is HBM_ONLY."""


class TopologyBody(Body):
    """The machines of the job."""

    ranks: int = Field(ge=1, le=MAX_RANKS, examples=[8])
    """Number of ranks (GPUs)."""
    hbm_bytes: Bytes = Field(examples=[139 << 30])
    """HBM of one rank; 0 plans without any GPU memory."""
    ranks_per_host: int | None = Field(default=None, ge=1, le=MAX_RANKS)
    """Ranks that share one host's memory, a divisor of ranks; all on one host where null."""
    host_bytes: Bytes | None = None
    """Memory of one host; unlimited where null, 0 plans without any."""
    hbm_reserved_fraction: Fraction = 0.0
    """Part of the HBM that tables may not use (model, activations, communication)."""
    hbm_reserved_bytes: Bytes = 0
    """The same in bytes, on top of the fraction."""
    host_reserved_fraction: Fraction = 0.0
    """Part of the host memory that tables may not use."""
    host_reserved_bytes: Bytes = 0
    """The same in bytes, on top of the fraction."""


class StepBody(Body):
    """What one step of the job does."""

    samples_per_rank: int = Field(default=1024, ge=1, le=10**9)
    """Samples of a batch on one rank."""
    training: bool = True
    """Whether there is a backward pass, gradients and optimizer state."""
    prefetch_depth: int = Field(default=1, ge=1, le=64)
    """Batches whose rows a cache must hold at once; 1 without prefetching."""


class SolverBody(Body):
    """How hard to search."""

    ratio_steps: int = Field(default=0, ge=0, le=MAX_RATIO_STEPS)
    """Ratios tried for CACHING and HYBRID; 0 chooses by the number of tables."""
    gap: Fraction = 1e-4
    """Relative gap to prove above 50 tables; up to 50 the optimum is proved."""
    time_limit_s: float = Field(default=30.0, ge=0.01, le=3600, allow_inf_nan=False)
    """Time after which the best found is returned with its gap; the service may cut it."""


_EXAMPLE: dict[str, Any] = {
    "tables": [
        {"name": "user_id", "rows": 400_000_000, "dim": 128, "ids_per_sample": 1},
        {"name": "item_id", "rows": 50_000_000, "dim": 128, "ids_per_sample": 200},
    ],
    "topology": {"ranks": 8, "hbm_bytes": 60 << 30, "host_bytes": 1536 << 30},
    "hardware": "h200",
    "step": {"samples_per_rank": 1024},
}


class PlanBody(Body):
    """Tables, machines and the step."""

    model_config = ConfigDict(json_schema_extra={"examples": [_EXAMPLE]})

    tables: list[TableBody] = Field(default=[], max_length=20_000)
    """The tables."""
    topology: TopologyBody
    """The machines."""
    hardware: str | dict[str, Any] = Field(default="h200", examples=["h200"])
    """Name of a built-in hardware profile, or a profile as `evenkeel calibrate` writes it."""
    runtime: Literal["dynamicemb", "torchrec"] = "dynamicemb"
    """The library that will hold the tables."""
    step: StepBody = StepBody()
    """What a step does."""
    solver: SolverBody = SolverBody()
    """How hard to search."""

    def to_request(self, longest_seconds: float) -> PlanRequest:
        """The core's request, its time limit cut to `longest_seconds`.

        Raises:
            InvalidInputError: If the fields contradict each other.
        """
        wanted = set(PlanBody.model_fields)
        value = self.model_dump(include=wanted)
        if isinstance(value["hardware"], dict):
            parse_profile(value["hardware"])
        value["solver"]["time_limit_s"] = min(value["solver"]["time_limit_s"], longest_seconds)
        return decode(PlanRequest, value)


class OwnBody(Body):
    """A placement that a user chose."""

    table: Name
    """Name of the table."""
    mode: ModeName
    """Its mode."""
    ratio: Fraction = 0.5
    """Fraction of its rows in HBM; of no meaning for HBM_ONLY and HOST_ONLY."""


class CompareBody(PlanBody):
    """A request, and the user's own plan."""

    own: list[OwnBody] = Field(max_length=20_000)
    """The user's placement of every table."""


class WhatIfBody(PlanBody):
    """A request, and the HBM sizes to plan for."""

    points: int = Field(default=25, ge=0, le=256)
    """Number of HBM sizes between the smallest that works and the largest that is of use."""
    curve_hbm_bytes: list[Bytes] = Field(default=[], max_length=256)
    """HBM sizes to plan for instead."""


class HitRatesBody(Body):
    """A table and the caches to judge."""

    rows: int = Field(ge=1, le=MAX_ROWS, examples=[10_000_000])
    """Number of rows (keys)."""
    lookups_per_step: float = Field(gt=0, le=1e15, allow_inf_nan=False, examples=[262_144])
    """Lookups of a step, over all ranks."""
    access: AccessBody = ZipfBody(kind="zipf")
    """How often the keys are looked up."""
    eviction: Literal["lru", "lfu"] = "lru"
    """What a full cache gives up."""
    cache_rows: list[Annotated[int, Field(ge=0, le=MAX_ROWS)]] = Field(min_length=1, max_length=10_000)
    """Cache sizes in rows, over all ranks."""


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
