"""A plan in the words of the runtime that runs it: option values by table, and the lines to paste into a job."""

from __future__ import annotations

from dataclasses import dataclass

from evenkeel.placement.hit_rates import Eviction
from evenkeel.placement.invalid_input import InvalidInputError, require
from evenkeel.placement.model import Mode, Runtime, Sharding, Table
from evenkeel.placement.plan import Placement, Plan, Status
from evenkeel.placement.request import PlanRequest
from evenkeel.placement.storage import BUCKET_ROWS, round_up

TORCHREC_KERNELS = {
    Mode.HBM_ONLY: "fused",
    Mode.CACHING: "fused_uvm_caching",
    Mode.HOST_ONLY: "fused_uvm",
}
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
        score_strategy: Name of the member of `DynamicEmbScoreStrategy`.
    """

    caching: bool
    global_hbm_for_values: int
    dist_type: str
    bucket_capacity: int
    init_capacity: int
    score_strategy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchRecOptions:
    """What TorchRec is told of one table.

    Attributes:
        sharding_type: Name of the sharding type.
        compute_kernel: Name of the kernel.
        load_factor: Part of the rows that the cache holds; `None` without a cache.
        cache_algorithm: `LRU` or `LFU`.
        ranks: Ranks of the shards, where they are not on all.
    """

    sharding_type: str
    compute_kernel: str
    load_factor: float | None
    cache_algorithm: str
    ranks: tuple[int, ...]


def dynamicemb_options(request: PlanRequest, plan: Plan) -> dict[str, DynamicEmbOptions]:
    """DynamicEmb options by table name.

    Raises:
        InvalidInputError: If the plan is for another runtime, or has no placements.
    """
    options = {}
    for table, placement in _pairs(request, plan, Runtime.DYNAMICEMB):
        capacity = int(round_up(-(-table.rows // request.topology.ranks), BUCKET_ROWS))
        strategy = "TIMESTAMP" if table.eviction is Eviction.LRU else "LFU"
        options[table.name] = DynamicEmbOptions(
            caching=placement.mode is Mode.CACHING,
            global_hbm_for_values=placement.hbm_value_bytes * request.topology.ranks,
            dist_type=table.dist_type,
            bucket_capacity=BUCKET_ROWS,
            init_capacity=capacity,
            score_strategy=strategy,
        )
    return options


def torchrec_options(request: PlanRequest, plan: Plan) -> dict[str, TorchRecOptions]:
    """TorchRec options by table name.

    Raises:
        InvalidInputError: If the plan is for another runtime, or has no placements.
    """
    options = {}
    for table, placement in _pairs(request, plan, Runtime.TORCHREC):
        replicated = table.sharding is Sharding.DATA_PARALLEL
        options[table.name] = TorchRecOptions(
            sharding_type=table.sharding.value,
            compute_kernel="dense" if replicated else TORCHREC_KERNELS[placement.mode],
            load_factor=placement.ratio if placement.mode is Mode.CACHING else None,
            cache_algorithm=table.eviction.value.upper(),
            ranks=placement.ranks,
        )
    return options


def lines_to_paste(request: PlanRequest, plan: Plan) -> str:
    """Python lines that put `plan` into a job; empty for a plan without placements."""
    if not plan.placements:
        return ""
    return _dynamicemb_lines(request, plan) if plan.runtime is Runtime.DYNAMICEMB else _torchrec_lines(request, plan)


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


def _dynamicemb_lines(request: PlanRequest, plan: Plan) -> str:
    lines = [
        "from dynamicemb import DynamicEmbScoreStrategy, DynamicEmbTableOptions",
        "from dynamicemb.planner import DynamicEmbParameterConstraints",
        "",
        "constraints = {",
    ]
    for name, option in dynamicemb_options(request, plan).items():
        lines += [
            f"    {name!r}: DynamicEmbParameterConstraints(",
            '        sharding_types=["row_wise"],',
            "        use_dynamicemb=True,",
            "        dynamicemb_options=DynamicEmbTableOptions(",
            f"            caching={option.caching},",
            f"            global_hbm_for_values={option.global_hbm_for_values},",
            f"            dist_type={option.dist_type!r},",
            f"            bucket_capacity={option.bucket_capacity},",
            f"            init_capacity={option.init_capacity},",
            f"            score_strategy=DynamicEmbScoreStrategy.{option.score_strategy},",
            "        ),",
            "    ),",
        ]
    return "\n".join([*lines, "}", ""])


def _torchrec_lines(request: PlanRequest, plan: Plan) -> str:
    options = torchrec_options(request, plan)
    cached = any(option.load_factor is not None for option in options.values())
    lines = ["from fbgemm_gpu.split_table_batched_embeddings_ops_common import CacheAlgorithm"] if cached else []
    lines += ["from torchrec.distributed.planner.types import ParameterConstraints"]
    lines += ["from torchrec.distributed.types import CacheParams"] if cached else []
    lines += ["", "constraints = {"]
    for name, option in options.items():
        lines += [
            f"    {name!r}: ParameterConstraints(",
            f"        sharding_types=[{option.sharding_type!r}],",
            f"        compute_kernels=[{option.compute_kernel!r}],",
        ]
        if option.load_factor is not None:
            cache = f"algorithm=CacheAlgorithm.{option.cache_algorithm}, load_factor={option.load_factor!r}"
            lines += [f"        cache_params=CacheParams({cache}),"]
        lines += ["    ),"]
    return "\n".join([*lines, "}", ""])
