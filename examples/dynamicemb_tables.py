"""DynamicEmb's tables behind a `RoutedEmbeddingCollection`: `make_table=dynamicemb_tables(optimizer="adam")`.

They are DynamicEmb's `BatchedDynamicEmbeddingTablesV2`, with its `dump` and `load`. DynamicEmb updates its rows in the
backward pass with an optimizer of its own, so these tables have no parameters for yours.
"""

import importlib
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer_client.embedding.dynamicemb import dynamicemb_loads_by_owner
from trainer_client.embedding.tables import RoutedTable, TableFactory

BUCKET = 128
"""Rows of a bucket of DynamicEmb's index, to a multiple of which capacities are rounded."""
OPTIMIZERS = {
    "sgd": "EXACT_SGD",
    "adam": "ADAM",
    "adagrad": "EXACT_ADAGRAD",
    "rowwise_adagrad": "EXACT_ROWWISE_ADAGRAD",
}
"""FBGEMM's `EmbOptimType` of each optimizer."""


def _state_bytes(optimizer: str, dim: int, item: int) -> int:
    """Bytes of optimizer state a row."""
    return {"sgd": 0, "adam": 2 * dim * item, "adagrad": dim * item, "rowwise_adagrad": 16}[optimizer]


def table_options(
    table: RoutedTable, *, world_size: int, optimizer: str = "adam", hbm_bytes: int | None = None
) -> dict[str, Any]:
    """Arguments of `DynamicEmbTableOptions` for a rank's part of a table."""
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer is {optimizer!r}; choose one of {', '.join(OPTIMIZERS)}")
    if table.resolved_routing.dist_type == "continuous":
        raise ValueError(
            f"table {table.name}: continuous routing sends row numbers, which need no table of keys; use the default "
            "storage, or route by roundrobin or hash_roundrobin"
        )
    if table.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"table {table.name}: dtype is {table.dtype}; DynamicEmb has float32, float16 and bfloat16")
    capacity = -(-table.rows_per_rank(world_size) // BUCKET) * BUCKET
    row = table.embedding_dim * table.dtype.itemsize
    row += _state_bytes(optimizer, table.embedding_dim, table.dtype.itemsize)
    return {
        "index_type": torch.int64,
        "embedding_dtype": table.dtype,
        "dim": table.embedding_dim,
        "max_capacity": capacity,
        "bucket_capacity": BUCKET,
        "local_hbm_for_values": hbm_bytes if hbm_bytes is not None else capacity * (-(-row // 16) * 16),
        "dist_type": table.resolved_routing.dist_type,
    }


class DynamicEmbTable(nn.Module):
    """A rank's part of a table, held by DynamicEmb on its GPU.

    Args:
        table: The declaration.
        options: Arguments of `DynamicEmbTableOptions`.
        optimizer: One of `OPTIMIZERS`.
        device: A CUDA device.
        arguments: More arguments of `BatchedDynamicEmbeddingTablesV2`, such as `learning_rate`.
    """

    refuses = False  # it evicts or grows where there is no room

    def __init__(
        self,
        table: RoutedTable,
        options: dict[str, Any],
        *,
        optimizer: str,
        device: torch.device,
        arguments: dict[str, Any],
    ) -> None:
        super().__init__()
        library = importlib.import_module("dynamicemb")
        batched = importlib.import_module("dynamicemb.batched_dynamicemb_tables")
        config = importlib.import_module("dynamicemb.dynamicemb_config")
        optimizers = importlib.import_module("fbgemm_gpu.split_embedding_configs").EmbOptimType
        self.table = table
        if str(device) == "cuda":  # DynamicEmb reads the number off the name
            device = torch.device("cuda", torch.cuda.current_device())
        self.tables = batched.BatchedDynamicEmbeddingTablesV2(
            table_options=[library.DynamicEmbTableOptions(**options)],
            table_names=[table.name],
            pooling_mode=config.DynamicEmbPoolingMode.NONE,
            output_dtype=table.dtype,
            device=device,
            optimizer=getattr(optimizers, OPTIMIZERS[optimizer]),
            **arguments,
        )

    def forward(self, indices: Tensor) -> Tensor:
        """Embeddings (n x embedding_dim) of keys (n), which are inserted on first sight while training."""
        if indices.numel() == 0:
            return torch.zeros(
                0, self.table.embedding_dim, dtype=self.table.dtype, device=indices.device, requires_grad=True
            )
        offsets = torch.tensor([0, indices.numel()], dtype=torch.int64, device=indices.device)
        found: Tensor = self.tables(indices, offsets)
        return found

    def dump(self, path: Path | str, *, group: dist.ProcessGroup | None = None) -> None:
        """Writes the table into a DynamicEmb dump directory, which exists; all ranks call it together.

        `evenkeel checkpoint convert` re-routes such directories.

        Raises:
            ValueError: If the routing has a seed, which a dump cannot record.
        """
        if self.table.resolved_routing.seed:
            raise ValueError(
                f"table {self.table.name}: routing is {self.table.resolved_routing}, and a dump of DynamicEmb has "
                "no seed; use hash_roundrobin with seed 0"
            )
        self.tables.dump(str(path), optim=True, counter=False, pg=group)

    def load(self, path: Path | str, *, group: dist.ProcessGroup | None = None) -> None:
        """Reads a dump that was written, or converted, for this routing; of any number of ranks.

        Raises:
            CheckpointError: If the dump is damaged, or this release of DynamicEmb reads dumps in another way.
        """
        with dynamicemb_loads_by_owner(group):
            self.tables.load(str(path), optim=True, counter=False, pg=group)


def dynamicemb_tables(*, optimizer: str = "adam", hbm_bytes: int | None = None, **arguments: Any) -> TableFactory:
    """A `make_table` for `RoutedEmbeddingCollection`.

    Args:
        optimizer: One of `OPTIMIZERS`.
        hbm_bytes: Bytes of values and optimizer state to keep in HBM on each rank, a table; all of them by default.
        arguments: More arguments of `BatchedDynamicEmbeddingTablesV2`, such as `learning_rate`.

    Returns:
        What builds a rank's part of a table. It raises ImportError if DynamicEmb is not installed.
    """
    return partial(_make_table, optimizer=optimizer, hbm_bytes=hbm_bytes, arguments=arguments)


def _make_table(
    table: RoutedTable,
    rank: int,
    world_size: int,
    device: torch.device,
    *,
    optimizer: str,
    hbm_bytes: int | None,
    arguments: dict[str, Any],
) -> nn.Module:
    del rank
    options = table_options(table, world_size=world_size, optimizer=optimizer, hbm_bytes=hbm_bytes)
    if find_spec("dynamicemb") is None:
        raise ImportError(f"table {table.name}: DynamicEmb is not installed; install it, or leave make_table out")
    return DynamicEmbTable(table, options, optimizer=optimizer, device=device, arguments=arguments)
