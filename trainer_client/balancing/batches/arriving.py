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

from trainer_client.balancing.batches.flat import FlatBatch, coming
from trainer_client.balancing.batches.flatten import PLAIN, assemble, table_of
from trainer_client.balancing.batches.reading import reader_of
from trainer_client.balancing.batches.spec import BatchError, BatchSpec
from trainer_client.balancing.batches.structure import is_count


def is_on_device(batch: Any, spec: BatchSpec | None) -> bool:
    """Whether a batch is on a device other than the host."""
    try:
        contents = reader_of(spec or PLAIN).read(batch)
    except BatchError:
        return False  # whoever flattens it says what is wrong
    on_host = contents.structure.on_host
    tensors = [tensor for index, tensor in enumerate(contents.tensors) if index not in on_host]
    return not all(tensor.is_cpu for tensor in tensors + contents.all_lengths)


class Arriving:
    """A batch whose numbers are on their way to the host."""

    def __init__(self, batch: Any, spec: BatchSpec | None, values: Sequence[torch.Tensor] = ()) -> None:
        """Begins to copy what is on a device, and values that are to come along, such as (n,) costs; never waits."""
        self._contents = reader_of(spec or PLAIN).read(batch)
        lengths, tensors = self._contents.all_lengths, self._contents.tensors
        if spec is not None and spec.copy:  # the loader may write to it before the numbers have come
            tensors[:] = [tensor.clone() for tensor in tensors]
        leaves = zip(self._contents.structure.leaves, tensors, strict=True)
        counts = {leaf.path: tensor for leaf, tensor in leaves if is_count(leaf)}
        self._paths = tuple(counts)
        self._coming = Coming([*lengths, *counts.values(), *values])
        self._num_lengths = len(lengths)

    def get(self) -> tuple[FlatBatch, list[NDArray[Any]]]:
        """The flattened batch with its lengths on the host, and the values; waits until they have come."""
        numbers = self._coming.get()
        lengths, counts = numbers[: self._num_lengths], numbers[self._num_lengths :]
        flat = assemble(self._contents, table_of(self._contents, lengths), copy=False)
        flat.counts = dict(zip(self._paths, counts, strict=False))
        return flat, counts[len(self._paths) :]


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
            on_host = coming(packed)
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
