"""Plans through DynamicEmb's own planner, grouping and choice of storages: the tiers and rows that it would make.

Nothing is computed, so neither a GPU nor its extension is needed: the process group is a fake one, and storages only
write down what they are asked to hold.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.planner import Topology as TorchRecTopology
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import DataType as TorchRecDataType
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from benchmarks.peers.checkouts import DynamicEmb, load_dynamicemb
from evenkeel.placement import DataType, Mode, Optimizer, Plan, PlanRequest, Runtime, Step, Table, Topology, Zipf, plan
from evenkeel.placement.hit_rates import Eviction
from evenkeel.placement.pasted_lines import lines_to_paste
from trainer_client.planning import dynamicemb_constraints

_RANKS = 8
_LAYOUTS = {"hbm": Mode.HBM_ONLY, "host": Mode.HOST_ONLY, "caching": Mode.CACHING, "hybrid": Mode.HYBRID}


def draw(seed: int) -> PlanRequest:
    """Tables of one or two collections, with all that DynamicEmb's options can say, under budgets of all sizes."""
    source = np.random.default_rng(seed)
    optimizer = Optimizer(str(source.choice([each.value for each in Optimizer])))
    among = ((), (Mode.CACHING,), (Mode.HYBRID,), (Mode.CACHING, Mode.HYBRID))[int(source.integers(4))]
    tables = []
    for index in range(int(source.integers(1, 12))):
        scores = 2 if source.uniform() < 0.2 else 1
        table = Table(
            name=f"t{index}",
            rows=int(np.exp(source.uniform(np.log(2e3), np.log(5e7)))),
            dim=int(source.choice([16, 32, 64, 128])) if index % 2 == 0 else 64,
            ids_per_sample=float(source.choice([1, 3, 20])),
            data_type=DataType(str(source.choice(["float32", "float32", "float16", "bfloat16"]))),
            optimizer=optimizer,
            access=Zipf(exponent=float(source.uniform(0.6, 1.2))),
            pooled=index % 2 == 0,
            eviction=Eviction.LFU if scores == 2 or source.uniform() < 0.3 else Eviction.LRU,
            score_words=scores,
            admission_rows=int(source.choice([0, 0, 0, 10_000])),
            admission_threshold=int(source.choice([2, 2, 5])),
            dist_type="roundrobin" if seed % 3 == 0 else "hash_roundrobin",
            group="bags" if index % 2 == 0 else "rows",
            modes=among,
        )
        tables.append(table)
    size = sum(table.rows * table.dim * table.value_bytes * 3 for table in tables)
    hbm = int((1 << 30) + size / _RANKS * np.exp(source.uniform(np.log(0.02), np.log(1))))
    machines = Topology(ranks=_RANKS, hbm_bytes=hbm, host_bytes=int(3 * size) + (1 << 30))
    step = Step(samples_per_rank=64, training=bool(source.uniform() < 0.9))
    return PlanRequest(tables=tuple(tables), topology=machines, runtime=Runtime.DYNAMICEMB, step=step)


@dataclass(slots=True)
class Tiers:
    """What a group of fused tables would be stored in.

    Attributes:
        mode: The mode that this is.
        rows: Rows of each table that HBM holds, of one rank.
    """

    mode: Mode | None = None
    rows: dict[str, int] = field(default_factory=dict)


def tiers_of(library: DynamicEmb, options: dict[str, Any], optimizer: Any) -> Tiers:
    """The tiers that DynamicEmb chooses for tables that it has fused.

    Args:
        library: DynamicEmb.
        options: `DynamicEmbTableOptions` of each table, as its planner completed them.
        optimizer: The `EmbOptimType`.
    """
    tables, found = library.tables, Tiers()

    def write_down(_: Any, *asked: Any) -> None:
        first = asked[0]
        if not any(option.local_hbm_for_values == 0 for option in first):
            found.rows = {name: option.max_capacity for name, option in zip(options, first, strict=True)}

    recorder = type("Recorder", (), {"__init__": write_down})
    for name in ("DynamicEmbStorage", "HybridStorage", "DynamicEmbCache"):
        setattr(tables, name, recorder)
    tables._print_memory_consume = lambda *_, **__: None
    dtype = next(iter(options.values())).embedding_dtype
    kept = optimizer if all(option.training for option in options.values()) else tables.EmbOptimType.NONE
    state_of = tables.get_optimizer_state_dim
    module = SimpleNamespace(
        _dynamicemb_options=list(options.values()),
        _optimizer_type=kept,
        _optimizer=SimpleNamespace(get_state_dim=lambda dim: state_of(kept, dim, dtype)),
        _table_names=list(options),
        device_id=0,
    )
    tables.BatchedDynamicEmbeddingTablesV2._create_cache_storage(module)
    found.mode = next((mode for word, mode in _LAYOUTS.items() if module._storage_layout.name.lower().startswith(word)))
    return found


