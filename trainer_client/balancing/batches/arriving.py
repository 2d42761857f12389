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
from trainer_client.balancing.batches.flatten import PLAIN, Match, assemble, match, take_apart
from trainer_client.balancing.batches.spec import BatchError, BatchSpec


def is_on_device(batch: Any, spec: BatchSpec | None) -> bool:
    """Whether a batch is on a device other than the host."""
    try:
        found = take_apart(batch, spec or PLAIN)
    except BatchError:
        return False  # whoever flattens it says what is wrong
    leaves = zip(found.structure.leaves, found.tensors, strict=True)
    tensors = [tensor for leaf, tensor in leaves if not leaf.on_host] + [tensor for tensor, _ in found.lengths]
    return any(tensor.device.type != "cpu" for tensor in tensors)


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
        self._spec = spec if spec is not None else PLAIN
        self._found: Match = match(batch, self._spec) or take_apart(batch, self._spec)
        self._tensors = list(self._found.tensors)
        if self._spec.copy:  # the loader may write to it before the numbers have come
            self._tensors = [tensor.clone() for tensor in self._tensors]
        leaves = zip(self._found.structure.leaves, self._tensors, strict=True)
        counts = {
            leaf.path: tensor
            for leaf, tensor in leaves
            if leaf.rows == 1 and not leaf.shape and tensor.dtype in (torch.int32, torch.int64)
        }
        self._paths = tuple(counts)
        self._coming = [
            _Coming([tensor for tensor, _ in self._found.lengths], torch.int64),
            _Coming(list(counts.values()), torch.int64),
            *(_Coming([value], torch.float64 if value.is_floating_point() else torch.int64) for value in values),
        ]

    def get(self) -> tuple[FlatBatch, list[NDArray[Any]]]:
        """The flattened batch with its lengths on the host, and the values; waits until they have come.

        Raises:
            BatchError: If the lengths cannot be right.
        """
        lengths, counts, *values = [each.get() for each in self._coming]
        num_samples, structure = self._found.num_samples, self._found.structure
        table = np.empty((num_samples, len(structure.columns)), dtype=np.int64)
        for (_, columns), part in zip(self._found.lengths, lengths, strict=True):
            table[:, columns] = part.reshape(len(columns), num_samples).T
        flat = assemble(structure, self._tensors, table, copy=False)
        flat.know(dict(zip(self._paths, counts, strict=True)))
        return flat, [value[0] for value in values]


class _Coming:
    """Tensors on their way to the host, in one piece; beside those on a GPU, lengths of objects are there already."""

    def __init__(self, tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> None:
        places = {here: [i for i, one in enumerate(tensors) if one.is_cpu is here] for here in (True, False)}
        self._there: _Coming | None = None
        self._order = places[True] + places[False]
        if all(places.values()):
            self._there = _Coming([tensors[place] for place in places[True]], dtype)
            tensors = [tensors[place] for place in places[False]]
        self._sizes = [tensor.numel() for tensor in tensors]
        self._event: torch.cuda.Event | None = None
        self._host: torch.Tensor | None = None
        if not tensors:
            return
        packed = torch.cat([tensor.detach().reshape(-1).to(dtype) for tensor in tensors])
        if packed.device.type != "cuda":
            self._host = packed.cpu()
            return
        side = _stream(packed.device)
        side.wait_stream(torch.cuda.current_stream(packed.device))
        with torch.cuda.stream(side):
            self._host = torch.empty(packed.shape, dtype=dtype, device="cpu", pin_memory=True)
            self._host.copy_(packed, non_blocking=True)
            self._event = side.record_event()
        packed.record_stream(side)

    def get(self) -> list[NDArray[Any]]:
        if self._host is None:
            return []
        if self._event is not None:
            self._event.synchronize()
        found = [part.copy() for part in np.split(self._host.numpy(), np.cumsum(self._sizes)[:-1])]
        if self._there is not None:
            found = [*self._there.get(), *found]
        return [found[place] for place in np.argsort(self._order)]


@lru_cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
