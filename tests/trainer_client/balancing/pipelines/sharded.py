"""A small model with a sharded table, its data, and the same training in one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from examples.datasets import Keys, LogNormalLengths, SequenceBatch, SyntheticSequences

STEPS, ROWS, DIM = 12, 200, 8


def data(rank: int) -> SyntheticSequences:
    return SyntheticSequences(
        num_batches=STEPS - min(rank, 1),  # rank 0 has one batch more
        batch_size=6,
        lengths=LogNormalLengths(mean=20, maximum=80),
        items=Keys(count=ROWS, exponent=1.0),
        rank=rank,
    )


class Head(nn.Module):
    """The dense part: TorchRec traces a model down to modules without sharded tables, which stay as they are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.dense = nn.Linear(DIM, 1)

    def forward(
        self, found: Any, labels: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, float]]:
        samples = torch.arange(labels.shape[0], device=labels.device)
        owners = torch.repeat_interleave(samples, found.lengths())
        pooled = torch.zeros(labels.shape[0], DIM, device=labels.device).index_add(0, owners, found.values())
        logits = self.dense(pooled).squeeze(-1)
        total = functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
        return total * scale, (total.detach(), scale)


class Model(nn.Module):
    """Sharded embeddings of the history, a dense layer, the loss."""

    def __init__(self, sharded: nn.Module) -> None:
        super().__init__()
        self.sharded = sharded
        self.head = Head()

    def forward(self, batch: Any) -> Any:
        found = self.sharded(batch.batch["features"])
        return self.head(found["history"], batch.batch["labels"], batch.loss_scale)


def features(batch: SequenceBatch) -> dict[str, Any]:
    from torchrec import KeyedJaggedTensor

    keyed = KeyedJaggedTensor(keys=["history"], values=batch.history, lengths=batch.num_history)
    return {"features": keyed, "labels": batch.labels, "sample": batch.sample}


def make_model(device: torch.device, kernel: str | None = None) -> tuple[nn.Module, Model, torch.optim.Optimizer]:
    """The model with its table sharded by rows, the model within it, and the optimizer of the dense part."""
    from torchrec import EmbeddingCollection, EmbeddingConfig
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    table = EmbeddingConfig(
        name="item", embedding_dim=DIM, num_embeddings=ROWS, feature_names=["history"],
        init_fn=lambda weight: weight.data.fill_(0.1),
    )  # fmt: skip
    tables = EmbeddingCollection(device=torch.device("meta"), tables=[table])
    apply_optimizer_in_backward(torch.optim.SGD, tables.parameters(), {"lr": 0.5})
    sharders: list[Any] = [EmbeddingCollectionSharder()]
    constraints = ParameterConstraints(sharding_types=["row_wise"], compute_kernels=[kernel] if kernel else None)
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=dist.get_world_size(), compute_device=device.type),
        constraints={"item": constraints},
    )
    bare = Model(tables)
    bare.head.to(device)
    plan = planner.collective_plan(bare, sharders, dist.group.WORLD)
    model = DistributedModelParallel(bare, device=device, plan=plan, sharders=sharders)
    optimizer = torch.optim.SGD([p for n, p in model.named_parameters() if "dense" in n], lr=0.5)
    return model, bare, optimizer


def in_one_process(world_size: int, *, train: bool = True) -> tuple[list[float], torch.Tensor]:
    """Sums of the losses by step, and the dense weight at the end, of the same training on the global batches."""
    weight = nn.Parameter(torch.full((ROWS, DIM), 0.1))
    torch.manual_seed(1)
    dense = nn.Linear(DIM, 1)
    optimizer = torch.optim.SGD([weight, *dense.parameters()], lr=0.5)
    losses = []
    ranks = [list(data(rank)) for rank in range(world_size)]
    for step in range(STEPS):
        batches = [rank[step] for rank in ranks if step < len(rank)]
        pooled = torch.cat(
            [
                torch.stack([weight[items].sum(0) for items in torch.split(batch.history, batch.num_history.tolist())])
                for batch in batches
            ]
        )
        labels = torch.cat([batch.labels for batch in batches])
        total = functional.binary_cross_entropy_with_logits(dense(pooled).squeeze(-1), labels, reduction="sum")
        if train:
            optimizer.zero_grad()
            (total / len(labels)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        losses.append(float(total.detach()))
    return losses, dense.weight.detach()
