"""Columns are cut as TorchRec's own sharder cuts them, into every number of parts that it can make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner import Topology as TorchRecTopology
from torchrec.distributed.sharding_plan import calculate_shard_sizes_and_offsets
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.harness.ranks import run_ranks
from evenkeel.placement import PlanRequest, Runtime, Sharding, Table, Topology, plan
from evenkeel.placement.layouts import layouts
from trainer_client.planning import parameter_constraints, sharding_plan

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


def _run(rank: int, folder: Path) -> None:
    sizes = {"thirds": (96, 3), "narrow": (12, 3), "even": (64, 2)}
    configs = [
        EmbeddingBagConfig(name=n, embedding_dim=d, num_embeddings=50, feature_names=[n]) for n, (d, _) in sizes.items()
    ]
    model = torch.nn.Sequential(EmbeddingBagCollection(tables=configs, device=torch.device("cpu")))
    torch.manual_seed(3)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    rows = {name: model.get_parameter(f"0.embedding_bags.{name}.weight").detach().clone() for name in sizes}
    tables = tuple(
        Table(name=n, rows=50, dim=d, pooled=True, sharding=Sharding.COLUMN_WISE, column_shards=cut, group="0")
        for n, (d, cut) in sizes.items()
    )
    request = PlanRequest(tables=tables, topology=Topology(ranks=3, hbm_bytes=4 << 30), runtime=Runtime.TORCHREC)
    found = plan(request)
    whole = sharding_plan(model, request, found, device="cpu")
    machines = TorchRecTopology(world_size=3, local_world_size=3, compute_device="cuda", hbm_cap=8 << 30)
    constraints: Any = parameter_constraints(request, found)
    sharders: Any = [EmbeddingBagCollectionSharder()]
    theirs = EmbeddingShardingPlanner(topology=machines, constraints=constraints).plan(model, sharders)
    for name, (dim, cut) in sizes.items():
        for made in (whole, theirs):
            shards = made.plan["0"][name].sharding_spec.shards  # type: ignore[index,union-attr]
            assert [shard.shard_sizes for shard in shards] == [[50, dim // cut]] * cut
    parallel = DistributedModelParallel(model, device=torch.device("cpu"), plan=whole)
    for name, weight in rows.items():
        for shard in parallel.state_dict()[f"0.embedding_bags.{name}.weight"].local_shards():
            first = shard.metadata.shard_offsets[1]
            shard.tensor.copy_(weight[:, first : first + shard.tensor.shape[1]])
    values = torch.arange(3 * 4) * (rank + 1) % 50
    keys = KeyedJaggedTensor(keys=list(sizes), values=values, lengths=torch.full((6,), 2))
    out = parallel(keys)
    own = values.view(3, 2, 2)
    expected = torch.cat([rows[name][own[index]].sum(1) for index, name in enumerate(sizes)], dim=1)
    torch.testing.assert_close(out.values(), expected)
    out.values().sum().backward()


def test_thirds_and_narrow_parts_train_by_their_plan(tmp_path: Path) -> None:
    run_ranks(3, _run, tmp_path)


@pytest.mark.parametrize("precision", [SparseType.FP32, SparseType.FP16])
def test_fbgemm_takes_every_multiple_of_four_and_nothing_else(precision: SparseType) -> None:
    def make(dim: int) -> Any:
        return SplitTableBatchedEmbeddingBagsCodegen(
            [(10, dim, EmbeddingLocation.DEVICE, ComputeDevice.CUDA)],
            weights_precision=precision,
            cache_precision=precision,
            device=torch.device("meta"),
        )

    for dim in range(4, 132, 4):
        make(dim)
    for dim in (2, 6, 30, 102):
        with pytest.raises(AssertionError, match="multiple of 4"):
            make(dim)
