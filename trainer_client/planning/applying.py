"""A plan as DynamicEmb's options, as TorchRec's constraints, or as a complete sharding plan."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from evenkeel.placement import InvalidInputError, MissCurve, Plan, PlanRequest
from evenkeel.placement.application import DynamicEmbOptions, TorchRecOptions, dynamicemb_options, torchrec_options
from trainer_client.planning.describe import embedding_modules, module_configs

if TYPE_CHECKING:
    from torchrec.distributed.types import ShardingPlan


def dynamicemb_constraints(request: PlanRequest, plan: Plan, **options: Any) -> dict[str, Any]:
    """`DynamicEmbParameterConstraints` by table name, to give to DynamicEmb's planner.

    Without DynamicEmb installed, use `evenkeel.placement.application.dynamicemb_options` for the bare values, or
    `evenkeel.placement.application.lines_to_paste` for source lines.

    Args:
        request: The request.
        plan: Its plan.
        options: Further arguments of every table's `DynamicEmbTableOptions`.

    Raises:
        InvalidInputError: If the plan is for another runtime or for other tables.
        ModuleNotFoundError: If DynamicEmb is not installed.
    """
    library = importlib.import_module("dynamicemb")
    constraints = importlib.import_module("dynamicemb.planner").DynamicEmbParameterConstraints
    return {
        name: constraints(
            sharding_types=["row_wise"],
            use_dynamicemb=True,
            dynamicemb_options=_table_options(library, option, options),
        )
        for name, option in dynamicemb_options(request, plan).items()
    }


def _table_options(library: Any, option: DynamicEmbOptions, more: dict[str, Any]) -> Any:
    return library.DynamicEmbTableOptions(
        caching=option.caching,
        global_hbm_for_values=option.global_hbm_for_values,
        dist_type=option.dist_type,
        bucket_capacity=option.bucket_capacity,
        init_capacity=option.init_capacity,
        score_strategy=getattr(library.DynamicEmbScoreStrategy, option.score_strategy),
        **more,
    )


_CURVE = tuple((step + 1) / 50 for step in range(50))


def parameter_constraints(request: PlanRequest, plan: Plan) -> dict[str, Any]:
    """`ParameterConstraints` by table name, for TorchRec's own planner.

    Raises:
        InvalidInputError: If the plan is for another runtime or for other tables.
    """
    from torchrec.distributed.planner.types import ParameterConstraints

    return {
        name: ParameterConstraints(
            sharding_types=[option.sharding_type],
            compute_kernels=[option.compute_kernel],
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
    from torchrec.distributed.types import (
        EmbeddingModuleShardingPlan,
        EnumerableShardingSpec,
        ParameterSharding,
        ShardingPlan,
        ShardingType,
    )

    options = torchrec_options(request, plan)
    ranks, local = request.topology.ranks, request.topology.local_ranks
    modules: dict[str, Any] = {}
    for path, module in embedding_modules(model):
        parameters = EmbeddingModuleShardingPlan()
        for config in module_configs(module):
            if config.name not in options:
                remedy = "describe the whole model to the planner"
                raise InvalidInputError("plan", config.name, "does not place this table of the model", remedy)
            option = options[config.name]
            replicated = option.sharding_type == ShardingType.DATA_PARALLEL.value
            sharded = "fused" if device == "cpu" else option.compute_kernel
            shards = _shards(option, config.num_embeddings, config.embedding_dim, ranks, local, device)
            parameters[config.name] = ParameterSharding(
                sharding_type=option.sharding_type,
                compute_kernel="dense" if replicated else sharded,
                ranks=list(range(ranks)) if replicated else [rank for rank, _ in shards],
                sharding_spec=None if replicated else EnumerableShardingSpec([shard for _, shard in shards]),
                cache_params=None if device == "cpu" else _cache_params(option),
            )
        modules[path] = parameters
    return ShardingPlan(modules)


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

    return CacheParams(algorithm=CacheAlgorithm[option.cache_algorithm], load_factor=option.load_factor)


def _shards(
    option: TorchRecOptions, rows: int, dim: int, ranks: int, local: int, device: str
) -> Sequence[tuple[int, Any]]:
    """Rank and metadata of every shard, by rows over all ranks or by columns on the plan's."""
    from torch.distributed._shard.metadata import ShardMetadata

    def shard(rank: int, sizes: list[int], offsets: list[int]) -> tuple[int, Any]:
        place = f"rank:{rank}/{device if device == 'cpu' else f'{device}:{rank % local}'}"
        return rank, ShardMetadata(shard_sizes=sizes, shard_offsets=offsets, placement=place)

    if option.sharding_type == "row_wise":
        block = -(-rows // ranks)
        starts = [min(rows, rank * block) for rank in range(ranks)]
        return [shard(r, [min(block, rows - start), dim], [start, 0]) for r, start in enumerate(starts)]
    width = dim // max(1, len(option.ranks))
    return [shard(rank, [rows, width], [0, index * width]) for index, rank in enumerate(option.ranks)]
