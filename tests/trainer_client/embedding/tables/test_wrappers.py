"""Collections inside models that DDP, FSDP2 and their like wrap, beside one process that holds everything."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness.ranks import run_ranks
from tests.trainer_client.embedding.tables.wrapped import WRAPPERS, train_wrapped
from trainer_client.embedding.tables import KeyBatch, RoutedEmbeddingCollection, RoutedTable, clip_grad_norm_

TABLE = RoutedTable(name="t", embedding_dim=2, features=("f",), num_embeddings=8)


def train_beside_reference(rank: int, wraps: list[str]) -> None:
    for name in wraps:
        train_wrapped(name, rank, dist.get_world_size(), torch.device("cpu"), 1e-4)


@pytest.mark.parametrize(("world_size", "wraps"), [(2, WRAPPERS), (4, ["ddp", "fsdp2"])])
def test_wrapped_models_train_as_one_process_does(world_size: int, wraps: list[str]) -> None:
    run_ranks(world_size, train_beside_reference, wraps)


def overflow_on_one_rank(rank: int) -> float:
    model = nn.ModuleDict({"sparse": RoutedEmbeddingCollection([TABLE]), "dense": nn.Linear(2, 1)})
    DistributedDataParallel(model)  # the dense part starts alike
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = ShardedGradScaler(device="cpu", init_scale=1024.0)
    batch = KeyBatch(features=["f"], values=torch.tensor([0, 1]), lengths=torch.tensor([2]), batch_sizes=[1])
    before = [parameter.detach().clone() for parameter in model["dense"].parameters()]
    rows = model["sparse"](batch)["f"]
    # The gradient of key 1, which is rank 1's, is no finite number once it is scaled.
    loss = (rows * torch.tensor([[1.0], [1e36]])).sum() + model["dense"](torch.ones(2)).sum()
    scaler.scale(loss).backward()
    finite = all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters())
    assert finite == (rank == 0)
    scaler.step(sgd)
    scaler.update()
    assert all(torch.equal(p, b) for p, b in zip(model["dense"].parameters(), before, strict=True))
    return float(scaler.get_scale())


def test_with_a_sharded_scaler_all_ranks_skip_a_step() -> None:
    assert run_ranks(2, overflow_on_one_rank) == [512.0, 512.0]


def use_wrongly(rank: int) -> None:
    collection = RoutedEmbeddingCollection([TABLE], process_group=init_device_mesh("cpu", (2,)))
    assert (collection.rank, collection.world_size) == (rank, 2)
    with pytest.raises(ValueError, match=r"a mesh of 2 dimensions; pass the one whose ranks share the tables"):
        RoutedEmbeddingCollection([TABLE], process_group=init_device_mesh("cpu", (2, 1)))
    model = FullyShardedDataParallel(
        nn.ModuleDict({"sparse": collection, "dense": nn.Linear(2, 1)}), device_id=torch.device("cpu")
    )
    with pytest.raises(ValueError, match="FullyShardedDataParallel, which has a clip_grad_norm_ of its own"):
        clip_grad_norm_(model, 0.1)


def test_what_cannot_be_shared_or_clipped_is_named() -> None:
    run_ranks(2, use_wrongly)
