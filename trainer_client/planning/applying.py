"""A plan as DynamicEmb's options, as TorchRec's constraints, or as a complete sharding plan."""

from __future__ import annotations

import importlib
import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from evenkeel.placement import InvalidInputError, MissCurve, Plan, PlanRequest, Sharding, Table
from evenkeel.placement.application import (
    FBGEMM_OPTIMIZERS,
    DynamicEmbOptions,
    TorchRecOptions,
    dynamicemb_options,
    torchrec_options,
)
from evenkeel.placement.layouts import column_blocks
from evenkeel.placement.plan import Placement
from evenkeel.placement.plan_file import loads
from trainer_client.planning.describe import check_same, embedding_modules, module_configs

if TYPE_CHECKING:
    from torchrec.distributed.types import ParameterSharding, ShardingPlan


def dynamicemb_constraints(request: PlanRequest, plan: Plan, **options: Any) -> dict[str, Any]:
    """`DynamicEmbParameterConstraints` by table name, to give to DynamicEmb's planner.

    Without DynamicEmb installed, use `evenkeel.placement.application.dynamicemb_options` for the bare values, or
    `evenkeel.placement.application.lines_to_paste` for source lines.

    Args:
        request: The request.
        plan: Its plan.
        options: Further arguments of every table's `DynamicEmbTableOptions`; they go before those of the plan.

    Raises:
        InvalidInputError: If the plan is for another runtime or for other tables.
        ModuleNotFoundError: If DynamicEmb is not installed.
    """
    library = importlib.import_module("dynamicemb")
    constraints = importlib.import_module("dynamicemb.planner").DynamicEmbParameterConstraints
    wanted = dynamicemb_options(request, plan)
    # Tables only fuse where their strategy is the same object.
    thresholds = {option.admission_threshold for option in wanted.values()} - {None}
    admit = {threshold: library.FrequencyAdmissionStrategy(threshold=threshold) for threshold in thresholds}
    return {
        name: constraints(
            sharding_types=["row_wise"],
            use_dynamicemb=True,
            dynamicemb_options=_table_options(library, option, admit, options),
        )
        for name, option in wanted.items()
    }


def _table_options(library: Any, option: DynamicEmbOptions, admit: dict[Any, Any], more: dict[str, Any]) -> Any:
    strategy = tuple(getattr(library.DynamicEmbScoreStrategy, name) for name in option.score_strategy)
    own: dict[str, Any] = {
        "caching": option.caching,
        "global_hbm_for_values": option.global_hbm_for_values,
        "dist_type": option.dist_type,
        "bucket_capacity": option.bucket_capacity,
        "init_capacity": option.init_capacity,
        "score_strategy": strategy[0] if len(strategy) == 1 else strategy,
        "training": option.training,
        "initializer_args": library.DynamicEmbInitializerArgs(
            mode=library.DynamicEmbInitializerMode.UNIFORM, lower=-option.init_bound, upper=option.init_bound
        ),
    }
    if option.admission_threshold is not None:
        own["admit_strategy"] = admit[option.admission_threshold]
        own["admission_counter"] = library.KVCounter(
            capacity=option.admission_capacity, bucket_capacity=option.bucket_capacity
        )
    return library.DynamicEmbTableOptions(**{**own, **more})


def fused_params(request: PlanRequest) -> dict[str, Any]:
    """What the sharder of the tables is told: the optimizer, and whether batches are prefetched.

    The learning rate is yours to add. Where optimizers are applied in backward, nothing of this is needed.

    Raises:
        InvalidInputError: If tables have different optimizers: a sharder takes one.
    """
    from fbgemm_gpu.split_embedding_configs import EmbOptimType

    used = {table.optimizer: table.name for table in request.tables}
    if len(used) > 1:
        remedy = "apply optimizers in backward, or give each optimizer's tables a sharder of their own"
        what = "differs between tables, and a sharder takes one"
        raise InvalidInputError("tables.optimizer", [optimizer.value for optimizer in used], what, remedy)
    params: dict[str, Any] = {"prefetch_pipeline": True} if request.step.prefetch_depth > 1 else {}
    for optimizer in used:
        params["optimizer"] = EmbOptimType[FBGEMM_OPTIMIZERS[optimizer]]
    return params


def parameter_constraints(request: PlanRequest, plan: Plan) -> dict[str, Any]:
    """`ParameterConstraints` by table name, for TorchRec's own planner.

    They say how each table is cut and stored. On which ranks shards are that are not on all, TorchRec's planner decides
    again: where that should stay as planned, use `sharding_plan`.

    Raises:
        InvalidInputError: If the plan is for another runtime or for other tables.
    """
    from torchrec.distributed.planner.types import ParameterConstraints

    return {
        name: ParameterConstraints(
            sharding_types=[option.sharding_type],
            compute_kernels=[option.compute_kernel],
            min_partition=option.min_partition,
            pooling_factors=list(option.pooling_factors),
            cache_params=_cache_params(option),
        )
        for name, option in torchrec_options(request, plan).items()
    }


