"""A plan as lines of Python: constraints to paste into a job, or a module with the whole sharding plan."""

from __future__ import annotations

from collections.abc import Iterable

from evenkeel.placement.application import (
    FBGEMM_OPTIMIZERS,
    DynamicEmbOptions,
    TorchRecOptions,
    dynamicemb_options,
    torchrec_options,
)
from evenkeel.placement.invalid_input import require
from evenkeel.placement.model import Runtime, Sharding
from evenkeel.placement.plan import Plan
from evenkeel.placement.request import PlanRequest
from evenkeel.placement.shards import column_blocks


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
