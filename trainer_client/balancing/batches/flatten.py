"""From a user's batch to a `FlatBatch`, at once or with its numbers on their way from a device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trainer_client.balancing.batches.flat import FlatBatch, coming
from trainer_client.balancing.batches.padding import trim
from trainer_client.balancing.batches.reading import Reading, read
from trainer_client.balancing.batches.roles import check_items
from trainer_client.balancing.batches.spec import BatchError, BatchSpec, check_spec

_MAX_LENGTH = 2**31 - 1
PLAIN = BatchSpec()


def flatten(
    batch: Any,
    spec: BatchSpec | None = None,
    *,
    lengths: NDArray[np.int64] | None = None,
    allow_sync: bool = False,
) -> FlatBatch:
    """Takes a batch apart.

    Supported are any nesting of dicts, lists, tuples, named tuples, dataclasses, attrs and pydantic classes, own
    classes that hold tensors, `UserDict`, `TensorDict` and what is registered with torch's pytrees; of tensors, NumPy
    arrays, TorchRec's `JaggedTensor` and `KeyedJaggedTensor`, nested tensors in jagged layout, lists with one Python
    object for each sample, and None. The first dimension of a tensor is the sample unless `spec` says otherwise.
    Everything else must be declared.

    Args:
        batch: The batch; its tensors are used as they are, nothing is copied but padded and deduplicated tensors and
            Python objects. A `FlatBatch` stays as it is.
        spec: Declarations per path.
        lengths: (n, num_jagged) lengths of all jagged columns, where the caller has them on the host, for a batch
            whose lengths are on a device.
        allow_sync: Whether to wait for a device whose lengths are not given.

    Returns:
        The batch as tensors whose rows belong to samples.

    Raises:
        BatchError: If a value is not understood, batch sizes disagree, or lengths are only on a device.
    """
    if isinstance(batch, FlatBatch):
        return batch
    if not isinstance(spec, BatchSpec):
        check_spec(spec)
        spec = PLAIN
    reading = read(batch, spec)
    structure, columns = reading.structure, reading.structure.columns
    if lengths is not None:
        table = np.array(lengths, dtype=np.int64, order="C")
        if table.shape != (reading.num_samples, len(columns)):
            raise BatchError(
                f"lengths has shape {table.shape}; the batch has {reading.num_samples} samples and the jagged fields "
                f"{list(columns)}"
            )
        return assemble(reading, table, copy=spec.copy)
    tensors = reading.all_lengths
    for tensor, numbers in zip(tensors, structure.lengths, strict=True):
        if not tensor.is_cpu and not allow_sync:
            raise BatchError(
                f"the lengths of {columns[numbers[0]]!r} are only on {tensor.device}, and reading them would make the "
                "host wait; give the batch to a BalancedLoader, which reads them ahead of time, submit the host's "
                "batch and redistribute its copy on the device, or flatten it yourself with lengths, or with "
                "allow_sync=True to wait"
            )
    table = table_of(reading, [tensor.cpu().numpy() for tensor in tensors])
    return assemble(reading, table, copy=spec.copy)


def table_of(reading: Reading, lengths: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    """(n, num_jagged) lengths of all columns, from those of `Reading.all_lengths` on the host."""
    structure, n = reading.structure, reading.num_samples
    table = np.empty((n, len(structure.columns)), dtype=np.int64)
    for columns, values in zip(structure.lengths, lengths, strict=True):
        where = slice(columns.start, columns.stop) if isinstance(columns, range) else columns
        table[:, where] = values.reshape(len(columns), n).T
    return table


def assemble(reading: Reading, table: NDArray[np.int64], *, copy: bool) -> FlatBatch:
    """The flattened batch; refuses (n, num_jagged) lengths that cannot be right."""
    structure, tensors = reading.structure, reading.tensors
    columns = structure.columns
    if table.size and table.view(np.uint64).max() > _MAX_LENGTH:  # as are negative ones
        sample, column = np.argwhere((table < 0) | (table > _MAX_LENGTH))[0]
        raise BatchError(
            f"sample {sample} of {columns[column]!r} has length {table[sample, column]}; it must be 0 to {_MAX_LENGTH}"
        )
    if structure.roles:
        check_items(table, columns, structure.roles)
    totals = table.sum(axis=0)
    values = totals.tolist()
    for index in structure.jagged:
        leaf = structure.leaves[index]
        if leaf.padding is not None:
            (column,) = leaf.columns
            tensors[index] = trim(tensors[index], table[:, column], leaf.padding, leaf.path, columns[column])
        rows, expected = tensors[index].shape[0], sum([values[column] for column in leaf.columns])
        if rows != expected:
            remedy = "drop the values that belong to no sample"
            if rows < expected:
                remedy = "values are missing, or the lengths are those of another field: give the lengths of its values"
            raise BatchError(f"{leaf.path!r} holds {rows} values, but its lengths add up to {expected}; {remedy}")
    if copy:
        tensors = [tensor.clone() for tensor in tensors]
    return FlatBatch(structure, tensors, table, totals=totals, shared=reading.shared)


# ------------------------------------------------------------------- batches that are on a device already
#
# What balancing must know of them, lengths and integers, is copied on a stream of its own, after what the current
# stream has queued when the batch arrives. Nothing that is queued later waits for the copy; only who wants the numbers.


def is_on_device(batch: Any, spec: BatchSpec | None) -> bool:
    """Whether a batch is on a device other than the host."""
    try:
        reading = read(batch, spec or PLAIN)
    except BatchError:
        return False  # whoever flattens it says what is wrong
    on_host = reading.structure.on_host
    tensors = [tensor for index, tensor in enumerate(reading.tensors) if index not in on_host]
    return not all(tensor.is_cpu for tensor in tensors + reading.all_lengths)


class Arriving:
    """A batch whose numbers are on their way to the host."""

    def __init__(self, batch: Any, spec: BatchSpec | None, values: Sequence[Any] = ()) -> None:
        """Begins to copy what is on a device, also of values that come along, such as (n,) costs; never waits."""
        self._reading, self._values = read(batch, spec or PLAIN), values
        lengths, tensors = self._reading.all_lengths, self._reading.tensors
        if spec is not None and spec.copy:  # the loader may write to it before the numbers have come
            tensors[:] = [tensor.clone() for tensor in tensors]
        leaves = zip(self._reading.structure.leaves, tensors, strict=True)
        counts = {leaf.path: tensor for leaf, tensor in leaves if leaf.is_count}
        self._paths, self._num_lengths = tuple(counts), len(lengths)
        self._coming = Coming([*lengths, *counts.values(), *filter(_is_on_device, values)])

    def get(self) -> tuple[FlatBatch, list[Any]]:
        """The flattened batch with its lengths on the host, and the values, as arrays; waits until they have come."""
        numbers = self._coming.get()
        flat = assemble(self._reading, table_of(self._reading, numbers[: self._num_lengths]), copy=False)
        came = iter(numbers[self._num_lengths :])
        flat.counts = {path: next(came) for path in self._paths}
        return flat, [next(came).reshape(one.shape) if _is_on_device(one) else one for one in self._values]


def _is_on_device(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type != "cpu"


class Coming:
    """Tensors on their way to the host as int64 or float64, those of a device in one copy."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = [
            tensor.detach().reshape(-1).to(torch.float64 if tensor.is_floating_point() else torch.int64).resolve_neg()
            for tensor in tensors
        ]
        self._event: torch.cuda.Event | None = None
        self._bits = torch.cat([tensor.view(torch.int64) for tensor in self._tensors if not tensor.is_cpu] or [_NONE])
        if self._bits.is_cuda:
            side, packed = _stream(self._bits.device), self._bits
            side.wait_stream(torch.cuda.current_stream(packed.device))
            with torch.cuda.stream(side):
                self._bits = coming(packed)
                self._event = side.record_event()
            packed.record_stream(side)

    def get(self) -> list[NDArray[Any]]:
        """The numbers, one flat array for each tensor; waits until they have come."""
        if self._event is not None:
            self._event.synchronize()
        sizes = [tensor.numel() for tensor in self._tensors if not tensor.is_cpu]
        parts = iter(self._bits.cpu().clone().split(sizes or [0]))  # type: ignore[no-untyped-call]
        return [(tensor if tensor.is_cpu else next(parts).view(tensor.dtype)).numpy() for tensor in self._tensors]


_NONE = torch.empty(0, dtype=torch.int64, device="cpu")


@lru_cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