def sharding_plan(model: nn.Module, request: PlanRequest, plan: Plan, *, device: str = "cuda") -> ShardingPlan:
    """A complete `ShardingPlan` that `DistributedModelParallel` accepts, without TorchRec's planner.

    On `cpu` every sharded table is `fused`: there is no other memory to choose.

    Args:
        model: The model that the plan's tables are in, before sharding.
        request: The request.
        plan: Its plan.
        device: Type of the devices of the job.

    Raises:
        InvalidInputError: If the plan is for another runtime or other tables, or does not place a table of the model.
    """
    from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingPlan

    parameters = _parameters(request, plan, device)
    tables = {table.name: table for table in request.tables}
    modules: dict[str, Any] = {}
    for path, module in embedding_modules(model):
        modules[path] = EmbeddingModuleShardingPlan()
        for config in module_configs(module):
            if config.name not in parameters:
                remedy = "describe the whole model to the planner"
                raise InvalidInputError("plan", config.name, "does not place this table of the model", remedy)
            check_same(config, tables[config.name])
            modules[path][config.name] = parameters[config.name]
    return ShardingPlan(modules)


def load_sharding_plan(path: str | Path, model: nn.Module | None = None, *, device: str = "cuda") -> ShardingPlan:
    """The complete `ShardingPlan` of a plan file, as `evenkeel plan --output` writes it.

    Args:
        path: The plan file.
        model: The model before sharding, to check the plan against; without it, tables are where their `group` says.
        device: As for `sharding_plan`.

    Raises:
        OSError: If the file cannot be read.
        InvalidInputError: If it is no plan file, as for `sharding_plan`, or a table names no group and no model is
            given.
    """
    from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingPlan

    content = loads(Path(path).read_text("utf-8"))
    if model is not None:
        return sharding_plan(model, content.request, content.plan, device=device)
    modules: dict[str, Any] = {}
    parameters = _parameters(content.request, content.plan, device)
    for table in content.request.tables:
        if not table.group:
            remedy = "give the model, or the path of the module that owns the table"
            raise InvalidInputError(f"{table.name}.group", table.group, "is empty", remedy)
        modules.setdefault(table.group, EmbeddingModuleShardingPlan())[table.name] = parameters[table.name]
    return ShardingPlan(modules)


def _parameters(request: PlanRequest, plan: Plan, device: str) -> dict[str, ParameterSharding]:
    options = torchrec_options(request, plan)
    pairs = zip(request.tables, plan.placements, strict=True)
    return {table.name: _parameter(request, table, placed, options[table.name], device) for table, placed in pairs}


def _parameter(
    request: PlanRequest, table: Table, placed: Placement, option: TorchRecOptions, device: str
) -> ParameterSharding:
    from torch.distributed._shard.metadata import ShardMetadata
    from torchrec.distributed.types import EnumerableShardingSpec, ParameterSharding

    ranks, local = request.topology.ranks, request.topology.local_ranks
    if placed.sharding is Sharding.DATA_PARALLEL:
        return ParameterSharding(option.sharding_type, option.compute_kernel, list(range(ranks)))
    blocks, spec = column_blocks(placed, request.topology), []
    for number, holders in enumerate(blocks):
        height, width = -(-table.rows // len(holders)), table.dim // len(blocks)
        for index, rank in enumerate(holders):
            first = min(table.rows, index * height)
            shard = ShardMetadata(
                shard_sizes=[min(height, table.rows - first), width],
                shard_offsets=[first, number * width],
                placement=f"rank:{rank}/{device if device == 'cpu' else f'{device}:{rank % local}'}",
            )
            spec.append(shard)
    return ParameterSharding(
        sharding_type=option.sharding_type,
        compute_kernel="fused" if device == "cpu" else option.compute_kernel,
        ranks=list(itertools.chain.from_iterable(blocks)),
        sharding_spec=EnumerableShardingSpec(spec),
        cache_params=None if device == "cpu" else _cache_params(option),
    )


_CURVE = tuple((step + 1) / 50 for step in range(50))


def miss_curve(statistics: Any, lookups_per_step: float) -> MissCurve:
    """The planner's miss curve from TorchRec's `CacheStatistics`.

    Args:
        statistics: A `CacheStatistics`: `expected_lookups` (distinct values in a global batch) and
            `expected_miss_rate(load_factor)`.
        lookups_per_step: Lookups of a global batch, repeated keys included.

    Raises:
        InvalidInputError: If the statistics contradict each other.
    """
    rates = tuple(min(1.0, max(0.0, float(statistics.expected_miss_rate(fraction)))) for fraction in _CURVE)
    unique = float(statistics.expected_lookups) / lookups_per_step if lookups_per_step > 0 else 1.0
    return MissCurve(cache_fractions=_CURVE, miss_rates=rates, unique_fraction=min(1.0, unique))


def _cache_params(option: TorchRecOptions) -> Any:
    if option.load_factor is None:
        return None
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import CacheAlgorithm
    from torchrec.distributed.types import CacheParams

    return CacheParams(
        algorithm=CacheAlgorithm[option.cache_algorithm],
        load_factor=option.load_factor,
        prefetch_pipeline=True if option.prefetch else None,
    )
