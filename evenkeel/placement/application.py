"""A plan in the words of the runtime that runs it: lines to paste, and a module with a whole plan.

Whoever applies a plan runs the same lines.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from evenkeel.placement.access import Eviction
from evenkeel.placement.fields import InvalidInputError, require
from evenkeel.placement.hardware import Runtime
from evenkeel.placement.layouts import column_blocks
from evenkeel.placement.plan import Placement, Plan, Status
from evenkeel.placement.request import Mode, Optimizer, PlanRequest, Sharding, Table
from evenkeel.placement.storage import BUCKET_ROWS, bucket_rows

TORCHREC_KERNELS = {Mode.HBM_ONLY: "fused", Mode.CACHING: "fused_uvm_caching", Mode.HOST_ONLY: "fused_uvm"}
FBGEMM_OPTIMIZERS = {
    Optimizer.SGD: "EXACT_SGD",
    Optimizer.ADAM: "ADAM",
    Optimizer.ADAGRAD: "EXACT_ADAGRAD",
    Optimizer.ROWWISE_ADAGRAD: "EXACT_ROWWISE_ADAGRAD",
}
"""Members of FBGEMM's `EmbOptimType`, which both runtimes take."""
_ROOM = "give more memory, or plan smaller tables"


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
    lines = dynamicemb_lines if plan.runtime is Runtime.DYNAMICEMB else torchrec_lines
    return "\n".join([*lines(request, plan), ""])


def dynamicemb_lines(request: PlanRequest, plan: Plan, given: Collection[str] = ()) -> Iterator[str]:
    """Lines that make `constraints`, DynamicEmb's by table name, and `fused_params`.

    Args:
        request: The request.
        plan: Its plan.
        given: Options of all tables that are not the plan's, but those of a dictionary called `options`.

    Raises:
        InvalidInputError: If the plan is for another runtime, or has no placements.
    """
    pairs = _pairs(request, plan, Runtime.DYNAMICEMB)
    admits = sorted({table.admission_threshold for table, _ in pairs if table.admission_rows})
    names = ["InitializerArgs", "InitializerMode", "ScoreStrategy", "TableOptions"]
    yield "from dynamicemb import ("
    yield from (f"    DynamicEmb{name}," for name in names)
    yield from (f"    {name}," for name in (("FrequencyAdmissionStrategy", "KVCounter") if admits else ()))
    yield ")"
    yield "from dynamicemb.planner import DynamicEmbParameterConstraints"
    yield from fused_params_lines(request)
    if admits:
        yield "# Tables only fuse where their strategy is the same object."
        yield from (f"admit_at_{at} = FrequencyAdmissionStrategy(threshold={at})" for at in admits)
        yield ""
    yield "constraints = {"
    for table, placed in pairs:
        yield f"    {table.name!r}: DynamicEmbParameterConstraints("
        yield '        sharding_types=["row_wise"],'
        yield "        use_dynamicemb=True,"
        yield "        dynamicemb_options=DynamicEmbTableOptions("
        for name, value in _table_options(request, table, placed).items():
            if name not in given:
                yield f"            {name}={value},"
        if given:
            yield "            **options,"
        yield "        ),"
        yield "    ),"
    yield "}"


def _table_options(request: PlanRequest, table: Table, placed: Placement) -> dict[str, object]:
    """What `DynamicEmbTableOptions` is told."""
    ranks, bound = request.topology.ranks, table.rows**-0.5  # rows begin as TorchRec's do
    scores = ["TIMESTAMP" if table.eviction is Eviction.LRU else "LFU"]
    if table.score_words == 2:  # the only ones of two words
        scores = ["TIMESTAMP", "LFU"]
    strategies = ", ".join(f"DynamicEmbScoreStrategy.{name}" for name in scores)
    uniform = f"mode=DynamicEmbInitializerMode.UNIFORM, lower={-bound!r}, upper={bound!r}"
    found: dict[str, object] = {
        "caching": placed.mode is Mode.CACHING,
        "global_hbm_for_values": placed.hbm_value_bytes * ranks,
        "dist_type": repr(table.dist_type),
        "bucket_capacity": BUCKET_ROWS,
        "init_capacity": bucket_rows(table.rows, ranks),
        "score_strategy": strategies if len(scores) == 1 else f"({strategies})",
        "training": request.step.training,
        "initializer_args": f"DynamicEmbInitializerArgs(\n                {uniform}\n            )",
    }
    if table.admission_rows:
        capacity = bucket_rows(table.admission_rows, ranks)
        found["admit_strategy"] = f"admit_at_{table.admission_threshold}"
        found["admission_counter"] = f"KVCounter(capacity={capacity}, bucket_capacity={BUCKET_ROWS})"
    return found


_Spread = tuple[Table, Placement, tuple[tuple[int, ...], ...], str, str]
"""A table, its placement and blocks of columns, its kernel, and its cache as source; empty without one."""


