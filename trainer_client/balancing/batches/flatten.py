"""From a user's batch to a `FlatBatch`."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trainer_client.balancing.batches.flat import FlatBatch
from trainer_client.balancing.batches.padding import without_padding
from trainer_client.balancing.batches.recall import Match, Recipe, recall, remember
from trainer_client.balancing.batches.spec import BatchError, BatchSpec, Declarations
from trainer_client.balancing.batches.structure import FieldSchema, Leaf, Schema, Structure
from trainer_client.balancing.batches.walk import Walk

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
    classes that hold tensors, `UserDict` and `TensorDict`; of tensors, NumPy arrays, TorchRec's `JaggedTensor` and
    `KeyedJaggedTensor`, nested tensors in jagged layout, lists with one Python object for each sample, and None. The
    first dimension of a tensor is the sample unless `spec` says otherwise. Everything else must be declared.

    Args:
        batch: The batch; its tensors are used as they are, nothing is copied but padded tensors and Python objects. A
            `FlatBatch` stays as it is.
        spec: Declarations per path.
        lengths: (n, num_jagged) lengths of all jagged columns, where the caller has them on the host, for a batch
            whose lengths are on a device.
        allow_sync: Whether to wait for a device whose lengths are not given.

    Raises:
        BatchError: If a value is not understood, batch sizes disagree, or lengths are only on a device.
    """
    if isinstance(batch, FlatBatch):
        return batch
    spec = spec if spec is not None else PLAIN
    recalled = recall(batch, spec) if lengths is None else None
    if recalled is not None:
        return assemble(*recalled, copy=spec.copy)
    found = take_apart(batch, spec)
    columns, table = found.structure.columns, None
    if lengths is not None:
        table = _checked(lengths, found.num_samples, columns)
    else:
        table = np.empty((found.num_samples, len(columns)), dtype=np.int64)
        for tensor, (column,) in found.lengths:
            table[:, column] = host_lengths(tensor, columns[column], allow_sync)
    return assemble(found.structure, found.tensors, table, copy=spec.copy)


def assemble(structure: Structure, tensors: list[torch.Tensor], table: NDArray[np.int64], *, copy: bool) -> FlatBatch:
    """The flattened batch, its lengths known and checked.

    Args:
        structure: What the batch is like.
        tensors: One per leaf, those that are padded with their padding.
        table: (n, num_jagged) lengths.
        copy: Whether to copy the tensors.

    Raises:
        BatchError: If the lengths cannot be right.
    """
    _check_range(table, structure.columns)
    for index in structure.padded:
        leaf = structure.leaves[index]
        assert leaf.padding is not None
        (column,) = leaf.columns
        tensors[index] = without_padding(
            tensors[index], table[:, column], leaf.padding, leaf.path, structure.columns[column]
        )
    totals = table.sum(axis=0)
    values = totals.tolist()
    for leaf, tensor in zip(structure.leaves, tensors, strict=True):
        expected = sum([values[column] for column in leaf.columns])
        if not leaf.rows and tensor.shape[0] != expected:
            raise BatchError(
                f"{leaf.path!r} holds {tensor.shape[0]} values, but its lengths add up to {expected}; "
                "drop the values that belong to no sample"
            )
    if copy:
        tensors = [tensor.clone() for tensor in tensors]
    return FlatBatch(structure=structure, tensors=tensors, num_samples=len(table), totals=totals, lengths=table)


def take_apart(batch: Any, spec: BatchSpec) -> Match:
    """A batch by its declarations, wherever it is; the next one like it is recalled.

    Raises:
        BatchError: If a value is not understood, or batch sizes disagree.
    """
    declarations = Declarations(spec)
    walk = Walk(declarations)
    root = walk.node(batch, "")
    walk.resolve_rows()
    declarations.check_used()
    num_samples = walk.check_sizes()
    columns = tuple(sorted(walk.columns))
    order = {path: index for index, path in enumerate(columns)}
    leaves = tuple(draft.leaf(order) for draft in walk.drafts)
    schema = _schema(leaves, columns, tuple(walk.shared))
    structure = Structure(root=root, leaves=leaves, columns=columns, schema=schema, reads_lengths=walk.reads_lengths)
    if not walk.holds_values:
        remember(batch, Recipe(spec=spec, structure=structure, lengths=walk.sources(order)))
    lengths = [(walk.columns[path], [index]) for index, path in enumerate(columns)]
    return Match(
        structure=structure, tensors=[draft.tensor for draft in walk.drafts], lengths=lengths, num_samples=num_samples
    )


def host_lengths(tensor: torch.Tensor, path: str, allow_sync: bool) -> NDArray[np.int64]:
    """(n,) lengths of a column."""
    if tensor.device.type != "cpu" and not allow_sync:
        raise BatchError(
            f"the lengths of {path!r} are only on {tensor.device}, and reading them would make the host wait; give the "
            "batch to a BalancedLoader, which reads them ahead of time, submit the host's batch and redistribute its "
            "copy on the device, or flatten it yourself with lengths, or with allow_sync=True to wait"
        )
    values: NDArray[np.int64] = tensor.detach().cpu().numpy()
    return values


def _checked(lengths: NDArray[np.int64], num_samples: int, columns: tuple[str, ...]) -> NDArray[np.int64]:
    table = np.array(lengths, dtype=np.int64, order="C")
    if table.shape != (num_samples, len(columns)):
        raise BatchError(
            f"lengths has shape {table.shape}; the batch has {num_samples} samples and "
            f"the jagged fields {list(columns)}"
        )
    return table


def _check_range(table: NDArray[np.int64], columns: tuple[str, ...]) -> None:
    if table.size and not (table.min() >= 0 and table.max() <= _MAX_LENGTH):
        sample, column = np.argwhere((table < 0) | (table > _MAX_LENGTH))[0]
        raise BatchError(
            f"sample {sample} of {columns[column]!r} has length {table[sample, column]}; it must be 0 to {_MAX_LENGTH}"
        )


@lru_cache(maxsize=64)
def _schema(leaves: tuple[Leaf, ...], columns: tuple[str, ...], shared: tuple[str, ...]) -> Schema:
    """One object per schema, so that its hash is computed once."""
    fields = [FieldSchema(path=path, kind="shared") for path in shared]
    for leaf in leaves:
        dtype = leaf.label or str(leaf.dtype).removeprefix("torch.")
        if leaf.rows:
            fields.append(FieldSchema(path=leaf.path, dtype=dtype, shape=leaf.shape, rows=leaf.rows))
        fields.extend(
            FieldSchema(path=path, dtype=dtype, kind="jagged", shape=leaf.shape, lengths=columns[column])
            for path, column in zip(leaf.field_paths, leaf.columns, strict=False)
        )
    return Schema(fields=tuple(sorted(fields, key=lambda field: field.path)))
