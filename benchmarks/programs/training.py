"""The model of the programs: routed tables and a dense layer, on the ranks and in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from benchmarks.programs.data import KEYS, keys_of
from benchmarks.programs.language import ModelPlan
from trainer_client.embedding import checkpoint
from trainer_client.embedding.tables import KeyBatch, RoutedEmbeddingCollection, RoutedTable
from trainer_client.embedding.tables.tables import initial_rows

DIMS = (3, 2, 3)


def tables_of(plan: ModelPlan) -> list[RoutedTable]:
    """The declarations, in float64, so that only the order of sums tells two computations apart."""
    return [
        RoutedTable(
            name=f"table{number}", embedding_dim=DIMS[number % len(DIMS)], features=(f"feature{number}",),
            num_embeddings=KEYS, routing=routing, pooling=plan.pooling, seed=number, dtype=torch.float64,
        )
        for number, routing in enumerate(plan.routings)
    ]  # fmt: skip


def make_tower(plan: ModelPlan) -> nn.Linear:
    """The dense part, with the same values everywhere."""
    width = sum(table.embedding_dim for table in tables_of(plan))
    tower = nn.Linear(width, 1, dtype=torch.float64)
    with torch.no_grad():
        tower.weight.copy_(torch.linspace(-1, 1, width))
        tower.bias.fill_(0.1)
    return tower


def make_optimizer(plan: ModelPlan, parameters: Any) -> torch.optim.Optimizer:
    """One optimizer for all parameters."""
    match plan.optimizer:
        case "momentum":
            return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        case "adagrad":
            return torch.optim.Adagrad(parameters, lr=0.1, initial_accumulator_value=0.1)
        case "adam":
            return torch.optim.Adam(parameters, lr=0.05)
        case "rmsprop":
            return torch.optim.RMSprop(parameters, lr=0.05)
    return torch.optim.SGD(parameters, lr=0.1)


def losses(tower: nn.Module, pooled: list[torch.Tensor]) -> torch.Tensor:
    """(n,) losses of samples with these vectors."""
    return functional.softplus(tower(torch.cat(pooled, dim=1)).squeeze(1)) ** 2


def pool(rows: torch.Tensor, counts: torch.Tensor, mode: str) -> torch.Tensor:
    """(n, dim) one vector a sample from one a key."""
    owners = torch.arange(len(counts), device=rows.device).repeat_interleave(counts)
    sums = rows.new_zeros(len(counts), rows.shape[1]).index_add(0, owners, rows)
    return sums / counts.clamp(min=1)[:, None] if mode == "mean" else sums


class Model(nn.Module):
    """What is wrapped and trained."""

    def __init__(self, plan: ModelPlan, device: torch.device) -> None:
        super().__init__()
        self.plan = plan
        self.collection = RoutedEmbeddingCollection(tables_of(plan), device=device, deduplicate=plan.deduplicate)
        self.tower = make_tower(plan).to(device)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """(n,) losses of samples."""
        counts, keys = keys_of(ids)
        tables = self.collection.configs
        found = self.collection(
            KeyBatch(
                features=[feature for table in tables for feature in table.features],
                values=keys.repeat(len(tables)),
                lengths=counts.repeat(len(tables)),
                batch_sizes=[len(ids)] * len(tables),
            )
        )
        pooled = [found[table.features[0]] for table in tables]
        if self.plan.pooling == "none":
            pooled = [pool(rows, counts, "sum") for rows in pooled]
        return losses(self.tower, pooled)


class Training:
    """A model with its optimizer on one rank."""

    def __init__(self, plan: ModelPlan, device: torch.device) -> None:
        self.plan, self.device = plan, device
        self.model = Model(plan, device)
        self.wrapped: nn.Module = self.model
        if plan.wrap == "ddp":
            self.wrapped = DistributedDataParallel(self.model)
        elif plan.wrap == "fsdp2":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            fully_shard(self.model, mesh=init_device_mesh(device.type, (dist.get_world_size(),)))
        self.optimizer = make_optimizer(plan, self.model.parameters())

    def step(self, ids: torch.Tensor, scale: float) -> tuple[float, list[float]]:
        """Trains a batch; returns this rank's loss and the averaged gradient of the dense part."""
        self.wrapped.train()
        self.optimizer.zero_grad()
        loss = self.wrapped(ids).sum() * scale
        loss.backward()
        gradients = []
        for parameter in self.model.tower.parameters():
            gradient = parameter.grad
            assert gradient is not None
            if self.plan.wrap == "hand":
                dist.all_reduce(gradient)
                gradient /= dist.get_world_size()
            gradients += whole(gradient).reshape(-1).tolist()
        self.optimizer.step()
        return loss.item(), gradients

    def evaluate(self, ids: torch.Tensor, scale: float) -> float:
        """This rank's loss, without training."""
        self.wrapped.eval()
        with torch.no_grad():
            return float(self.wrapped(ids).sum() * scale)

    def resume(self, how: str, folder: Path) -> Training:
        """Another model that goes on where this one is."""
        if how == "state_dict":
            model, optimizer = self.model.state_dict(), self.optimizer.state_dict()
            model = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in model.items()}
            fresh = Training(self.plan, self.device)
            fresh.model.load_state_dict(model)
            fresh.optimizer.load_state_dict(optimizer)
            return fresh
        checkpoint.save(self.model.collection, folder, optimizer=self.optimizer, overwrite=True)
        dense = {name: value.clone() for name, value in self.model.tower.state_dict().items()}
        states = [dict(self.optimizer.state.get(parameter, {})) for parameter in self.model.tower.parameters()]
        fresh = Training(self.plan, self.device)
        checkpoint.load(fresh.model.collection, folder, optimizer=fresh.optimizer)
        fresh.model.tower.load_state_dict(dense)
        for parameter, state in zip(fresh.model.tower.parameters(), states, strict=True):
            if state:
                fresh.optimizer.state[parameter] = state
        return fresh

    def end(self) -> dict[str, Any]:
        """The dense values, and the rows of the tables that this rank owns, by key."""
        rows: dict[str, dict[int, list[float]]] = {}
        for table in self.model.collection.configs:
            owned = self.model.collection.tables[table.name]
            keys = owned.held_keys().tolist()
            rows[table.name] = dict(zip(keys, owned.weight.detach()[: len(keys)].tolist(), strict=True))
        dense = [
            value
            for parameter in self.model.tower.parameters()
            for value in whole(parameter.detach()).reshape(-1).tolist()
        ]
        return {"dense": dense, "rows": rows}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or all of one that is sharded; collective then."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class Reference:
    """The same model in one process, with whole tables."""

    def __init__(self, plan: ModelPlan) -> None:
        self.plan = plan
        self.tower = make_tower(plan)
        self.tables = {table.name: nn.Parameter(initial_rows(torch.arange(KEYS), table)) for table in tables_of(plan)}
        self.optimizer = make_optimizer(plan, [*self.tower.parameters(), *self.tables.values()])

    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        """The mean over the global batch; 0 of none."""
        counts, keys = keys_of(ids)
        pooled = [pool(rows[keys], counts, self.plan.pooling) for rows in self.tables.values()]
        total: torch.Tensor = losses(self.tower, pooled).sum() * (1 / len(ids) if len(ids) else 0.0)
        return total

    def step(self, ids: torch.Tensor) -> tuple[float, list[float]]:
        """Trains a global batch; returns its loss and the gradient of the dense part."""
        self.optimizer.zero_grad()
        loss = self.loss(ids)
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = [
            value for parameter in self.tower.parameters() if parameter.grad is not None
            for value in parameter.grad.reshape(-1).tolist()
        ]  # fmt: skip
        self.optimizer.step()
        return loss.item(), gradients
