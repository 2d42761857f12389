"""Batches of one row a feature."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from trainer_client.embedding.tables import KeyBatch, RoutedEmbeddingCollection

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
