"""From a user's batch to a `FlatBatch`, or to one field of it by its path.

Another batch of a kind that was flattened before is flattened without reading the declarations again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trainer_client.balancing.batches import jagged
from trainer_client.balancing.batches.flat import FlatBatch
from trainer_client.balancing.batches.jagged import without_padding
from trainer_client.balancing.batches.nodes import Taken
from trainer_client.balancing.batches.roles import check_items, roles_of
from trainer_client.balancing.batches.shared import describe
from trainer_client.balancing.batches.spec import BatchError, BatchSpec, Declarations
from trainer_client.balancing.batches.structure import FieldSchema, Leaf, Schema, Structure
from trainer_client.balancing.batches.walk import Walk

_MOST_KINDS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How batches of one kind are taken apart.

    Attributes:
        spec: The declarations, kept alive: recipes are found by its identity.
        structure: Containers, leaves and schema.
        lengths: Where the lengths of jagged columns are, and in which columns of the table they belong: those of a
            leaf's values, or of the i-th jagged tensor as -1 - i, one column after the other.
    """

    spec: BatchSpec
    structure: Structure
    lengths: tuple[tuple[int, list[int]], ...]


_recipes: dict[tuple[int, type], Recipe] = {}


def remember(batch: Any, recipe: Recipe) -> None:
    """Keeps the latest recipe for batches of this type under this spec."""
    if len(_recipes) >= _MOST_KINDS:
        _recipes.clear()
    _recipes[id(recipe.spec), type(batch)] = recipe


