"""Models that were written without Evenkeel, planned and sharded: TorchRec's own DLRM, and one of sequences.

    torchrun --nproc-per-node 2 -m examples.plan_dlrm

On CPUs, tables are sharded over the memory of the host.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Adam
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from torchrec.datasets.random import RandomRecDataset
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import in_backward_optimizer_filter

from trainer_client.planning import plan_model

ROWS = {"user": 400_000, "item": 50_000, "category": 100}


def dlrm() -> nn.Module:
    """TorchRec's, with a loss."""
    tables = [
        EmbeddingBagConfig(name=f"{name}_rows", num_embeddings=rows, embedding_dim=16, feature_names=[name])
        for name, rows in ROWS.items()
    ]
    bags = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    apply_optimizer_in_backward(RowWiseAdagrad, bags.parameters(), {"lr": 0.1})
    model = DLRM(bags, dense_in_features=13, dense_arch_layer_sizes=[64, 16], over_arch_layer_sizes=[64, 1])
    trained: nn.Module = DLRMTrain(model)
    return trained


class NextItem(nn.Module):
    """A GRU over histories of items."""

    def __init__(self) -> None:
        super().__init__()
        table = EmbeddingConfig(name="history", num_embeddings=ROWS["item"], embedding_dim=16, feature_names=["item"])
        self.items = EmbeddingCollection(tables=[table], device=torch.device("meta"))
        apply_optimizer_in_backward(RowWiseAdagrad, self.items.parameters(), {"lr": 0.1})
        self.layer = nn.GRU(16, 16, batch_first=True)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, None]:
        """A loss, as DLRM's first result is."""
        histories = self.items(batch.sparse_features)["item"].to_padded_dense(5)
        seen, _ = self.layer(histories)
        return (seen[:, :-1] - histories[:, 1:]).pow(2).mean(), None


def train(model: nn.Module, batches: Iterable[Any], device: torch.device) -> None:
    """Three steps on this rank."""
    planned = plan_model(model, batches)  # the same on all ranks
    parallel = DistributedModelParallel(model, device=device, plan=planned.sharding_plan)
    dense = Adam(dict(in_backward_optimizer_filter(parallel.named_parameters())).values())  # of all other parameters
    for batch in islice(batches, 3):
        dense.zero_grad()
        loss, _ = parallel(batch.to(device))
        loss.backward()
        dense.step()
    if dist.get_rank() == 0:
        for placed in planned.plan.placements:
            print(f"{placed.table:14} {placed.sharding.value:9}  {placed.mode.value}")
        print(f"loss of the third step {loss.item():.2f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    sizes = list(ROWS.values())
    data = RandomRecDataset(list(ROWS), 64, hash_sizes=sizes, ids_per_feature=5, manual_seed=0, num_dense=13)
    for stranger in (dlrm(), NextItem()):
        train(stranger, data, torch.device("cpu"))
    dist.destroy_process_group()
