"""A plan in the words of the runtime that runs it: option values by table."""

from __future__ import annotations

from dataclasses import dataclass

from evenkeel.placement.hit_rates import Eviction
from evenkeel.placement.invalid_input import InvalidInputError, require
from evenkeel.placement.model import Mode, Optimizer, Runtime, Sharding, Table
from evenkeel.placement.plan import Placement, Plan, Status
from evenkeel.placement.request import PlanRequest
from evenkeel.placement.shards import column_blocks
from evenkeel.placement.storage import BUCKET_ROWS, round_up

TORCHREC_KERNELS = {
    Mode.HBM_ONLY: "fused",
    Mode.CACHING: "fused_uvm_caching",
    Mode.HOST_ONLY: "fused_uvm",
}
FBGEMM_OPTIMIZERS = {
    Optimizer.SGD: "EXACT_SGD",
    Optimizer.ADAM: "ADAM",
    Optimizer.ADAGRAD: "EXACT_ADAGRAD",
    Optimizer.ROWWISE_ADAGRAD: "EXACT_ROWWISE_ADAGRAD",
}
"""Members of FBGEMM's `EmbOptimType`, which both runtimes take."""
_ROOM = "give more memory, or plan smaller tables"


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicEmbOptions:
    """What DynamicEmb is told of one table.

    Attributes:
        caching: Whether host memory holds the whole table and HBM a cache.
        global_hbm_for_values: HBM for values over all ranks, in bytes.
        dist_type: How keys are routed to ranks.
        bucket_capacity: Rows of a bucket of the index.
        init_capacity: Rows of the table on one rank, in whole buckets.
        score_strategy: Names of members of `DynamicEmbScoreStrategy`: one, or two where scores have two words.
        training: Whether optimizer state is stored.
        init_bound: Rows begin uniformly between minus this and this, as TorchRec's tables do.
        admission_threshold: Lookups after which a key gets a row; `None` admits all at once.
        admission_capacity: Keys that the counter before admission holds on one rank, in whole buckets.
    """

    caching: bool
    global_hbm_for_values: int
    dist_type: str
    bucket_capacity: int
    init_capacity: int
    score_strategy: tuple[str, ...]
    training: bool
    init_bound: float
    admission_threshold: int | None
    admission_capacity: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchRecOptions:
    """What TorchRec is told of one table.

    Attributes:
        sharding_type: Name of the sharding type.
        compute_kernel: Name of the kernel.
        load_factor: Part of the rows that the cache holds; `None` without a cache.
        cache_algorithm: `LRU` or `LFU`.
        prefetch: Whether the cache holds the rows of more than one batch, for a pipeline that prefetches.
        min_partition: Width of a block of columns; `None` where columns stay together.
        pooling_factors: Mean lookups of a sample by feature.
        ranks: Ranks of the shards, where they are not on all.
    """

    sharding_type: str
    compute_kernel: str
    load_factor: float | None
    cache_algorithm: str
    prefetch: bool
    min_partition: int | None
    pooling_factors: tuple[float, ...]
    ranks: tuple[int, ...]


def dynamicemb_options(request: PlanRequest, plan: Plan) -> dict[str, DynamicEmbOptions]:
    """DynamicEmb options by table name.

    Raises:
        InvalidInputError: If the plan is for another runtime, or has no placements.
    """
    options, ranks = {}, request.topology.ranks
    for table, placement in _pairs(request, plan, Runtime.DYNAMICEMB):
        options[table.name] = DynamicEmbOptions(
            caching=placement.mode is Mode.CACHING,
            global_hbm_for_values=placement.hbm_value_bytes * ranks,
            dist_type=table.dist_type,
            bucket_capacity=BUCKET_ROWS,
            init_capacity=_whole_buckets(table.rows, ranks),
            score_strategy=_score_strategy(table),
            training=request.step.training,
            init_bound=table.rows**-0.5,
            admission_threshold=table.admission_threshold if table.admission_rows else None,
            admission_capacity=_whole_buckets(table.admission_rows, ranks),
        )
    return options


def _whole_buckets(rows: int, ranks: int) -> int:
    return int(round_up(-(-rows // ranks), BUCKET_ROWS))


def _score_strategy(table: Table) -> tuple[str, ...]:
    """DynamicEmb's only scores of two words are a time and a frequency, by which it evicts."""
    if table.score_words == 2:
        return ("TIMESTAMP", "LFU")
    return ("TIMESTAMP",) if table.eviction is Eviction.LRU else ("LFU",)


def torchrec_options(request: PlanRequest, plan: Plan) -> dict[str, TorchRecOptions]:
    """TorchRec options by table name.

    Raises:
        InvalidInputError: If the plan is for another runtime, has no placements, or cuts the sequence tables of a
            collection into blocks of different widths, which TorchRec cannot exchange.
    """
    options, split = {}, (Sharding.COLUMN_WISE, Sharding.GRID)
    widths: dict[str, tuple[str, int]] = {}
    for index, (table, placement) in enumerate(_pairs(request, plan, Runtime.TORCHREC)):
        cached = placement.mode is Mode.CACHING
        replicated = placement.sharding is Sharding.DATA_PARALLEL
        blocks = column_blocks(placement, request.topology)
        if placement.sharding is Sharding.COLUMN_WISE and not table.pooled:
            width = table.dim // len(blocks)
            other, known = widths.setdefault(table.group, (table.name, width))
            what = f"makes blocks of {width} columns, and those of {other!r} in the same collection have {known}"
            remedy = "TorchRec exchanges sequences of one width: give both the same column_shards"
            require(width == known, f"tables[{index}].column_shards", len(blocks), what, remedy)
        options[table.name] = TorchRecOptions(
            sharding_type=placement.sharding.value,
            compute_kernel="dense" if replicated else TORCHREC_KERNELS[placement.mode],
            load_factor=placement.ratio if cached else None,
            cache_algorithm=table.eviction.value.upper(),
            prefetch=cached and request.step.prefetch_depth > 1,
            min_partition=table.dim // len(blocks) if placement.sharding in split else None,
            pooling_factors=(table.ids_per_sample / table.features,) * table.features,
            ranks=placement.ranks,
        )
    return options


def _pairs(request: PlanRequest, plan: Plan, runtime: Runtime) -> list[tuple[Table, Placement]]:
    remedy = f"plan with runtime={runtime.value}"
    require(plan.runtime is runtime, "plan.runtime", plan.runtime.value, f"is not {runtime.value}", remedy)
    lacking = "holds no placements"
    if plan.shortage is not None:
        raise InvalidInputError("plan.status", plan.status.value, f"{lacking}: {plan.shortage.explanation}", _ROOM)
    if plan.status is Status.UNKNOWN:
        raise InvalidInputError("plan.status", plan.status.value, lacking, "raise solver.time_limit_s and plan again")
    placed = [placement.table for placement in plan.placements]
    wanted = [table.name for table in request.tables]
    require(
        placed == wanted, "plan.placements", placed[:3], "are not those of the tables", "use the plan of this request"
    )
    return list(zip(request.tables, plan.placements, strict=True))
