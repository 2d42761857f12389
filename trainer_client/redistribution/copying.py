"""Copying ranges wherever they are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from evenkeel.partitioning.slices import Slice
from trainer_client.redistribution.copy_cpu import copy_on_host
from trainer_client.redistribution.moves import WHOLE
from trainer_client.redistribution.ranges import Ranges, cut


def piece_bytes(device: torch.device) -> int:
    """Bytes above which a range is cut for the device."""
    if device.type != "cuda":
        return WHOLE
    from trainer_client.redistribution.copy_cuda import PIECE_BYTES

    return PIECE_BYTES


def copy_table(table: torch.Tensor) -> None:
    """Copies on the current stream of the device where the table is, or on the host.

    Args:
        table: (3, k) int64: addresses to copy from, addresses to copy to, bytes; on a device aligned to 16 bytes.
    """
    if table.is_cuda:
        from trainer_client.redistribution.copy_cuda import copy_on_device

        copy_on_device(table)
    else:
        copy_on_host(Ranges(*table.numpy()))


def describe_ranges(parts: Sequence[Ranges], device: torch.device) -> torch.Tensor:
    """The table for `copy_table` of all ranges of several lists; the host does not wait for its copy to a device.

    Args:
        parts: One list or more.
        device: Where the memory is that the ranges are of.
    """
    ranges = parts[0] if len(parts) == 1 else Ranges(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
    table = torch.from_numpy(cut(*ranges, piece_bytes(device)))
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


def warm_up(device: torch.device | str | None = None) -> None:
    """Compiles the kernels of the host and of a CUDA device, or loads them from caches, so that no training step does.

    Args:
        device: Where batches will be; None for the host only.
    """
    from trainer_client.redistribution.fields import FieldTable
    from trainer_client.redistribution.layout import lay_out
    from trainer_client.redistribution.moves import describe, measure, room
    from trainer_client.redistribution.ranges import sample_ranges

    nothing = np.zeros(0, dtype=np.int64)
    table = np.zeros((0, 0), dtype=np.int64)
    ranges = Ranges(*sample_ranges(nothing, np.zeros(1, np.int64), table, nothing, nothing, nothing, nothing, table))
    copy_table(describe_ranges([ranges], torch.device("cpu")))
    nowhere = Slice(
        rank=0,
        destinations=np.zeros(0, dtype=np.int32),
        sources=np.zeros(0, dtype=np.int32),
        source_counts=np.zeros(0, dtype=np.int32),
        source_totals=table,
    )
    fields = FieldTable.of(())
    lay_out(fields, nothing, table)
    amounts = measure(nowhere, table, fields, 1)
    words = np.zeros(room(amounts, fields, WHOLE), dtype=np.int64)
    describe(words, amounts, nowhere, table, fields, nothing, nothing, nothing, 0, 0, most=WHOLE, join=True)
    if device is not None and torch.device(device).type == "cuda":
        some = torch.zeros(32, dtype=torch.uint8, device=device)
        addresses = np.array([some.data_ptr()])
        copy_table(describe_ranges([Ranges(addresses, addresses + 16, np.array([16]))], some.device))
