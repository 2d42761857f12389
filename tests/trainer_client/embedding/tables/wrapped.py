"""A model with two collections under each wrapper, trained beside one process that holds everything."""

import math
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.trainer_client.embedding.tables.whole import HOT, TABLES, Whole, check_rows, make_batch, to_device
from trainer_client.embedding.tables import KeyBatch, RoutedEmbeddingCollection, RoutedTable, clip_grad_norm_

WRAPPERS = ["ddp", "unused", "static", "compiled", "fsdp2", "fsdp1", "replicate"]
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
        device = self.seen.device
        used = not self.odd or rank % 2
        beside = self.beside(torch.ones(2, device=device)) if used else torch.zeros(3, device=device)
        found = self.look_up(batch)
        hidden = torch.cat([self.heads[name](found[name]) for name in sorted(found)])
        return (hidden + beside).tanh().sum()


class Nested(nn.Module):
    """Two collections, one of them deep within the model."""

    def __init__(self, device: torch.device, *, odd: bool, deduplicate: bool) -> None:
        super().__init__()
        stem = RoutedEmbeddingCollection(TABLES, deduplicate=deduplicate, device=device)
        self.stem = nn.ModuleDict({"sparse": nn.Sequential(stem)})
        self.sparse: RoutedEmbeddingCollection = self.stem["sparse"][0]  # type: ignore[index,assignment]
        self.last = RoutedEmbeddingCollection([LAST], device=device)
        self.tower = Tower(self.look_up, odd=odd).to(device)

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
        return found | {"item": found["item"] + self.last.look_up(*batch.split(["item"]))["item"]}

    def parameters(self) -> list[nn.Parameter]:
        return [*self.stem.weights.values(), *self.last.weights.values(), *self.tower.parameters()]


def wrap(model: Nested, name: str, device: torch.device) -> nn.Module:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("replicate",))
    if name == "fsdp2":
        for part in (model.tower.heads["user"], model.tower, model):
            fully_shard(part, mesh=mesh)
        return model
    if name == "fsdp1":
        return FullyShardedDataParallel(model, use_orig_params=True, device_id=device)
    if name == "replicate":
        from torch.distributed._composable.replicate_with_fsdp import replicate

        return replicate(model, mesh=mesh)
    if name == "compiled":
        return torch.compile(DistributedDataParallel(model), backend="eager")
    if name == "unused":  # each layer is reduced by itself: on even ranks the last one before rows travel back
        return DistributedDataParallel(model, find_unused_parameters=True, bucket_cap_mb=1e-6)  # type: ignore[arg-type]
    return DistributedDataParallel(model, gradient_as_bucket_view=name == "ddp", static_graph=name == "static")


def train_wrapped(name: str, rank: int, world_size: int, device: torch.device, tolerance: float) -> None:
    """Trains a wrapped model beside the reference for some steps, and compares all of it after each."""
    odd = name == "unused"
    model, reference = Nested(device, odd=odd, deduplicate=name != "ddp"), Reference(odd=odd)
    wrapped = wrap(model, name, device)
    order = math.inf if name == "static" else 2.0
    ours = torch.optim.Adam(wrapped.parameters(), lr=0.05)
    theirs = torch.optim.Adam(reference.parameters(), lr=0.05)
    for step in range(3):
        if step == 1:
            model.sparse.hold_hot_rows(HOT)
            model.last.hold_hot_rows({"last": HOT["items"]})
        batches = [make_batch(other, step) for other in range(world_size)]
        total = sum(sum(batch.batch_sizes) for batch in batches)
        ours.zero_grad(set_to_none=step % 2 == 0)
        theirs.zero_grad()
        loss = wrapped(to_device(batches[rank], device), rank) * world_size / total  # the documented `loss_scale`
        loss.backward()
        expected = torch.stack([reference.tower(batch, other) for other, batch in enumerate(batches)]).sum() / total
        expected.backward()
        if step == 1 and name != "fsdp1":
            norm = clip_grad_norm_(wrapped, 0.1, order)
            theirs_norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.1, order)
            torch.testing.assert_close(norm.cpu(), theirs_norm, rtol=tolerance, atol=1e-6)
        ours.step()
        theirs.step()
        with FullyShardedDataParallel.summon_full_params(wrapped) if name == "fsdp1" else nullcontext():
            check_dense(model, reference, tolerance)
        check_rows(model.sparse, reference.stem, rank, world_size, tolerance=tolerance)
        check_rows(model.last, reference.last, rank, world_size, tolerance=tolerance)
    # On GPUs, in one call, PyTorch's optimizers fail over distributed tensors beside others.
    mixed = len({isinstance(parameter, DTensor) for parameter in wrapped.parameters()}) == 2
    assert mixed or name != "fsdp2"
    assert ours.param_groups[0]["foreach"] is (False if mixed else None)


def check_dense(model: Nested, reference: Reference, tolerance: float) -> None:
    for (name, mine), other in zip(model.tower.named_parameters(), reference.tower.parameters(), strict=True):
        full = mine.full_tensor() if hasattr(mine, "full_tensor") else mine
        difference = float((full.cpu() - other).abs().max().detach())
        assert difference <= tolerance * max(1.0, float(other.abs().max().detach())), (name, difference)
