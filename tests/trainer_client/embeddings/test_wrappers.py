"""Collections inside models that DDP or FSDP2 wrap, beside one process that holds everything."""

import math
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.parallel import DistributedDataParallel

from tests.trainer_client.embeddings.whole import TABLES, Whole, check_rows, make_batch
from tests.trainer_client.ranks import run_ranks
from trainer_client.embeddings import KeyBatch, RoutedEmbeddingCollection, RoutedTable, clip_grad_norm_

LAST = RoutedTable(
    name="last", embedding_dim=4, features=("item",), num_embeddings=101, routing="hash_roundrobin", pooling="sum"
)
WIDTHS = {"tag": 6, "user": 4, "item": 4, "friend": 4}


class Tower(nn.Module):
    """Dense layers over looked-up rows, and one beside them that only the odd ranks use if told so."""

    def __init__(self, look_up: Callable[[KeyBatch], dict[str, Tensor]], *, odd: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.look_up, self.odd = look_up, odd
        self.beside = nn.Linear(2, 3)
        self.heads = nn.ModuleDict({name: nn.Linear(width, 3) for name, width in WIDTHS.items()})
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, batch: KeyBatch, rank: int) -> Tensor:
        beside = self.beside(torch.ones(2)) if not self.odd or rank % 2 else torch.zeros(3)
        found = self.look_up(batch)
        hidden = torch.cat([self.heads[name](found[name]) for name in sorted(found)])
        return (hidden + beside).tanh().sum()


class Nested(nn.Module):
    """Two collections, one of them deep within the model."""

    def __init__(self, *, odd: bool) -> None:
        super().__init__()
        self.stem = nn.ModuleDict({"sparse": nn.Sequential(RoutedEmbeddingCollection(TABLES, deduplicate=True))})
        self.sparse: RoutedEmbeddingCollection = self.stem["sparse"][0]  # type: ignore[index,assignment]
        self.last = RoutedEmbeddingCollection([LAST])
        self.tower = Tower(self.look_up, odd=odd)

    def look_up(self, batch: KeyBatch) -> dict[str, Tensor]:
        found = self.sparse(batch)
        return found | {"item": found["item"] + self.last(batch)["item"]}

    def forward(self, batch: KeyBatch, rank: int) -> Tensor:
        value: Tensor = self.tower(batch, rank)
        return value


class Reference:
    """The same model in one process."""

    def __init__(self, *, odd: bool) -> None:
        self.stem, self.last = Whole(), Whole([LAST])
        self.tower = Tower(self.look_up, odd=odd)

    def look_up(self, batch: KeyBatch) -> dict[str, Tensor]:
        found = self.stem.look_up(batch)
        return found | {"item": found["item"] + self.last.look_up(batch.select(["item"]))["item"]}

    def parameters(self) -> list[nn.Parameter]:
        return [*self.stem.weights.values(), *self.last.weights.values(), *self.tower.parameters()]


def rows_in(batch: KeyBatch) -> int:
    return sum(batch.batch_sizes)


def train_beside_reference(rank: int, wraps: list[str]) -> None:
    for name in wraps:
        train_wrapped(name, rank, dist.get_world_size())


def wrap(model: Nested, name: str) -> nn.Module:
    if name == "fsdp2":
        for part in (model.tower.heads["user"], model.tower, model):
            fully_shard(part, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))  # type: ignore[arg-type]
        return model
    if name == "fsdp1":
        return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    if name == "replicate":
        return replicate(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("replicate",)))
    if name == "compiled":
        return torch.compile(DistributedDataParallel(model), backend="eager")
    if name == "unused":  # each layer is reduced by itself: on even ranks the last one before rows travel back
        return DistributedDataParallel(model, find_unused_parameters=True, bucket_cap_mb=1e-6)  # type: ignore[arg-type]
    return DistributedDataParallel(model, gradient_as_bucket_view=name == "ddp", static_graph=name == "static")


def train_wrapped(name: str, rank: int, num_ranks: int) -> None:
    model, reference = Nested(odd=name == "unused"), Reference(odd=name == "unused")
    wrapped = wrap(model, name)
    ours = torch.optim.Adam(wrapped.parameters(), lr=0.05)
    theirs = torch.optim.Adam(reference.parameters(), lr=0.05)
    for step in range(4):
        batches = [make_batch(other, step) for other in range(num_ranks)]
        total = sum(rows_in(batch) for batch in batches)
        ours.zero_grad(set_to_none=step % 2 == 0)
        theirs.zero_grad()
        loss = wrapped(batches[rank], rank) * num_ranks / total  # the documented `loss_scale`
        loss.backward()
        expected = torch.stack([reference.tower(batch, other) for other, batch in enumerate(batches)]).sum() / total
        expected.backward()
        if step == 2 and name == "fsdp1":
            with pytest.raises(ValueError, match="FullyShardedDataParallel, which has a clip_grad_norm_ of its own"):
                clip_grad_norm_(wrapped, 0.1)
        elif step == 2:
            norm = clip_grad_norm_(wrapped, 0.1, math.inf if name == "static" else 2.0)
            theirs_norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.1, math.inf if name == "static" else 2.0)
            torch.testing.assert_close(norm, theirs_norm, rtol=1e-4, atol=1e-6)
        ours.step()
        theirs.step()
        with FullyShardedDataParallel.summon_full_params(wrapped) if name == "fsdp1" else nullcontext():
            check_dense(model, reference)
        check_rows(model.sparse, reference.stem, rank, num_ranks, tolerance=1e-4)
        check_rows(model.last, reference.last, rank, num_ranks, tolerance=1e-4)


def check_dense(model: Nested, reference: Reference) -> None:
    for (name, mine), other in zip(model.tower.named_parameters(), reference.tower.parameters(), strict=True):
        full = mine.full_tensor() if hasattr(mine, "full_tensor") else mine
        torch.testing.assert_close(full, other, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


WRAPPERS = ["ddp", "unused", "static", "compiled", "fsdp2", "fsdp1", "replicate"]


@pytest.mark.parametrize(("num_ranks", "wraps"), [(2, WRAPPERS), (4, ["ddp", "fsdp2"])])
def test_wrapped_models_train_as_one_process_does(num_ranks: int, wraps: list[str]) -> None:
    run_ranks(num_ranks, train_beside_reference, wraps)


def overflow_on_one_rank(rank: int) -> float:
    table = RoutedTable(name="t", embedding_dim=2, features=("f",), num_embeddings=8)
    model = nn.ModuleDict({"sparse": RoutedEmbeddingCollection([table]), "dense": nn.Linear(2, 1)})
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
