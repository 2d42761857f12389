"""The model of `benchmarks.placement_gpu`: tables, keys, and where FBGEMM's kernels keep the tables' bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from evenkeel.placement import Optimizer, Plan, PlanRequest, Sharding, Table
from evenkeel.placement.access import power_law
from evenkeel.placement.layouts import Layout
from evenkeel.placement.storage_torchrec import torchrec_footprint
from trainer_client.planning import describe_model

EXPONENT = 1.05
DIM = 128
_FBGEMM = {
    Optimizer.ROWWISE_ADAGRAD: EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    Optimizer.ADAM: EmbOptimType.ADAM,
    Optimizer.SGD: EmbOptimType.EXACT_SGD,
}
# Lookups of a sample by table. What is looked up seldom is what the planner sends to host memory first.
_LOOKUPS = {"wide_0": 16, "wide_1": 8, "wide_2": 2, "wide_3": 1, "one_0": 8, "one_1": 4, "one_2": 1, "one_3": 1}
_SEQUENCES = {"seq_0": 16, "seq_1": 2}


class Model(torch.nn.Module):
    """Four large row-wise and four smaller table-wise bags, and two row-wise tables of sequences, 14 GiB at scale 1."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        meta = torch.device("meta")
        large, small = max(64, int((4 << 20) * scale)), max(64, int((1 << 20) * scale))
        bags = [
            EmbeddingBagConfig(
                name=name,
                embedding_dim=DIM,
                num_embeddings=large if name.startswith("wide") else small,
                feature_names=[f"f_{name}"],
            )
            for name in _LOOKUPS
        ]
        rows = [
            EmbeddingConfig(name=name, embedding_dim=DIM, num_embeddings=large, feature_names=[f"f_{name}"])
            for name in _SEQUENCES
        ]
        self.bags = EmbeddingBagCollection(tables=bags, device=meta)
        self.rows = EmbeddingCollection(tables=rows, device=meta)

    def forward(self, bags: KeyedJaggedTensor, rows: KeyedJaggedTensor) -> torch.Tensor:
        """The sum of all embeddings."""
        sequences = self.rows(rows)
        total: torch.Tensor = self.bags(bags).values().sum()
        return total + torch.stack([sequence.values().sum() for sequence in sequences.values()]).sum()


def planned_tables(model: Model, optimizer: Optimizer) -> tuple[Table, ...]:
    """The tables as the planner is told of them."""
    lookups = {name: float(count) for name, count in (_LOOKUPS | _SEQUENCES).items()}
    tables = describe_model(model, optimizer=optimizer, ids_per_sample=lookups)
    single = Sharding.TABLE_WISE
    return tuple(
        replace(
            table,
            access=power_law(EXPONENT, table.rows),
            sharding=single if table.name.startswith("one") else Sharding.ROW_WISE,
        )
        for table in tables
    )


def sharders(optimizer: Optimizer) -> list[Any]:
    """TorchRec's sharders with the fused optimizer."""
    fused = {"optimizer": _FBGEMM[optimizer], "learning_rate": 0.01}
    return [
        EmbeddingBagCollectionSharder(fused_params=dict(fused)),
        EmbeddingCollectionSharder(fused_params=dict(fused)),
    ]


def keys_of(rows: int, count: int, generator: torch.Generator) -> torch.Tensor:
    """(count,) int64 keys: the integer parts of a power law on [1, rows + 1], permuted over the rows."""
    uniform = torch.rand(count, generator=generator, dtype=torch.float64, device=generator.device)
    last = float(rows + 1) ** (1 - EXPONENT)
    ranks = (((last - 1) * uniform + 1) ** (1 / (1 - EXPONENT))).to(torch.int64).clamp_(1, rows) - 1
    keys: torch.Tensor = ranks * 2_654_435_761 % rows
    return keys


def table_bytes_by_kernel(parallel: torch.nn.Module, request: PlanRequest, found: Plan) -> list[dict[str, Any]]:
    """What each of FBGEMM's kernels on this rank holds, and what the plan said that its tables take."""
    tables = {table.name: table for table in request.tables}
    placements = {placement.table: placement for placement in found.placements}
    result = []
    for names, kernel in _kernels(parallel):
        hbm = host = 0
        for name in names:
            table, placement = tables[name], placements[name]
            shard = Layout(placement.sharding, placement.column_shards).shard(table, request.topology)
            ratio = np.array([placement.ratio])
            takes = torchrec_footprint(table, placement.mode, ratio, shard.rows, shard.dim, training=True)
            hbm, host = hbm + int(takes.hbm[0]), host + int(takes.host[0])
        held = {"hbm": 0, "host": 0, "cache": 0, "state": 0}
        for name, tensor in _tensors(kernel):
            in_host = tensor.is_cuda and bool(torch.ops.fbgemm.is_uvm_tensor(tensor))
            size = tensor.untyped_storage().nbytes()
            held["host" if in_host else "hbm"] += size
            if not in_host and name.startswith(("lxu_", "cache_")):
                held["cache"] += size
            if not in_host and name.startswith("momentum"):
                held["state"] += size
        result.append(
            {"tables": names, "predicted_hbm_bytes": hbm, "predicted_host_bytes": host}
            | {f"measured_{what}_bytes": size for what, size in held.items()}
        )
    return result


def _kernels(parallel: torch.nn.Module) -> Iterator[tuple[list[str], torch.nn.Module]]:
    """Table names and module of each of FBGEMM's kernels; sharded modules hide them from `modules()`."""
    for sharded in parallel.modules():
        for lookup in getattr(sharded, "_lookups", ()):
            for wrapper in lookup.modules():
                kernel = getattr(wrapper, "_emb_module", None)
                if kernel is not None:
                    yield [table.name for table in wrapper._config.embedding_tables], kernel


def _tensors(kernel: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor that the kernel keeps, each storage once."""
    seen: set[int] = set()
    plain = ((name, value) for name, value in vars(kernel).items() if isinstance(value, torch.Tensor))
    for name, tensor in [*kernel.named_parameters(), *kernel.named_buffers(), *plain]:
        key = tensor.untyped_storage().data_ptr()
        if tensor.numel() and key not in seen:
            seen.add(key)
            yield name, tensor
