"""From a user's batch to a `FlatBatch`, or to one field of it by its path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trainer_client.balancing.batches.containers import container_of, is_keyed, is_torchrec
from trainer_client.balancing.batches.flat import FlatBatch
from trainer_client.balancing.batches.kinds import Contents, jagged_lengths
from trainer_client.balancing.batches.padding import without_padding
from trainer_client.balancing.batches.reading import reader_of
from trainer_client.balancing.batches.refusals import jagged_refusal
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
        batch: The batch; its tensors are used as they are, nothing is copied but padded tensors and Python objects. A
            `FlatBatch` stays as it is.
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
    check_spec(spec)
    spec = spec if spec is not None else PLAIN
    contents = reader_of(spec).read(batch)
    structure, columns = contents.structure, contents.structure.columns
    if lengths is not None:
        table = np.array(lengths, dtype=np.int64, order="C")
        if table.shape != (contents.num_samples, len(columns)):
            raise BatchError(
                f"lengths has shape {table.shape}; the batch has {contents.num_samples} samples and the jagged fields "
                f"{list(columns)}"
            )
        return assemble(contents, table, copy=spec.copy)
    tensors = contents.all_lengths
    for tensor, numbers in zip(tensors, structure.lengths, strict=True):
        if not tensor.is_cpu and not allow_sync:
            raise BatchError(
                f"the lengths of {columns[numbers[0]]!r} are only on {tensor.device}, and reading them would make the "
                "host wait; give the batch to a BalancedLoader, which reads them ahead of time, submit the host's "
                "batch and redistribute its copy on the device, or flatten it yourself with lengths, or with "
                "allow_sync=True to wait"
            )
    table = table_of(contents, [tensor.cpu().numpy() for tensor in tensors])
    return assemble(contents, table, copy=spec.copy)


def table_of(contents: Contents, lengths: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    """(n, num_jagged) lengths of all columns, from those of `Contents.all_lengths` on the host."""
    structure, n = contents.structure, contents.num_samples
    table = np.empty((n, len(structure.columns)), dtype=np.int64)
    for columns, values in zip(structure.lengths, lengths, strict=True):
        if values.size != len(columns) * n:
            raise BatchError(
                f"{structure.columns[columns[0]]!r} has {values.size} lengths for {len(columns)} keys of {n} samples; "
                "give one for each key and sample"
            )
        where = slice(columns.start, columns.stop) if isinstance(columns, range) else columns
        table[:, where] = values.reshape(len(columns), n).T
    return table


def assemble(contents: Contents, table: NDArray[np.int64], *, copy: bool) -> FlatBatch:
    """The flattened batch; refuses (n, num_jagged) lengths that cannot be right."""
    structure, tensors = contents.structure, contents.tensors
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
            tensors[index] = without_padding(tensors[index], table[:, column], leaf.padding, leaf.path, columns[column])
        rows, expected = tensors[index].shape[0], sum([values[column] for column in leaf.columns])
        if rows != expected:
            remedy = "drop the values that belong to no sample"
            if rows < expected:
                remedy = "values are missing, or the lengths are those of another field: give the lengths of its values"
            raise BatchError(f"{leaf.path!r} holds {rows} values, but its lengths add up to {expected}; {remedy}")
    if copy:
        tensors = [tensor.clone() for tensor in tensors]
    return FlatBatch(
        structure=structure,
        tensors=tensors,
        num_samples=len(table),
        totals=totals,
        shared=contents.shared,
        lengths=table,
    )


# ---------------------------------------------------------------------------------------- by path


def lookup(batch: Any, path: str) -> Any:
    """The value at a path; a key of a `KeyedJaggedTensor` gives its lengths.

    Raises:
        BatchError: If there is none; the message shows what there is instead.
    """
    value, rest = batch, path
    while rest:
        step = _step(value, rest)
        if step is None:
            raise BatchError(f"the batch has no {path!r}: nothing is called {rest!r} in {_describe(value)}")
        value, rest = step
    return value


def read_lengths(batch: Any, path: str) -> NDArray[np.int64]:
    """(n,) int64: lengths of the jagged field at `path`, or the values of an integer tensor (n,), from the host.

    Args:
        batch: A user's batch or a `FlatBatch`.
        path: The field.

    Returns:
        (n,) int64.

    Raises:
        BatchError: If there is no such field, or its lengths are on a device.
    """
    if isinstance(batch, FlatBatch):
        return batch.lengths_of(path)
    value = find_lengths(batch, path)
    if value.device.type != "cpu":
        raise BatchError(f"{path!r} is on {value.device}; compute costs from the host's batch, before the copy")
    lengths: NDArray[np.int64] = value.numpy().astype(np.int64)
    return lengths


def find_lengths(batch: Any, path: str) -> torch.Tensor:
    """The same in their own dtype, and wherever they are."""
    if isinstance(batch, FlatBatch):
        return torch.from_numpy(batch.lengths_of(path).copy())
    value = lookup(batch, path)
    is_jagged = is_torchrec(type(value), "JaggedTensor")
    if is_jagged or (isinstance(value, torch.Tensor) and value.is_nested):
        if reason := jagged_refusal(value, path):
            raise BatchError(reason)
        value = jagged_lengths(value)
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "iu":
        value = torch.from_numpy(value.astype(np.int64))
    is_tensor = isinstance(value, torch.Tensor) and value.dim() == 1
    if not is_tensor or value.is_floating_point() or value.is_complex() or value.dtype is torch.bool:
        raise BatchError(
            f"{path!r} is {_describe(value)}; name a jagged field (of a KeyedJaggedTensor one key), or an integer "
            "tensor with one number per sample"
        )
    lengths: torch.Tensor = value
    return lengths


def _step(value: Any, path: str) -> tuple[Any, str] | None:
    """One part of the path further; keys may hold dots themselves."""
    keyed = is_keyed(value)
    container = None if keyed else container_of(value)
    values, names, _ = container.flatten(value) if container is not None else ((), (), None)
    named = dict(zip(map(str, names), values, strict=True))
    parts = path.split(".")
    for count in range(1, len(parts) + 1):
        name, rest = ".".join(parts[:count]), ".".join(parts[count:])
        if keyed:
            if name in value.keys():  # noqa: SIM118 - not a dict
                stride, index = value.stride(), list(value.keys()).index(name)
                return jagged_lengths(value)[index * stride : (index + 1) * stride], rest
        elif name in named:
            return named[name], rest
        elif not isinstance(value, torch.Tensor | Mapping) and name.isidentifier() and hasattr(value, name):
            return getattr(value, name), rest
    return None


def _describe(value: Any) -> str:
    if is_keyed(value):
        return f"a KeyedJaggedTensor of {', '.join(value.keys())}"
    if isinstance(value, Mapping):
        return f"a dict of {', '.join(map(str, value.keys()))}"
    if isinstance(value, torch.Tensor):
        return f"a tensor {value.dtype} of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
