"""Batches, and every table whole in one process: what the sharded collection must equal."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trainer_client.embedding.routing import hash_roundrobin, owners
from trainer_client.embedding.tables import KeyBatch, RoutedEmbeddingCollection, RoutedTable
from trainer_client.embedding.tables.tables import initial_rows

TABLES = [
    RoutedTable(name="users", embedding_dim=4, features=("user", "friend"), num_embeddings=101, routing="continuous"),
    RoutedTable(name="items", embedding_dim=4, features=("item",), num_embeddings=500, pooling="sum"),
    RoutedTable(
        name="tags", embedding_dim=6, features=("tag",), num_embeddings=300, routing=hash_roundrobin(7), pooling="mean"
    ),
]
FEATURES = ("tag", "user", "item", "friend")
HOT = {"users": torch.arange(90), "items": (torch.arange(60) - 50) * 2**40, "tags": torch.arange(9) * 2**40}


def make_batch(rank: int, step: int) -> KeyBatch:
    generator = torch.Generator().manual_seed(100 * step + rank)
    sizes = [3, 3 + rank, 2, 0 if rank == 1 else 4]
    lengths = torch.randint(0, 5, (sum(sizes),), generator=generator)
    values, row = [], 0
    for feature, size in zip(FEATURES, sizes, strict=True):
        total = int(lengths[row : row + size].sum())
        drawn = torch.randint(0, 101, (total,), generator=generator)
        values.append(drawn if feature in ("user", "friend") else (drawn - 50) * 2**40)
        row += size
    weights = torch.rand(int(lengths.sum()), generator=generator)
    return KeyBatch(features=FEATURES, values=torch.cat(values), lengths=lengths, batch_sizes=sizes, weights=weights)


def to_device(batch: KeyBatch, device: torch.device | str) -> KeyBatch:
    assert batch.weights is not None
    return replace(
        batch, values=batch.values.to(device), lengths=batch.lengths.to(device), weights=batch.weights.to(device)
    )


class Whole:
    """Every table in one process: a dense row for each key that may occur."""

    def __init__(self, tables: Sequence[RoutedTable] = TABLES) -> None:
        dense = torch.arange(101)
        self.tables = tables
        self.keys = {t.name: dense if t.name == "users" else (dense - 50) * 2**40 for t in tables}
        self.weights = {t.name: torch.nn.Parameter(initial_rows(self.keys[t.name], t)) for t in tables}

    def look_up(self, batch: KeyBatch) -> dict[str, Tensor]:
        results, row, at = {}, 0, 0
        assert batch.weights is not None
        by_feature = {feature: table for table in self.tables for feature in table.features}
        for feature, size in zip(batch.features, batch.batch_sizes, strict=True):
            table, rows = by_feature[feature], []
            for length in batch.lengths[row : row + size].tolist():
                index = torch.searchsorted(self.keys[table.name], batch.values[at : at + length])
                found = self.weights[table.name][index]
                if table.pooling != "none":
                    found = (found * batch.weights[at : at + length, None]).sum(0, keepdim=True)
                    found = found / max(length, 1) if table.pooling == "mean" else found
                rows.append(found)
                at += length
            row += size
            results[feature] = torch.cat(rows) if rows else torch.zeros(0, table.embedding_dim)
        return results


def loss_of(results: dict[str, Tensor]) -> Tensor:
    return torch.stack([(results[name] * (i + 1)).square().sum() for i, name in enumerate(sorted(results))]).sum()


def check_rows(
    collection: RoutedEmbeddingCollection, whole: Whole, rank: int, world_size: int, *, tolerance: float = 1e-5
) -> None:
    held_anywhere = torch.zeros(1, dtype=torch.int64)
    for table in whole.tables:
        owned: Any = collection.tables[table.name]
        held = owned.held_keys().cpu()
        block = table.rows_per_rank(world_size)
        assert bool((owners(held, table.resolved_routing, world_size=world_size, block_size=block) == rank).all())
        index = torch.searchsorted(whole.keys[table.name], held)
        expected = whole.weights[table.name][index]
        torch.testing.assert_close(owned.weight[: held.numel()].cpu(), expected, rtol=tolerance, atol=tolerance)
        held_anywhere += held.numel()
    assert int(held_anywhere) > 0
