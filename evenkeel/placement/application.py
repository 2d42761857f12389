"""A plan in the words of the runtime that runs it: option values by table, lines to paste, a module with all of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from evenkeel.placement.access import Eviction
from evenkeel.placement.invalid_input import InvalidInputError, require
from evenkeel.placement.layouts import column_blocks
from evenkeel.placement.model import Mode, Optimizer, Runtime, Sharding, Table
from evenkeel.placement.plan import Placement, Plan, Status
from evenkeel.placement.request import PlanRequest
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


def lines_to_paste(request: PlanRequest, plan: Plan) -> str:
    """Python lines that put `plan` into a job; empty for a plan without placements."""
    if not plan.placements:
        return ""
    lines = _dynamicemb_lines if plan.runtime is Runtime.DYNAMICEMB else _torchrec_lines
    return "\n".join([*lines(request, plan), ""])


def _dynamicemb_lines(request: PlanRequest, plan: Plan) -> Iterable[str]:
    options = dynamicemb_options(request, plan)
    admits = sorted({o.admission_threshold for o in options.values() if o.admission_threshold is not None})
    names = ["InitializerArgs", "InitializerMode", "ScoreStrategy", "TableOptions"]
    yield "from dynamicemb import ("
    yield from (f"    DynamicEmb{name}," for name in names)
    yield from (f"    {name}," for name in (("FrequencyAdmissionStrategy", "KVCounter") if admits else ()))
    yield ")"
    yield "from dynamicemb.planner import DynamicEmbParameterConstraints"
    yield from _fused_params(request)
    if admits:
        yield "# Tables only fuse where their strategy is the same object."
        yield from (f"admit_at_{at} = FrequencyAdmissionStrategy(threshold={at})" for at in admits)
        yield ""
    yield "constraints = {"
    for name, option in options.items():
        yield f"    {name!r}: DynamicEmbParameterConstraints("
        yield '        sharding_types=["row_wise"],'
        yield "        use_dynamicemb=True,"
        yield "        dynamicemb_options=DynamicEmbTableOptions("
        yield from (f"            {line}," for line in _table_options(option))
        yield "        ),"
        yield "    ),"
    yield "}"


def _table_options(option: DynamicEmbOptions) -> Iterable[str]:
    yield f"caching={option.caching}"
    yield f"global_hbm_for_values={option.global_hbm_for_values}"
    yield f"dist_type={option.dist_type!r}"
    yield f"bucket_capacity={option.bucket_capacity}"
    yield f"init_capacity={option.init_capacity}"
    strategies = ", ".join(f"DynamicEmbScoreStrategy.{name}" for name in option.score_strategy)
    yield f"score_strategy={strategies if len(option.score_strategy) == 1 else f'({strategies})'}"
    yield f"training={option.training}"
    uniform = f"mode=DynamicEmbInitializerMode.UNIFORM, lower={-option.init_bound!r}, upper={option.init_bound!r}"
    yield f"initializer_args=DynamicEmbInitializerArgs(\n                {uniform}\n            )"
    if option.admission_threshold is not None:
        counter = f"capacity={option.admission_capacity}, bucket_capacity={option.bucket_capacity}"
        yield f"admit_strategy=admit_at_{option.admission_threshold}"
        yield f"admission_counter=KVCounter({counter})"


def _torchrec_lines(request: PlanRequest, plan: Plan) -> Iterable[str]:
    options = torchrec_options(request, plan)
    cached = any(option.load_factor is not None for option in options.values())
    if cached:
        yield "from fbgemm_gpu.split_table_batched_embeddings_ops_common import CacheAlgorithm"
    yield "from torchrec.distributed.planner.types import ParameterConstraints"
    if cached:
        yield "from torchrec.distributed.types import CacheParams"
    yield from _fused_params(request)
    if any(option.ranks for option in options.values()):
        yield "# Constraints leave the ranks to TorchRec's planner; evenkeel plan --sharding-plan writes them too."
    yield "constraints = {"
    for name, option in options.items():
        yield f"    {name!r}: ParameterConstraints("
        yield f"        sharding_types=[{option.sharding_type!r}],"
        yield f"        compute_kernels=[{option.compute_kernel!r}],"
        if option.min_partition is not None:
            yield f"        min_partition={option.min_partition},"
        yield f"        pooling_factors={list(option.pooling_factors)!r},"
        if option.load_factor is not None:
            yield f"        cache_params={_cache_params(option)},"
        yield "    ),"
    yield "}"


def _fused_params(request: PlanRequest) -> Iterable[str]:
    """The sharder's part of the plan: optimizers are given to it, not to constraints."""
    used: dict[str, list[str]] = {}
    for table in request.tables:
        used.setdefault(FBGEMM_OPTIMIZERS[table.optimizer], []).append(table.name)
    yield "from fbgemm_gpu.split_embedding_configs import EmbOptimType"
    yield ""
    deep = ', "prefetch_pipeline": True' if request.step.prefetch_depth > 1 else ""
    if len(used) == 1:
        (optimizer,) = used
        yield "# For the sharder, beside the learning rate; not needed where optimizers are applied in backward."
        yield f'fused_params = {{"optimizer": EmbOptimType.{optimizer}{deep}}}'
    else:
        yield "# For the sharders, by table: one sharder takes one optimizer."
        yield "fused_params = {"
        for optimizer, names in used.items():
            yield from (f'    {name!r}: {{"optimizer": EmbOptimType.{optimizer}{deep}}},' for name in names)
        yield "}"
    yield ""