def fused(request: PlanRequest, pasted: dict[str, Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The optimizer and the completed options of each set of tables that TorchRec fuses under DynamicEmb's plan."""
    planners, sharding = (importlib.import_module(f"dynamicemb.planner{name}") for name in ("", ".rw_sharding"))
    machines = TorchRecTopology(world_size=_RANKS, local_world_size=_RANKS, compute_device="cuda")
    given = {"constraints": pasted["constraints"]}
    configs = {table.name: _config(table) for table in request.tables}
    enumerator = planners.DynamicEmbeddingEnumerator(topology=machines, **given)
    planner = planners.DynamicEmbeddingShardingPlanner(
        eb_configs=list(configs.values()), topology=machines, enumerator=enumerator, debug=False, **given
    )
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    params = pasted["fused_params"]
    for pooled in (True, False):
        tables: Any = [configs[table.name] for table in request.tables if table.pooled is pooled]
        shards: dict[str, Any] = {config.name: planner._dyn_emb_plan[config.name] for config in tables}
        if not tables:
            continue
        if pooled:
            bags = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
            infos = ShardedEmbeddingBagCollection.create_grouped_sharding_infos(bags, shards, "embedding_bags.", params)
        else:
            rows = EmbeddingCollection(tables=tables, device=torch.device("meta"))
            infos = ShardedEmbeddingCollection.create_grouped_sharding_infos(rows, shards, params)
        kind = "RwPooledDynamicEmbeddingSharding" if pooled else "RwSequenceDynamicEmbeddingSharding"
        for group in getattr(sharding, kind)(infos["row_wise"], env, torch.device("cpu"))._grouped_embedding_configs:
            options = {table.name: table.fused_params["dynamicemb_options"] for table in group.embedding_tables}
            yield params["optimizer"], options


_TYPES = {DataType.FLOAT32: "FP32", DataType.FLOAT16: "FP16", DataType.BFLOAT16: "BF16"}


def _config(table: Table) -> Any:
    made = EmbeddingBagConfig if table.pooled else EmbeddingConfig
    return made(
        name=table.name,
        embedding_dim=table.dim,
        num_embeddings=table.rows,
        feature_names=[table.name],
        data_type=TorchRecDataType[_TYPES[table.data_type]],
    )


def differences(library: DynamicEmb, request: PlanRequest, found: Plan) -> list[str]:
    """What DynamicEmb would do otherwise than the plan says."""
    pasted: dict[str, Any] = {}
    exec(lines_to_paste(request, found), pasted)
    made = dynamicemb_constraints(request, found)
    wrong = []
    for name, constraint in made.items():
        mine, lines = constraint.dynamicemb_options, pasted["constraints"][name].dynamicemb_options
        for option in dataclasses.fields(mine):
            one, other = getattr(mine, option.name), getattr(lines, option.name)
            if repr(one) != repr(other) and vars(one) != vars(other):
                wrong.append(f"{name}: {option.name} is {one!r}, {other!r} in the lines")
    placed = {placement.table: placement for placement in found.placements}
    modules = {frozenset(module.tables) for module in found.modules}
    for optimizer, options in fused(request, pasted):
        if frozenset(options) not in modules:
            wrong.append(f"{', '.join(options)} fuse, and are no module of the plan")
        tiers = tiers_of(library, options, optimizer)
        for name in options:
            planned = placed[name]
            if tiers.mode is not planned.mode:
                wrong.append(f"{name}: {planned.mode.value} is planned, {tiers.mode} would be")
            elif abs(tiers.rows.get(name, 0) - planned.cache_rows) > 1:
                wrong.append(f"{name}: {planned.cache_rows} rows in HBM are planned, {tiers.rows.get(name)} would be")
    return wrong


def compare(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Requests drawn at random, and what came of their plans at DynamicEmb."""
    library = load_dynamicemb(options.recsys_examples)
    dist.init_process_group("fake", rank=0, world_size=_RANKS, store=FakeStore())
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for seed in range(10 if options.quick else 60):
            request = draw(seed)
            found = plan(request)
            if not found.placements:
                counts["nothing fits"] += 1
                continue
            counts.update(placement.mode.value for placement in found.placements)
            counts["plans"] += 1
            wrong += [f"request {seed}: {each}" for each in differences(library, request, found)]
    dist.destroy_process_group()
    told = sorted({str(each.message).partition(" from ")[0] for each in warned if "dynamicemb" in each.filename})
    console.print(f"{library.checkout.name} at {library.checkout.commit}: {dict(counts)}, {len(wrong)} differences")
    for each in wrong[:20]:
        console.print(f"  {each}")
    return {"peer": library.checkout.describe(), "tables": dict(counts), "differences": wrong, "its_warnings": told}
