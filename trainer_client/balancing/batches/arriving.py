"""Batches that are on a device already: what balancing must know of them comes to the host ahead of time.

The lengths and the integers of a batch are copied on a stream of their own, after what the current stream has queued
when the batch arrives. Nothing that is queued later waits for the copy; only who wants the numbers does.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trainer_client.balancing.batches.flat import FlatBatch
from trainer_client.balancing.batches.flatten import PLAIN, assemble, table_of
from trainer_client.balancing.batches.reading import reader_of
from trainer_client.balancing.batches.spec import BatchError, BatchSpec


def is_on_device(batch: Any, spec: BatchSpec | None) -> bool:
    """Whether a batch is on a device other than the host."""
    try:
        parts = reader_of(spec or PLAIN).read(batch)
    except BatchError:
        return False  # whoever flattens it says what is wrong
    leaves = zip(parts.structure.leaves, parts.tensors, strict=True)
    tensors = [tensor for leaf, tensor in leaves if not leaf.on_host] + [tensor for tensor, _ in parts.lengths]
    return not all(tensor.is_cpu for tensor in tensors)


class Arriving:
    """A batch whose numbers are on their way to the host."""

    def __init__(self, batch: Any, spec: BatchSpec | None, values: Sequence[torch.Tensor] = ()) -> None:
        """Begins to copy; waits for nothing.

        Args:
            batch: On a device.
            spec: Its declarations.
            values: What else is to come along, such as costs: (n,) tensors on the device.

        Raises:
            BatchError: If a value is not understood, or batch sizes disagree.
        """
        self._parts = reader_of(spec or PLAIN).read(batch)
        tensors = self._parts.tensors
        if spec is not None and spec.copy:  # the loader may write to it before the numbers have come
            tensors[:] = [tensor.clone() for tensor in tensors]
        counts = {
            leaf.path: tensor
            for leaf, tensor in zip(self._parts.structure.leaves, tensors, strict=True)
            if leaf.rows == 1 and not leaf.shape and tensor.dtype in (torch.int32, torch.int64)
        }
        self._paths = tuple(counts)
        self._coming = Coming([*(tensor for tensor, _ in self._parts.lengths), *counts.values(), *values])

    def get(self) -> tuple[FlatBatch, list[NDArray[Any]]]:
        """The flattened batch with its lengths on the host, and the values; waits until they have come.

        Raises:
            BatchError: If the lengths cannot be right.
        """
        numbers = self._coming.get()
        first_count = len(self._parts.lengths)
        first_value = first_count + len(self._paths)
        flat = assemble(self._parts, table_of(self._parts, numbers[:first_count]), copy=False)
        flat.counts = dict(zip(self._paths, numbers[first_count:first_value], strict=True))
        return flat, numbers[first_value:]


class Coming:
    """Tensors on their way to the host as int64 or float64, those of a device in one copy of each kind."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = [
            tensor.detach().reshape(-1).to(torch.float64 if tensor.is_floating_point() else torch.int64)
            for tensor in tensors
        ]
        self._event: torch.cuda.Event | None = None
        self._packed: list[tuple[list[int], torch.Tensor]] = []
        for dtype in (torch.int64, torch.float64):
            chosen = [i for i, one in enumerate(self._tensors) if one.dtype is dtype and not one.is_cpu]
            if chosen:
                self._packed.append((chosen, self._copied(torch.cat([self._tensors[index] for index in chosen]))))

    def _copied(self, packed: torch.Tensor) -> torch.Tensor:
        if packed.device.type != "cuda":
            return packed.cpu()
        side = _stream(packed.device)
        side.wait_stream(torch.cuda.current_stream(packed.device))
        with torch.cuda.stream(side):
            on_host = torch.empty(packed.shape, dtype=packed.dtype, device="cpu", pin_memory=True)
            on_host.copy_(packed, non_blocking=True)
            self._event = side.record_event()
        packed.record_stream(side)
        return on_host

    def get(self) -> list[NDArray[Any]]:
        """The numbers, one flat array for each tensor; waits until they have come."""
        if self._event is not None:
            self._event.synchronize()
        arrays = {index: tensor.numpy() for index, tensor in enumerate(self._tensors) if tensor.is_cpu}
        for chosen, packed in self._packed:
            ends = np.cumsum([self._tensors[index].numel() for index in chosen])
            arrays |= zip(chosen, (part.copy() for part in np.split(packed.numpy(), ends[:-1])), strict=True)
        return [arrays[index] for index in range(len(arrays))]


@lru_cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
