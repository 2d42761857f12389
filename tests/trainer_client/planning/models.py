"""A model with the tables of a request, and batches for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from evenkeel.placement import Table


def features_of(table: Table) -> list[str]:
    return [f"{table.name}_{number}" for number in range(table.features)]


class Collections(torch.nn.Module):
    """A pooled collection with the tables of group `bags`, and one of sequences with those of `rows`."""

    def __init__(self, tables: Sequence[Table]) -> None:
        super().__init__()
        made: dict[str, list[Any]] = {"bags": [], "rows": []}
        for table in tables:
            kind = EmbeddingBagConfig if table.group == "bags" else EmbeddingConfig
            made[table.group].append(
                kind(
                    name=table.name, embedding_dim=table.dim, num_embeddings=table.rows,
                    feature_names=features_of(table),
                )
            )  # fmt: skip
        self.bags = EmbeddingBagCollection(tables=made["bags"], device=torch.device("meta"))
        self.rows = EmbeddingCollection(tables=made["rows"], device=torch.device("meta"))

    def forward(self, bags: KeyedJaggedTensor, rows: KeyedJaggedTensor) -> dict[str, torch.Tensor]:
        """What is looked up of each feature."""
        found = {name: each.values() for name, each in self.rows(rows).items()}
        return found | self.bags(bags).to_dict()
