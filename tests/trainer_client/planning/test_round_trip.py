"""Plans go out through every exit, and TorchRec itself says what arrives: tiers, ratios, shards and ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner import Topology as TorchRecTopology
from torchrec.distributed.sharding_plan import calculate_shard_sizes_and_offsets
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from evenkeel.placement import (
    InvalidInputError,
    Mode,
    Plan,
    PlanRequest,
    Runtime,
    Sharding,
    SolverOptions,
    Step,
    Table,
    Topology,
    plan,
)
from evenkeel.placement.application import lines_to_paste, sharding_plan_module
from evenkeel.placement.layouts import layouts
from evenkeel.placement.plan_file import PlanFile, dumps
from tests.evenkeel.placement.instances import random_tables
from tests.trainer_client.balancing.jobs import run_in_turn
from tests.trainer_client.planning.models import Collections, features_of
from trainer_client.planning import load_sharding_plan, parameter_constraints, sharding_plan

_KERNELS = {
    "fused": Mode.HBM_ONLY,
    "dense": Mode.HBM_ONLY,
    "fused_uvm_caching": Mode.CACHING,
    "fused_uvm": Mode.HOST_ONLY,
}
_SHARDERS: Any = [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]


def _request(seed: int, *, ranks: int = 4, scale: int = 1, depth: int = 1) -> PlanRequest:
    """Tables of every sharding type that a collection takes, in every memory."""
    draw = np.random.default_rng(seed)
    tables = []
    for index, table in enumerate(random_tables(12, seed)):
        pooled = index % 2 == 0
        kinds = list(Sharding) if pooled else [kind for kind in Sharding if kind.value in _OF_SEQUENCES]
        sharding = kinds[int(draw.integers(len(kinds)))]
        split = sharding.value in ("column_wise", "grid_shard")
        parts = int(draw.choice([1, 2, 3, 4]))
        ratio = None if sharding is Sharding.ROW_WISE else [None, 0.0, 0.25, 0.5, 0.9, 1.0][int(draw.integers(6))]
        tables.append(
            replace(
                table,
                rows=int(draw.integers(100, 5_000)) * scale // (20 if sharding is Sharding.DATA_PARALLEL else 1),
                dim=(96 if parts == 3 else table.dim) if pooled else 32,
                group="bags" if pooled else "rows",
                pooled=pooled,
                features=1 + index % 2,
                ids_per_sample=1.0 + index % 2,
                sharding=sharding,
                column_shards=(parts if pooled else 2) if split else 1,
                ratio=None if sharding is Sharding.DATA_PARALLEL else ratio,
            )
        )
    machines = Topology(ranks=ranks, ranks_per_host=2, hbm_bytes=(3 << 30) + (10 << 20) * scale)
    step = Step(samples_per_rank=4, prefetch_depth=depth)
    patient = SolverOptions(time_limit_s=100, gap=0.05)
    return PlanRequest(tables=tuple(tables), topology=machines, runtime=Runtime.TORCHREC, step=step, solver=patient)


def _choosing(seed: int, *, ranks: int = 4, scale: int = 1) -> PlanRequest:
    """The same tables, each with all ways of spreading it, and the sequences of one width, as TorchRec wants them."""
    drawn = _request(seed, ranks=ranks, scale=scale)
    draw = np.random.default_rng(seed)
    ways = []
    for table in drawn.tables:
        kinds = list(Sharding) if table.pooled else [Sharding(kind) for kind in _OF_SEQUENCES]
        few = draw.permutation(len(kinds))[: int(draw.integers(1, 4))]
        sharding = tuple(kinds[number] for number in few)
        dim = int(draw.choice([table.dim, 96])) if table.pooled else 128
        ways.append(replace(table, sharding=sharding, column_shards=0, ratio=None, dim=dim))
    return replace(drawn, tables=tuple(ways))


_OF_SEQUENCES = ("row_wise", "table_wise", "column_wise", "data_parallel")


def _check(found: ShardingPlan, request: PlanRequest, planned: Plan, *, ranks: bool, kernels: bool = True) -> None:
    """Compares a plan of TorchRec's with ours; the sizes of shards are those that TorchRec would cut."""
    local = request.topology.local_ranks
    for table, placed in zip(request.tables, planned.placements, strict=True):
        got = found.plan[table.group][table.name]  # type: ignore[index]
        assert got.sharding_type == placed.sharding.value
        if kernels:
            assert _KERNELS[got.compute_kernel] is placed.mode
            factor = None if got.cache_params is None else got.cache_params.load_factor
            assert factor == (placed.ratio if placed.mode is Mode.CACHING else None)
            if factor is not None:
                assert got.cache_params.algorithm.name == "LRU"
                assert bool(got.cache_params.prefetch_pipeline) is (request.step.prefetch_depth > 1)
        if placed.sharding is Sharding.DATA_PARALLEL:
            assert got.ranks == list(range(request.topology.ranks))
            assert got.sharding_spec is None
            continue
        sizes, offsets = calculate_shard_sizes_and_offsets(
            torch.empty(table.rows, table.dim, device="meta"),
            request.topology.ranks,
            local,
            placed.sharding.value,
            table.dim // placed.column_shards,
        )
        shards = got.sharding_spec.shards
        assert [list(shard.shard_sizes) for shard in shards] == sizes
        assert [list(shard.shard_offsets) for shard in shards] == offsets
        assert [shard.placement.rank() for shard in shards] == got.ranks
        if ranks or placed.sharding is Sharding.ROW_WISE:
            assert got.ranks == list(placed.ranks or range(request.topology.ranks))
            if kernels:
                assert [str(s.placement) for s in shards] == [f"rank:{r}/cuda:{r % local}" for r in got.ranks]


