"""From a user's batch to a `FlatBatch`, or to one field of it by its path.

Another batch of a kind that was flattened before is taken apart without reading the declarations again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from trainer_client.balancing.batches.containers import is_torchrec
from trainer_client.balancing.batches.fields import Taken, jagged_lengths, without_padding
from trainer_client.balancing.batches.flat import FlatBatch, Leaf, Structure
from trainer_client.balancing.batches.plan import Plan, problem
from trainer_client.balancing.batches.roles import check_items
from trainer_client.balancing.batches.spec import BatchError, BatchSpec

_MAX_LENGTH = 2**31 - 1
_MAX_STRUCTURES = 64
PLAIN = BatchSpec()


class Parts(NamedTuple):
    """A batch that is taken apart, wherever it is.

    Attributes:
        structure: What it is like.
        tensors: One per leaf, those that are padded with their padding.
        lengths: Tensors of lengths, (columns × n,) each, and in which columns of the table they belong.
        num_samples: Number of samples n.
    """

    structure: Structure
    tensors: list[torch.Tensor]
    lengths: list[tuple[torch.Tensor, list[int]]]
    num_samples: int


# by the identity of the spec, which is kept alive, and the type of the batch: what the last one was like
_structures: dict[tuple[int, type], tuple[BatchSpec, Structure]] = {}


def take_apart(batch: Any, spec: BatchSpec) -> Parts:
    """A batch like one before, or else by its declarations.

    Raises:
        BatchError: If a value is not understood, or batch sizes disagree.
    """
    parts = _take_again(batch, spec)
    if parts is not None:
        return parts
    plan = Plan(spec, batch)
    if plan.has_empty_lists and not plan.has_samples:
        plan = Plan(spec, batch, empty_lists_are_objects=True)
    structure, num_samples = plan.finish()
    if len(_structures) >= _MAX_STRUCTURES:
        _structures.clear()
    _structures[id(spec), type(batch)] = spec, structure
    return Parts(structure, plan.taken.tensors, _lengths(plan.taken, structure), num_samples)


def _take_again(batch: Any, spec: BatchSpec) -> Parts | None:
    """A batch like one before; None if it is not like it."""
    _, structure = _structures.get((id(spec), type(batch)), (spec, None))
    if structure is None:
        return None
    taken, values = Taken(), [] if structure.tree is not None else [batch]
    if structure.tree is not None and not structure.tree.leaves_of(batch, values):
        return None
    for field, value in zip(structure.fields, values, strict=True):
        if not field.take(value, taken):
            return None
    tensors, leaves, lengths = taken.tensors, structure.leaves, _lengths(taken, structure)
    if not all(map(_is_alike, leaves, tensors)):
        return None
    fixed = [(leaf.rows, tensor.shape[0]) for leaf, tensor in zip(leaves, tensors, strict=True) if leaf.rows]
    num_samples = fixed[0][1] // fixed[0][0] if fixed else lengths[0][0].shape[0] // len(lengths[0][1])
    if (
        any(rows != each * num_samples for each, rows in fixed)
        or any(tensors[index].shape[0] != num_samples for index in structure.padded)
        or any(tensor.shape != (len(columns) * num_samples,) for tensor, columns in lengths)
        or any(size != num_samples for size in taken.sizes)
        or (structure.has_empty_lists and not num_samples)
    ):
        return None
    return Parts(structure.with_shared(taken.shared), tensors, lengths, num_samples)


def _lengths(taken: Taken, structure: Structure) -> list[tuple[torch.Tensor, list[int]]]:
    return [(taken.tensors[at] if at >= 0 else taken.lengths[-1 - at], columns) for at, columns in structure.sources]


def _is_alike(leaf: Leaf, tensor: torch.Tensor) -> bool:
    dims = 1 if leaf.padding is None else 2
    return (
        type(tensor) is torch.Tensor
        and tensor.dtype is leaf.dtype
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.requires_grad
        and not tensor.is_meta
        and tensor.shape[dims:] == leaf.shape
        and tensor.dim() >= dims
    )


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
    spec = spec if spec is not None else PLAIN
    parts = take_apart(batch, spec)
    columns = parts.structure.columns
    if lengths is not None:
        table = np.array(lengths, dtype=np.int64, order="C")
        if table.shape != (parts.num_samples, len(columns)):
            raise BatchError(
                f"lengths has shape {table.shape}; the batch has {parts.num_samples} samples and the jagged fields "
                f"{list(columns)}"
            )
        return assemble(parts, table, copy=spec.copy)
    on_host = []
    for tensor, (first, *_) in parts.lengths:
        if not tensor.is_cpu and not allow_sync:
            raise BatchError(
                f"the lengths of {columns[first]!r} are only on {tensor.device}, and reading them would make the host "
                "wait; give the batch to a BalancedLoader, which reads them ahead of time, submit the host's batch and "
                "redistribute its copy on the device, or flatten it yourself with lengths, or with allow_sync=True to "
                "wait"
            )
        on_host.append(tensor.detach().cpu().numpy())
    return assemble(parts, table_of(parts, on_host), copy=spec.copy)


def table_of(parts: Parts, lengths: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    """(n, num_jagged) lengths of all columns, from those of `Parts.lengths` on the host."""
    table = np.empty((parts.num_samples, len(parts.structure.columns)), dtype=np.int64)
    for (_, columns), values in zip(parts.lengths, lengths, strict=True):
        table[:, columns] = values.reshape(len(columns), parts.num_samples).T
    return table


def assemble(parts: Parts, table: NDArray[np.int64], *, copy: bool) -> FlatBatch:
    """The flattened batch, its (n, num_jagged) lengths known and checked.

    Raises:
        BatchError: If the lengths cannot be right.
    """
    structure, tensors = parts.structure, parts.tensors
    columns = structure.columns
    if table.size and not (table.min() >= 0 and table.max() <= _MAX_LENGTH):
        sample, column = np.argwhere((table < 0) | (table > _MAX_LENGTH))[0]
        raise BatchError(
            f"sample {sample} of {columns[column]!r} has length {table[sample, column]}; it must be 0 to {_MAX_LENGTH}"
        )
    if structure.roles:
        check_items(table, columns, structure.roles)
    for index in structure.padded:
        leaf = structure.leaves[index]
        assert leaf.padding is not None
        (column,) = leaf.columns
        tensors[index] = without_padding(tensors[index], table[:, column], leaf.padding, leaf.path, columns[column])
    totals = table.sum(axis=0)
    values = totals.tolist()
    for leaf, tensor in zip(structure.leaves, tensors, strict=True):
        expected = sum([values[column] for column in leaf.columns])
        if not leaf.rows and tensor.shape[0] != expected:
            raise BatchError(
                f"{leaf.path!r} holds {tensor.shape[0]} values, but its lengths add up to {expected}; "
                + (
                    "drop the values that belong to no sample"
                    if tensor.shape[0] > expected
                    else "values are missing, or the lengths are those of another field: give the lengths of its values"
                )
            )
    if copy:
        tensors = [tensor.clone() for tensor in tensors]
    return FlatBatch(structure=structure, tensors=tensors, num_samples=len(table), totals=totals, lengths=table)


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
    value = lookup(batch, path)
    if is_torchrec(value, "JaggedTensor") or (isinstance(value, torch.Tensor) and value.is_nested):
        if reason := problem(value, path):
            raise BatchError(reason)
        value = jagged_lengths(value)
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "iu":
        return value.astype(np.int64)
    if not isinstance(value, torch.Tensor) or value.dim() != 1 or value.dtype not in (torch.int32, torch.int64):
        raise BatchError(
            f"{path!r} is {_describe(value)}; name a jagged field (of a KeyedJaggedTensor one key), or an int32 or "
            "int64 tensor with one number per sample"
        )
    if value.device.type != "cpu":
        raise BatchError(f"{path!r} is on {value.device}; compute costs from the host's batch, before the copy")
    lengths: NDArray[np.int64] = value.numpy().astype(np.int64)
    return lengths


def _step(value: Any, path: str) -> tuple[Any, str] | None:
    """One part of the path further; keys may hold dots themselves."""
    parts = path.split(".")
    for count in range(1, len(parts) + 1):
        name, rest = ".".join(parts[:count]), ".".join(parts[count:])
        if is_torchrec(value, "KeyedJaggedTensor"):
            if name in value.keys():  # noqa: SIM118 - not a dict
                stride, index = value.stride(), list(value.keys()).index(name)
                return jagged_lengths(value)[index * stride : (index + 1) * stride], rest
        elif isinstance(value, Mapping):
            for key in value.keys():  # noqa: SIM118 - iterating over a TensorDict gives its samples
                if str(key) == name:
                    return value[key], rest
        elif isinstance(value, list | tuple) and name.isdecimal() and int(name) < len(value):
            return value[int(name)], rest
        elif not isinstance(value, torch.Tensor) and name.isidentifier() and hasattr(value, name):
            return getattr(value, name), rest
    return None


def _describe(value: Any) -> str:
    if is_torchrec(value, "KeyedJaggedTensor"):
        return f"a KeyedJaggedTensor of {', '.join(value.keys())}"
    if isinstance(value, Mapping):
        return f"a dict of {', '.join(map(str, value.keys()))}"
    if isinstance(value, torch.Tensor):
        return f"a tensor {value.dtype} of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