def _spread(request: PlanRequest, plan: Plan) -> list[_Spread]:
    found: list[_Spread] = []
    for table, placed in _pairs(request, plan, Runtime.TORCHREC):
        blocks = column_blocks(placed, request.topology)
        kernel = "dense" if placed.sharding is Sharding.DATA_PARALLEL else TORCHREC_KERNELS[placed.mode]
        cache = ""
        if placed.mode is Mode.CACHING:
            deep = ", prefetch_pipeline=True" if request.step.prefetch_depth > 1 else ""
            algorithm = table.eviction.value.upper()
            cache = f"CacheParams(algorithm=CacheAlgorithm.{algorithm}, load_factor={placed.ratio!r}{deep})"
        found.append((table, placed, blocks, kernel, cache))
    return found


def torchrec_lines(request: PlanRequest, plan: Plan) -> Iterator[str]:
    """Lines that make `constraints`, TorchRec's by table name, and `fused_params`.

    Raises:
        InvalidInputError: If the plan is for another runtime, or has no placements.
    """
    tables = _spread(request, plan)
    cached = any(cache for *_, cache in tables)
    if cached:
        yield "from fbgemm_gpu.split_table_batched_embeddings_ops_common import CacheAlgorithm"
    yield "from torchrec.distributed.planner.types import ParameterConstraints"
    if cached:
        yield "from torchrec.distributed.types import CacheParams"
    yield from fused_params_lines(request)
    if any(placed.ranks for placed in plan.placements):
        yield "# Constraints leave the ranks to TorchRec's planner; evenkeel plan --sharding-plan writes them too."
    yield "constraints = {"
    for table, placed, blocks, kernel, cache in tables:
        yield f"    {table.name!r}: ParameterConstraints("
        yield f"        sharding_types=[{placed.sharding.value!r}],"
        yield f"        compute_kernels=[{kernel!r}],"
        if placed.sharding in (Sharding.COLUMN_WISE, Sharding.GRID):
            yield f"        min_partition={table.dim // len(blocks)},"
        yield f"        pooling_factors={[table.ids_per_sample / table.features] * table.features!r},"
        if cache:
            yield f"        cache_params={cache},"
        yield "    ),"
    yield "}"


def fused_params_lines(request: PlanRequest) -> Iterable[str]:
    """Lines that make `fused_params`: optimizers are given to the sharder, not to constraints."""
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
                placement=f"rank:{{rank}}/{device}",
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


def module_paths(request: PlanRequest) -> dict[str, str]:
    """The group of each table, which must be the path of the module that owns it.

    Raises:
        InvalidInputError: If a table has none.
    """
    remedy = "give the path of the module that owns the table, or give load_sharding_plan the model"
    for index, table in enumerate(request.tables):
        require(bool(table.group), f"tables[{index}].group", table.group, "is empty", remedy)
    return {table.name: table.group for table in request.tables}


def sharding_plan_module(
    request: PlanRequest, plan: Plan, stem: str, *, paths: Mapping[str, str] | None = None, device: str = "cuda"
) -> str:
    """A Python module whose `plan` is the whole `ShardingPlan`; it imports TorchRec and nothing of Evenkeel.

    Args:
        request: The request.
        plan: Its plan.
        stem: Name of the module, for its docstring.
        paths: Of the module that owns each table, by name of the table; tables that are not in it are left out. By
            default all tables, and their groups.
        device: Type of the devices of the job: on `cpu` all tables are `fused`, as there is no other memory.

    Raises:
        InvalidInputError: If the plan is for another runtime or has no placements, or a table names no module.
    """
    tables, topology = _spread(request, plan), request.topology
    paths = module_paths(request) if paths is None else paths
    modules: dict[str, list[str]] = {}
    for table, placed, blocks, kernel, cache in tables:
        if table.name not in paths:
            continue
        value = "replicated()"
        if placed.sharding is not Sharding.DATA_PARALLEL:
            on_all = blocks == (tuple(range(topology.ranks)),)
            shown = "[range(RANKS)]" if on_all else repr([list(block) for block in blocks])
            stored = "'fused'" if device == "cpu" else f"{kernel!r}"
            kept = f", {cache}" if cache and device != "cpu" else ""
            value = f"sharded({placed.sharding.value!r}, {stored}, {table.rows}, {table.dim}, {shown}{kept})"
        modules.setdefault(paths[table.name], []).append(f"                {table.name!r}: {value},")
    lines = []
    for path, own in modules.items():
        lines += [
            f"        {path!r}: EmbeddingModuleShardingPlan(",
            "            {",
            *own,
            "            }",
            "        ),",
        ]
    return _MODULE.format(
        stem=stem,
        ranks=topology.ranks,
        local=topology.local_ranks,
        device="cpu" if device == "cpu" else f"{device}:{{rank % RANKS_PER_HOST}}",
        modules="\n".join(lines),
    )