_INSTANCES = [_request(seed, scale=1000, depth=1 + seed % 2) for seed in range(6)] + [_choosing(0, scale=1000)]


@pytest.mark.parametrize("asked", _INSTANCES, ids=range(len(_INSTANCES)))
def test_every_exit_says_what_the_plan_says(asked: PlanRequest, tmp_path: Path) -> None:
    request, planned = asked, plan(asked)
    model = Collections(request.tables)
    whole = sharding_plan(model, request, planned)
    _check(whole, request, planned, ranks=True)
    file = tmp_path / "plan.json"
    file.write_text(dumps(PlanFile(request=request, plan=planned)))
    assert load_sharding_plan(file) == load_sharding_plan(file, model) == whole
    module: dict[str, Any] = {}
    exec(sharding_plan_module(request, planned, "sharding"), module)
    assert module["plan"] == whole
    constraints = parameter_constraints(request, planned)
    pasted: dict[str, Any] = {}
    lines = lines_to_paste(request, planned)
    exec(lines, pasted)
    assert pasted["constraints"] == constraints
    assert ("--sharding-plan" in lines) is any(placed.ranks for placed in planned.placements), "ranks are left open"
    machines = TorchRecTopology(world_size=4, local_world_size=2, compute_device="cuda", hbm_cap=2**45, ddr_cap=2**48)
    theirs = EmbeddingShardingPlanner(topology=machines, constraints=constraints).plan(model, _SHARDERS)
    _check(theirs, request, planned, ranks=False)


def _train(rank: int, request: PlanRequest, planned: Plan) -> None:
    model = Collections(request.tables)
    whole = sharding_plan(model, request, planned, device="cpu")
    env = ShardingEnv.from_process_group(dist.group.WORLD)  # type: ignore[arg-type]
    parallel = DistributedModelParallel(
        model, env=env, device=torch.device("cpu"), plan=whole, sharders=_SHARDERS, init_data_parallel=True
    )
    _check(parallel.plan, request, planned, ranks=True, kernels=False)
    state = parallel.state_dict()
    for table, placed in zip(request.tables, planned.placements, strict=True):
        folder = "embedding_bags" if table.group == "bags" else "embeddings"
        held = state[f"{table.group}.{folder}.{table.name}.weight"]
        if placed.sharding is Sharding.DATA_PARALLEL:
            assert held.shape == (table.rows, table.dim)
            held.detach().copy_(_cells(torch.arange(table.rows), range(table.dim)))
            continue
        for shard in held.local_shards():
            (first, left), (count, width) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            shard.tensor.copy_(_cells(torch.arange(first, first + count), range(left, left + width)))
        mine = [shard.metadata for shard in held.local_shards()]
        wanted = [s for s in whole.plan[table.group][table.name].sharding_spec.shards if s.placement.rank() == rank]  # type: ignore[index]
        cells = [(tuple(s.shard_offsets), tuple(s.shard_sizes)) for s in wanted if s.shard_sizes[0]]
        assert sorted((tuple(s.shard_offsets), tuple(s.shard_sizes)) for s in mine if s.shard_sizes[0]) == sorted(cells)
    batches, expected = [], {}
    for group in ("bags", "rows"):
        placed = [(t, p) for t, p in zip(request.tables, planned.placements, strict=True) if t.group == group]
        keys = {name: torch.arange(4) * 7 % table.rows for table, _ in placed for name in features_of(table)}
        lengths = torch.ones(4 * len(keys), dtype=torch.int)
        batches.append(KeyedJaggedTensor(list(keys), torch.cat([*keys.values()]), lengths=lengths))
        for table, where in placed:
            if where.sharding is not Sharding.DATA_PARALLEL or table.pooled:  # TorchRec mixes up features of the others
                expected |= {name: _cells(keys[name], range(table.dim)) for name in features_of(table)}
    found = parallel(*batches)
    for name, rows in expected.items():
        torch.testing.assert_close(found[name], rows)
    torch.cat([rows.flatten() for rows in found.values()]).sum().backward()


