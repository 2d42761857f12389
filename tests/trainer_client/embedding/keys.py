"""Small collections, and batches of one row a feature."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainer_client.embedding.tables import KeyBatch, RoutedEmbeddingCollection, RoutedTable

OnRanks = Callable[..., list[Any]]


def batch_of(**keys: Tensor | Sequence[int]) -> KeyBatch:
    """By feature, the keys of its row."""
    values = [torch.as_tensor(each, dtype=None if len(each) else torch.int64) for each in keys.values()]
    lengths = torch.tensor([each.numel() for each in values])
    return KeyBatch(features=list(keys), values=torch.cat(values), lengths=lengths, batch_sizes=[1] * len(values))


def look_up(collection: RoutedEmbeddingCollection, **keys: Tensor | Sequence[int]) -> Tensor:
    """Rows of the first feature's keys."""
    found: dict[str, Tensor] = collection(batch_of(**keys))
    return found[next(iter(keys))]


def make(names: str = "a", **changes: Any) -> RoutedEmbeddingCollection:
    plain = {"embedding_dim": 3, "num_embeddings": 20, "capacity": 24}
    return RoutedEmbeddingCollection([RoutedTable(name=n, features=(n,), **(plain | changes)) for n in names])


def step(collection: RoutedEmbeddingCollection, optimizers: list[torch.optim.Optimizer], keys: Tensor) -> None:
    found = collection(batch_of(**{table.name: keys for table in collection.configs}))
    for optimizer in optimizers:
        optimizer.zero_grad()
    torch.stack([(rows - 1).square().sum() for rows in found.values()]).sum().backward()
    for optimizer in optimizers:
        optimizer.step()


def weight(collection: RoutedEmbeddingCollection, name: str = "a") -> nn.Parameter:
    found: nn.Parameter = collection.tables[name].weight
    return found
