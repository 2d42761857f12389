"""The reference's tables, the keys of a batch for them, and an HSTU-shaped ranker over what they give."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from examples.datasets import SequenceBatch
from examples.dlrmv4.stream import CONTEXT, POOL_EVENTS, ROWS, Scale, rows_of
from examples.hstu.attention import choose_kernel
from examples.hstu.model import ModelOptions, Ranker
from trainer_client.embedding.tables import RoutedEmbeddingCollection, RoutedTable

HISTORY = {table: (table, f"candidate_{table}") for table in ROWS if table not in CONTEXT}
"""Tables of the history's events with their two features."""


def keys_of(batch: SequenceBatch, scale: Scale) -> KeyedJaggedTensor:
    """What a batch looks up: a feature of each context table, two of each table of the history."""
    values, lengths = [batch.context.t().reshape(-1)], [torch.ones_like(batch.context).reshape(-1)]
    for table in HISTORY:
        items = (batch.history, batch.candidates)
        values += items if table == "item_id" else (rows_of(each, table, scale.rows_of(table)) for each in items)
        lengths += [batch.num_history, batch.num_candidates]
    features = [*CONTEXT, *(feature for both in HISTORY.values() for feature in both)]
    return KeyedJaggedTensor(keys=features, values=torch.cat(values), lengths=torch.cat(lengths))


def torchrec_tables(scale: Scale, learning_rate: float = 0.05) -> EmbeddingCollection:
    """The tables before they are sharded, without memory, trained in backward as in the reference."""
    configs = [
        EmbeddingConfig(scale.rows_of(name), scale.width, name=name, feature_names=[*HISTORY.get(name, (name,))])
        for name in ROWS
    ]
    tables = EmbeddingCollection(tables=configs, device=torch.device("meta"))
    apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), {"lr": learning_rate})
    return tables


def routed_tables(scale: Scale, device: torch.device) -> RoutedEmbeddingCollection:
    """The same tables under a routing by hash, so that no owner has more keys than others."""
    make = partial(RoutedTable, embedding_dim=scale.width, routing="hash_roundrobin")
    tables = [make(name=name, features=HISTORY.get(name, (name,)), num_embeddings=scale.rows_of(name)) for name in ROWS]
    return RoutedEmbeddingCollection(tables, device=device, deduplicate=True)


class Embeddings(nn.Module):
    """What `Ranker` asks for: an event is its item, artist and album, and what the user did with it."""

    def __init__(self, scale: Scale, tables: nn.Module) -> None:
        super().__init__()
        self.scale, self.tables = scale, tables
        self.event = nn.Linear(len(HISTORY) * scale.width, scale.width)
        self.actions = nn.Embedding(8, scale.width)

    def forward(self, batch: SequenceBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Embeddings of context features, events of the history, actions and candidates, each (count, width)."""
        found: Any = self.tables(keys_of(batch, self.scale))
        rows = {name: value if isinstance(value, torch.Tensor) else value.values() for name, value in found.items()}
        context = torch.stack([rows[name] for name in CONTEXT], dim=1).flatten(0, 1)
        history, candidates = (
            self.event(torch.cat([rows[features[which]] for features in HISTORY.values()], dim=1)) for which in (0, 1)
        )
        return context, history, self.actions(batch.actions), candidates


def make_model(scale: Scale, tables: nn.Module, device: torch.device) -> Ranker:
    """The ranker around tables that are sharded or will be."""
    options = ModelOptions(
        num_layers=scale.layers, width=scale.width, num_heads=scale.heads, head_dim=scale.width // scale.heads,
        embedding_dim=scale.width, num_actions=8, num_context=len(CONTEXT), interleaved=False,
        max_tokens=3 * (POOL_EVENTS // scale.history) + len(CONTEXT) + 1, kernel=choose_kernel("auto", device, 1),
    )  # fmt: skip
    return Ranker(options, Embeddings(scale, tables))
