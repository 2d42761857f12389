"""A batch and sharded tables for TorchRec, as its users write them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.streamable import Pipelineable

from examples.demo.histories import NUM_ITEMS, Histories

WIDTH = 16


@dataclass
class Batch(Pipelineable):
    """Histories and labels.

    Attributes:
        features: The jagged feature `history`.
        labels: (samples,) float32.
    """

    features: KeyedJaggedTensor
    labels: torch.Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """The batch on `device`."""
        return Batch(self.features.to(device, non_blocking), self.labels.to(device, non_blocking=non_blocking))

    def record_stream(self, stream: torch.Stream) -> None:
        """Tells the allocator that `stream` uses the batch."""
        self.features.record_stream(stream)
        self.labels.record_stream(stream)

    def pin_memory(self) -> Batch:
        """The batch in page-locked memory."""
        return Batch(self.features.pin_memory(), self.labels.pin_memory())


class Batches:
    """The batches of one rank, the same at every iteration."""

    def __iter__(self) -> Iterator[Batch]:
        for batch in Histories(rank=dist.get_rank(), steps=5, batch_size=8, max_length=256):
            features = KeyedJaggedTensor(keys=["history"], values=batch["items"], lengths=batch["num_items"])
            yield Batch(features, batch["label"])


def make_tables() -> EmbeddingBagCollection:
    """One table, of which a history's rows are added up."""
    table = EmbeddingBagConfig(
        name="item", embedding_dim=WIDTH, num_embeddings=NUM_ITEMS, feature_names=["history"],
        init_fn=lambda weight: weight.data.fill_(0.01),
    )  # fmt: skip
    tables = EmbeddingBagCollection(device=torch.device("meta"), tables=[table])
    apply_optimizer_in_backward(torch.optim.SGD, tables.parameters(), {"lr": 0.1})
    return tables


def shard(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model with its tables divided among the ranks, and the optimizer of what every rank has."""
    sharded = DistributedModelParallel(model, device=torch.device("cpu"))
    dense = [parameter for name, parameter in sharded.named_parameters() if "score" in name]
    return sharded, torch.optim.SGD(dense, lr=0.1)
