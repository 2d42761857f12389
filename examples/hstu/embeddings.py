"""Where the item table lives: a copy on each rank, sharded under a routing, or sharded by TorchRec.

Actions and context features have a few values only, and stay small tables on each rank.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from examples.datasets import SequenceBatch
from examples.hstu.model import LocalEmbeddings, ModelOptions
from trainer_client.embedding.routing import DistType
from trainer_client.embedding.tables import KeyBatch, RoutedEmbeddingCollection, RoutedTable
from trainer_client.embedding.tables.tables import initial_rows

Storage = Literal["local", "routed", "torchrec"]
STORAGES: tuple[Storage, ...] = ("local", "routed", "torchrec")


def item_table(options: ModelOptions, dist_type: DistType, seed: int) -> RoutedTable:
    """The item table, sharded by rows."""
    return RoutedTable(
        name="item",
        embedding_dim=options.embedding_dim,
        features=("history", "candidates"),
        num_embeddings=options.num_items,
        routing=dist_type,
        seed=seed,
    )


class RoutedEmbeddings(LocalEmbeddings):
    """The item table sharded by rows, each key at the rank that the routing names."""

    def __init__(self, options: ModelOptions, dist_type: DistType, device: torch.device, seed: int) -> None:
        super().__init__(options)
        del self.items
        table = item_table(options, dist_type, seed)
        self.sharded = RoutedEmbeddingCollection([table], device=device, deduplicate=True)

    def look_up(self, batch: SequenceBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings of history and candidates."""
        keys = KeyBatch(
            features=("history", "candidates"),
            values=torch.cat([batch.history, batch.candidates]),
            lengths=torch.cat([batch.num_history, batch.num_candidates]),
            batch_sizes=(batch.size, batch.size),
        )
        found = self.sharded(keys)
        return found["history"], found["candidates"]


class TorchRecEmbeddings(LocalEmbeddings):
    """The item table as a TorchRec `EmbeddingCollection`, which `DistributedModelParallel` shards."""

    def __init__(self, options: ModelOptions, learning_rate: float) -> None:
        super().__init__(options)
        del self.items
        from torchrec import EmbeddingCollection, EmbeddingConfig
        from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
        from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

        self.sharded = EmbeddingCollection(
            device=torch.device("meta"),
            tables=[
                EmbeddingConfig(
                    name="item",
                    embedding_dim=options.embedding_dim,
                    num_embeddings=options.num_items,
                    feature_names=["history", "candidates"],
                )
            ],
        )
        # FBGEMM has no Adam for CPUs.
        apply_optimizer_in_backward(RowWiseAdagrad, self.sharded.parameters(), {"lr": 10 * learning_rate})

    def look_up(self, batch: SequenceBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings of history and candidates."""
        from torchrec import KeyedJaggedTensor

        keys = KeyedJaggedTensor(
            keys=["history", "candidates"],
            values=torch.cat([batch.history, batch.candidates]),
            lengths=torch.cat([batch.num_history, batch.num_candidates]),
        )
        found = self.sharded(keys)
        return found["history"].values(), found["candidates"].values()


def make_embeddings(
    options: ModelOptions,
    storage: Storage,
    *,
    dist_type: DistType,
    device: torch.device,
    learning_rate: float,
    seed: int = 0,
) -> LocalEmbeddings:
    """The embeddings of a storage; a whole item table and one sharded under a routing begin with the same values.

    Raises:
        ValueError: If the storage has no such routing.
    """
    if storage == "routed":
        return RoutedEmbeddings(options, dist_type, device, seed)
    if storage == "torchrec":
        if dist_type != "continuous":
            raise ValueError(
                f"TorchRec's tables are blocks of rows, so dist-type {dist_type!r} needs --embeddings routed"
            )
        return TorchRecEmbeddings(options, learning_rate)
    local = LocalEmbeddings(options)
    with torch.no_grad():
        local.items.weight.copy_(initial_rows(torch.arange(options.num_items), item_table(options, dist_type, seed)))
    return local


def shard_by_torchrec(model: nn.Module, device: torch.device, plan_file: Path | None) -> nn.Module:
    """The model under `DistributedModelParallel`: by a plan of Evenkeel's planner, or row-wise.

    Args:
        model: The model; its dense part becomes data-parallel.
        device: Of this rank.
        plan_file: What `evenkeel plan` wrote for this model and this number of ranks.
    """
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.types import ParameterConstraints

    sharders: list[Any] = [EmbeddingCollectionSharder()]
    if plan_file is not None:
        from evenkeel.placement import plan_file as files
        from trainer_client.planning.applying import sharding_plan

        content = files.loads(plan_file.read_text())
        plan = sharding_plan(model, content.request, content.plan, device=device.type)
    else:
        topology = Topology(world_size=dist.get_world_size(), compute_device=device.type)
        constraints = {"item": ParameterConstraints(sharding_types=["row_wise"])}
        planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints)
        plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    sharded: nn.Module = DistributedModelParallel(model, device=device, plan=plan, sharders=sharders)
    return sharded