def recall(batch: Any, spec: BatchSpec) -> tuple[Structure, list[torch.Tensor], NDArray[np.int64]] | None:
    """Structure, tensors and (n, num_jagged) lengths of a batch like one before; None if it is not like it.

    The lengths are not compared with anything yet but the number of samples.
    """
    found = match(batch, spec)
    if found is None or any(tensor.device.type != "cpu" for tensor, _ in found.lengths):
        return None
    table = np.empty((found.num_samples, len(found.structure.columns)), dtype=np.int64)
    for tensor, columns in found.lengths:
        table[:, columns] = tensor.numpy().reshape(len(columns), found.num_samples).T
    return found.structure, found.tensors, table


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A batch that is like one before, taken apart.

    Attributes:
        structure: That of both.
        tensors: One per leaf.
        lengths: Tensors of lengths, (columns × n,) each, and in which columns of the table they belong.
        num_samples: Number of samples n.
    """

    structure: Structure
    tensors: list[torch.Tensor]
    lengths: list[tuple[torch.Tensor, list[int]]]
    num_samples: int


def match(batch: Any, spec: BatchSpec) -> Match | None:
    """A batch like one before, wherever it is; None if it is not like it."""
    recipe = _recipes.get((id(spec), type(batch)))
    taken = Taken()
    if recipe is None or not recipe.structure.root.take(batch, taken):
        return None
    tensors, leaves = taken.tensors, recipe.structure.leaves
    if not all(map(_alike, leaves, tensors)):
        return None
    lengths = [(tensors[at] if at >= 0 else taken.lengths[-1 - at], columns) for at, columns in recipe.lengths]
    rows = [(leaf.rows, tensor.shape[0]) for leaf, tensor in zip(leaves, tensors, strict=True) if leaf.rows]
    num_samples = rows[0][1] // rows[0][0] if rows else lengths[0][0].shape[0] // len(lengths[0][1])
    if any(found != each * num_samples for each, found in rows):
        return None
    if any(said != num_samples for said in taken.sizes) or (taken.has_empty_lists and not num_samples):
        return None
    if any(tensors[index].shape[0] != num_samples for index in recipe.structure.padded):
        return None
    if any(tensor.shape != (len(columns) * num_samples,) for tensor, columns in lengths):
        return None
    return Match(structure=recipe.structure, tensors=tensors, lengths=lengths, num_samples=num_samples)


def _alike(leaf: Leaf, tensor: torch.Tensor) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.dtype is leaf.dtype
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.requires_grad
        and (
            tensor.shape[1:] == leaf.shape and tensor.dim() > 0
            if leaf.padding is None
            else tensor.dim() > 1 and tensor.shape[2:] == leaf.shape
        )
    )


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
    if structure.roles:
        check_items(table, structure.columns, structure.roles)
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
    if walk.has_empty_lists and walk.holds_no_samples:
        walk = Walk(declarations, empty_lists_are_objects=True)
        root = walk.node(batch, "")
    walk.resolve_rows()
    columns = tuple(sorted(walk.columns))
    roles = roles_of(walk.drafts, columns, declarations)
    declarations.check_used()
    num_samples = walk.check_sizes()
    order = {path: index for index, path in enumerate(columns)}
    leaves = tuple(draft.leaf(order) for draft in walk.drafts)
    schema = _schema(leaves, columns, tuple(walk.shared), roles)
    structure = Structure(
        root=root, leaves=leaves, columns=columns, schema=schema, reads_lengths=walk.reads_lengths,
        shared=describe(walk.shared_values), roles=roles,
    )  # fmt: skip
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
def _schema(
    leaves: tuple[Leaf, ...], columns: tuple[str, ...], shared: tuple[str, ...], roles: tuple[int, ...]
) -> Schema:
    """One object per schema, so that its hash is computed once."""
    fields = [FieldSchema(path=path, kind="shared") for path in shared]
    for leaf in leaves:
        dtype = leaf.label or str(leaf.dtype).removeprefix("torch.")
        if leaf.rows:
            fields.append(FieldSchema(path=leaf.path, dtype=dtype, shape=leaf.shape, rows=leaf.rows))
        fields.extend(
            FieldSchema(
                path=path,
                dtype=dtype,
                kind="jagged",
                shape=leaf.shape,
                lengths=columns[column],
                role=roles[column] if roles else None,
            )
            for path, column in zip(leaf.field_paths, leaf.columns, strict=False)
        )
    return Schema(fields=tuple(sorted(fields, key=lambda field: field.path)))


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

    Raises:
        BatchError: If there is no such field, or its lengths are on a device.
    """
    if isinstance(batch, FlatBatch):
        return batch.lengths_of(path)
    value = lookup(batch, path)
    if jagged.is_jagged_tensor(value):
        value = jagged.jagged_lengths(value)
    elif jagged.is_nested(value):
        value = torch.diff(jagged.nested_parts(value, path)[1])
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
    for taken in range(1, len(parts) + 1):
        name, rest = ".".join(parts[:taken]), ".".join(parts[taken:])
        if jagged.is_keyed_jagged_tensor(value):
            if name in value.keys():  # noqa: SIM118 - not a dict
                return _keyed_lengths(value, name), rest
        elif isinstance(value, Mapping):
            for key in value.keys():  # noqa: SIM118 - iterating over a TensorDict gives its samples
                if str(key) == name:
                    return value[key], rest
        elif isinstance(value, list | tuple) and name.isdecimal() and int(name) < len(value):
            return value[int(name)], rest
        elif not isinstance(value, torch.Tensor) and name.isidentifier() and hasattr(value, name):
            return getattr(value, name), rest
    return None


def _keyed_lengths(value: Any, key: str) -> torch.Tensor:
    """Lengths of one key, without splitting the values of all."""
    stride, index = value.stride(), list(value.keys()).index(key)
    return jagged.jagged_lengths(value)[index * stride : (index + 1) * stride]


def _describe(value: Any) -> str:
    if jagged.is_keyed_jagged_tensor(value):
        return f"a KeyedJaggedTensor of {', '.join(value.keys())}"
    if isinstance(value, Mapping):
        return f"a dict of {', '.join(map(str, value.keys()))}"
    if isinstance(value, torch.Tensor):
        return f"a tensor {value.dtype} of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