def _cache_params(option: TorchRecOptions) -> str:
    prefetch = ", prefetch_pipeline=True" if option.prefetch else ""
    return (
        f"CacheParams(algorithm=CacheAlgorithm.{option.cache_algorithm}, load_factor={option.load_factor!r}{prefetch})"
    )


_MODULE = '''"""The sharding plan that `evenkeel plan` made. It needs TorchRec only:

    from {stem} import plan

    model = DistributedModelParallel(model, plan=plan)
"""

from fbgemm_gpu.split_table_batched_embeddings_ops_common import CacheAlgorithm
from torch.distributed._shard.metadata import ShardMetadata
from torchrec.distributed.types import (
    CacheParams,
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ParameterSharding,
    ShardingPlan,
)

RANKS, RANKS_PER_HOST = {ranks}, {local}


def sharded(sharding_type, compute_kernel, rows, columns, blocks, cache_params=None):
    """Each of `blocks` is a block of columns: the ranks that hold a part of its rows each."""
    shards = []
    for number, ranks in enumerate(blocks):
        height, width = -(-rows // len(ranks)), columns // len(blocks)
        for place, rank in enumerate(ranks):
            first = min(rows, place * height)
            shard = ShardMetadata(
                shard_sizes=[min(height, rows - first), width],
                shard_offsets=[first, number * width],
                placement=f"rank:{{rank}}/cuda:{{rank % RANKS_PER_HOST}}",
            )
            shards.append(shard)
    ranks = [rank for block in blocks for rank in block]
    spec = EnumerableShardingSpec(shards)
    return ParameterSharding(sharding_type, compute_kernel, ranks, spec, cache_params)


def replicated():
    return ParameterSharding("data_parallel", "dense", list(range(RANKS)))


plan = ShardingPlan(
    {{
{modules}
    }}
)
'''


def sharding_plan_module(request: PlanRequest, plan: Plan, stem: str) -> str:
    """A Python module whose `plan` is the whole `ShardingPlan`; it imports TorchRec and nothing of Evenkeel.

    Args:
        request: The request.
        plan: Its plan.
        stem: Name of the module, for its docstring.

    Raises:
        InvalidInputError: If the plan is for another runtime or has no placements, or a table names no module.
    """
    options, topology = torchrec_options(request, plan), request.topology
    modules: dict[str, list[str]] = {}
    for index, (table, placed) in enumerate(zip(request.tables, plan.placements, strict=True)):
        remedy = "name the path of the module that owns the table, as describe_model does"
        require(bool(table.group), f"tables[{index}].group", table.group, "is empty", remedy)
        option = options[table.name]
        if placed.sharding is Sharding.DATA_PARALLEL:
            value = "replicated()"
        else:
            blocks = column_blocks(placed, topology)
            every = tuple(range(topology.ranks))
            shown = "[range(RANKS)]" if blocks == (every,) else repr([list(block) for block in blocks])
            cache = "" if option.load_factor is None else f", {_cache_params(option)}"
            sizes = f"{table.rows}, {table.dim}"
            value = f"sharded({option.sharding_type!r}, {option.compute_kernel!r}, {sizes}, {shown}{cache})"
        modules.setdefault(table.group, []).append(f"                {table.name!r}: {value},")
    lines = []
    for path, tables in modules.items():
        lines += [
            f"        {path!r}: EmbeddingModuleShardingPlan(",
            "            {",
            *tables,
            "            }",
            "        ),",
        ]
    return _MODULE.format(stem=stem, ranks=topology.ranks, local=topology.local_ranks, modules="\n".join(lines))
