"""A chunk of rows on its way between a table and a file."""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer_client.embedding.checkpoint.errors import CheckpointError
from trainer_client.embedding.checkpoint.record import TableRecord
from trainer_client.embedding.routing import owners


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Some rows of a table.

    Attributes:
        keys: (n): int64.
        arrays: By name, (n, ...) values or optimizer state.
        where: The file that they come from, for errors.
    """

    keys: Tensor
    arrays: dict[str, Tensor]
    where: str = ""

    def take(self, index: Tensor) -> "Rows":
        """The rows that an index tensor or a mask picks."""
        arrays = {name: array[index] for name, array in self.arrays.items()}
        return Rows(keys=self.keys[index], arrays=arrays, where=self.where)

    def digest(self) -> int:
        """CRC-32 of the keys and then of the arrays in the order of their names."""
        crc = zlib.crc32(as_bytes(self.keys))
        for name in sorted(self.arrays):
            crc = zlib.crc32(as_bytes(self.arrays[name]), crc)
        return crc


def as_bytes(tensor: Tensor) -> memoryview:
    """A CPU tensor's memory."""
    flat = tensor.detach().contiguous().view(-1)
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array) if flat.numel() else memoryview(b"")


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of a name such as `float32`."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def repeated_key(where: str, table: str, key: int) -> CheckpointError:
    """The error for a key that a checkpoint holds twice."""
    return CheckpointError(
        f"{where}: key {key} of table {table} is in the checkpoint twice; the file was doubled, or another copied into "
        "it; restore it from a copy"
    )


def check_owner(rows: Rows, record: TableRecord, rank: int) -> None:
    """Checks that a rank owns all of some rows.

    Raises:
        CheckpointError: If it does not; names the file and the first key that is out of place.
    """
    owner = owners(rows.keys, record.routing, num_ranks=record.num_ranks, block_size=record.block)
    wrong = owner != rank
    if bool(wrong.any()):
        key, right = int(rows.keys[wrong][0]), int(owner[wrong][0])
        raise CheckpointError(
            f"{rows.where}: holds key {key} of table {record.name} for rank {rank}, but {record.describe()} gives it "
            f"to rank {right}; the file is in the wrong place, or was saved under another routing than recorded"
        )


def split_by_owner(rows: Rows, record: TableRecord) -> Iterator[tuple[int, Rows]]:
    """The rows of each rank that has any, in their order."""
    owner = owners(rows.keys, record.routing, num_ranks=record.num_ranks, block_size=record.block)
    order = torch.argsort(owner, stable=True)
    counts = torch.bincount(owner, minlength=record.num_ranks).tolist()
    at = 0
    for rank, count in enumerate(counts):
        if count:
            yield rank, rows.take(order[at : at + count])
        at += count
