"""Copying ranges wherever they are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from evenkeel.partitioning.slices import Slice
from trainer_client.redistribution.copy_cpu import copy_on_host
from trainer_client.redistribution.moves import WHOLE
from trainer_client.redistribution.ranges import Ranges, cut, segment_ranges

_TORCH_DTYPES = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64}


def join(parts: list[Ranges]) -> Ranges:
    """All ranges of several lists."""
    if len(parts) == 1:
        return parts[0]
    return Ranges(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


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


class Copier:
    """Copies lists of ranges one after the other.

    On CUDA their descriptions travel to the device together, and `extra` arrays with them: one copy costs the host
    less than several.

    Attributes:
        extra: The arrays given, as tensors on the device.
    """

    def __init__(self, device: torch.device, steps: list[Ranges], extra: Sequence[NDArray[np.int32]] = ()) -> None:
        self._steps = steps
        self._pieces: list[torch.Tensor] = []
        if device.type == "cuda":
            from trainer_client.redistribution.copy_cuda import PIECE_BYTES

            pieces = [cut(*step, PIECE_BYTES) for step in steps]
            there = _upload([*pieces, *extra], device)
            self._pieces, self.extra = there[: len(steps)], there[len(steps) :]
        else:
            self.extra = [torch.from_numpy(array) for array in extra]

    def run(self, step: int) -> None:
        """Copies the ranges of one list, on the current stream of the device."""
        if self._pieces:
            from trainer_client.redistribution.copy_cuda import copy_on_device

            copy_on_device(self._pieces[step])
        else:
            copy_on_host(self._steps[step])


def _upload(arrays: Sequence[NDArray[np.int64] | NDArray[np.int32]], device: torch.device) -> list[torch.Tensor]:
    """The arrays on the device, each aligned to 16 bytes, by one copy that the host does not wait for."""
    begins = np.cumsum([0, *((array.nbytes + 15) // 16 * 16 for array in arrays)]).tolist()
    pinned = torch.empty(begins[-1], dtype=torch.uint8, pin_memory=True)
    memory = pinned.numpy()
    for array, begin in zip(arrays, begins, strict=False):
        memory[begin : begin + array.nbytes] = array.reshape(-1).view(np.uint8)
    there = pinned.to(device, non_blocking=True)
    return [
        there[begin : begin + array.nbytes].view(_TORCH_DTYPES[array.dtype]).view(array.shape)
        for array, begin in zip(arrays, begins, strict=False)
    ]


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
    copy_on_host(segment_ranges(*ranges))
    cut(*ranges, 16)
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
        Copier(some.device, [Ranges(addresses, addresses + 16, np.array([16]))]).run(0)