def _cells(rows: torch.Tensor, columns: range) -> torch.Tensor:
    """Another number for each row and column of a table."""
    return (rows[:, None] * 0.37 + torch.tensor(columns) * 1.13).sin()


def test_distributed_model_parallel_holds_the_shards_of_the_plan() -> None:
    requests = [*(_request(seed, ranks=2) for seed in range(3)), _choosing(1, ranks=2)]
    run_in_turn(2, *((_train, request, plan(request)) for request in requests))


def test_a_module_of_a_table_without_a_group_is_asked_for(tmp_path: Path) -> None:
    request = _request(0)
    bare = replace(request, tables=(replace(request.tables[0], group=""), *request.tables[1:]))
    planned = plan(bare)
    with pytest.raises(InvalidInputError, match=r"tables\[0\].group: is empty"):
        sharding_plan_module(bare, planned, "sharding")
    file = tmp_path / "plan.json"
    file.write_text(dumps(PlanFile(request=bare, plan=planned)))
    with pytest.raises(InvalidInputError, match=r"table_0.group: is empty"):
        load_sharding_plan(file)
    assert load_sharding_plan(file, Collections(request.tables)) == sharding_plan(
        Collections(request.tables), bare, planned
    )


def test_a_plan_for_another_model_or_runtime_is_refused() -> None:
    request = _request(0)
    first, *others = request.tables
    by_rows = tuple(replace(t, sharding=Sharding.ROW_WISE, column_shards=1, ratio=None) for t in request.tables)
    changes: list[tuple[dict[str, Any], str]] = [
        ({"tables": (replace(first, rows=first.rows + 1), *others)}, "differs from the plan"),
        ({"tables": (replace(first, data_type="float16"), *others)}, "differs from the plan, which is .* of float16"),
        ({"tables": others[:2]}, "does not place"),
        ({"runtime": Runtime.DYNAMICEMB, "tables": by_rows}, "is not torchrec"),
    ]
    for change, message in changes:
        other = replace(request, **change)
        with pytest.raises(InvalidInputError, match=message):
            sharding_plan(Collections(request.tables), other, plan(other))


def test_blocks_of_sequences_that_torchrec_cannot_exchange_are_refused() -> None:
    request = _request(0)
    first, second, *_ = (table for table in request.tables if table.group == "rows")
    split = [replace(t, sharding=Sharding.COLUMN_WISE, ratio=1.0) for t in (first, second)]
    tables = (replace(split[0], column_shards=2), replace(split[1], column_shards=4))
    mixed = replace(request, tables=tables)
    said = r"tables\[1\].sharding: leaves '.*' no width that 'table_1' of the same collection can have too"
    with pytest.raises(InvalidInputError, match=said):
        plan(mixed)
    even = replace(request, tables=(tables[0], replace(tables[1], column_shards=2)))
    assert parameter_constraints(even, plan(even))["table_1"].min_partition == 16


DIMS = (4, 8, 12, 36, 64, 96, 100, 120, 128, 192, 204, 384, 768)


def _made(dim: int, width: int) -> list[int]:
    """Widths of the shards that TorchRec makes where it is told a `min_partition`."""
    sizes, _ = calculate_shard_sizes_and_offsets(torch.empty(5, dim, device="meta"), 64, 8, "column_wise", width)
    return [size[1] for size in sizes]


@pytest.mark.parametrize("dim", DIMS)
def test_every_cut_that_torchrec_makes_is_tried_and_no_other(dim: int) -> None:
    table = Table(name="t", rows=5, dim=dim, pooled=True, sharding=Sharding.COLUMN_WISE)
    ranks = 64
    tried = {layout.pieces for layout in layouts(table, Topology(ranks=ranks, hbm_bytes=0))}
    for pieces in tried:
        assert _made(dim, dim // pieces) == [dim // pieces] * pieces
    possible = {len(_made(dim, width)) for width in range(1, dim + 1)}
    assert tried == {pieces for pieces in possible if pieces <= ranks}
