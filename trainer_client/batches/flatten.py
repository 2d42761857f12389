"""From a user's batch to a `FlatBatch`."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trainer_client.batches import jagged
from trainer_client.batches.flat import FlatBatch, Leaf, Structure
from trainer_client.batches.nodes import (
    BatchSizeNode,
    DataclassNode,
    DictNode,
    Node,
    SequenceNode,
    SharedNode,
    TensorNode,
)
from trainer_client.batches.recall import Recipe, recall, remember
from trainer_client.batches.schema import FieldSchema, Schema
from trainer_client.batches.spec import BatchError, BatchSpec, Declarations

_MAX_LENGTH = 2**31 - 1
_PLAIN = BatchSpec()


def flatten(
    batch: Any,
    spec: BatchSpec | None = None,
    *,
    lengths: NDArray[np.int64] | None = None,
    allow_sync: bool = False,
) -> FlatBatch:
    """Takes a batch apart.

    Supported are any nesting of dicts, lists, tuples, named tuples and dataclasses of tensors, TorchRec's
    `JaggedTensor` and `KeyedJaggedTensor`, nested tensors in jagged layout, and None. The first dimension of a tensor
    is the sample unless `spec` says otherwise. Everything else must be declared.

    Args:
        batch: The batch; its tensors are used as they are, nothing is copied.
        spec: Declarations per path.
        lengths: (n, num_jagged) lengths of all jagged columns, where the caller has them on the host, for a batch
            whose lengths are on a device.
        allow_sync: Whether to wait for a device whose lengths are not given.

    Raises:
        BatchError: If a value is not understood, batch sizes disagree, or lengths are only on a device.
    """
    spec = spec if spec is not None else _PLAIN
    recalled = recall(batch, spec) if lengths is None else None
    structure, tensors, table = recalled or _take_apart(batch, spec, lengths, allow_sync)
    _check_range(table, structure.columns)
    totals = table.sum(axis=0)
    values = totals.tolist()
    for leaf, tensor in zip(structure.leaves, tensors, strict=True):
        expected = sum([values[column] for column in leaf.columns])
        if not leaf.rows and tensor.shape[0] != expected:
            raise BatchError(
                f"{leaf.path!r} holds {tensor.shape[0]} values, but its lengths add up to {expected}; "
                "drop the values that belong to no sample"
            )
    return FlatBatch(structure=structure, tensors=tensors, num_samples=len(table), totals=totals, lengths=table)


def _take_apart(
    batch: Any, spec: BatchSpec, lengths: NDArray[np.int64] | None, allow_sync: bool
) -> tuple[Structure, list[torch.Tensor], NDArray[np.int64]]:
    """Structure, tensors and lengths of a batch, by its declarations; the next one like it is recalled."""
    declarations = Declarations(spec)
    walk = _Walk(declarations)
    root = walk.node(batch, "")
    walk.resolve_rows()
    declarations.check_used()
    num_samples = walk.check_sizes()
    columns = tuple(sorted(walk.columns))
    table = _checked(lengths, num_samples, columns) if lengths is not None else None
    if table is None:
        table = np.empty((num_samples, len(columns)), dtype=np.int64)
        for index, path in enumerate(columns):
            table[:, index] = walk.host_lengths(path, allow_sync)
    order = {path: index for index, path in enumerate(columns)}
    leaves = tuple(draft.leaf(order) for draft in walk.drafts)
    schema = _schema(leaves, columns, tuple(walk.shared))
    structure = Structure(root=root, leaves=leaves, columns=columns, schema=schema)
    if not walk.holds_values:
        remember(batch, Recipe(spec=spec, structure=structure, lengths=walk.sources(order)))
    return structure, [draft.tensor for draft in walk.drafts], table


@dataclasses.dataclass(slots=True, kw_only=True)
class _Draft:
    """A leaf whose columns are still known by path."""

    path: str
    tensor: torch.Tensor
    rows: int
    columns: tuple[str, ...] = ()
    field_paths: tuple[str, ...]

    def leaf(self, order: dict[str, int]) -> Leaf:
        return Leaf(
            path=self.path,
            dtype=self.tensor.dtype,
            shape=tuple(self.tensor.shape[1:]),
            rows=self.rows,
            columns=tuple(order[path] for path in self.columns),
            field_paths=self.field_paths,
        )


class _Walk:
    """One pass over a batch."""

    def __init__(self, declarations: Declarations) -> None:
        self.drafts: list[_Draft] = []
        self.columns: dict[str, torch.Tensor] = {}
        self.jagged: list[tuple[str, ...]] = []  # columns of each jagged tensor
        self.shared: list[str] = []
        self.holds_values = False  # the nodes do: shared ones, of this batch alone
        self._declarations = declarations
        self._sizes: list[tuple[str, int]] = []
        self._rows_from: list[tuple[_Draft, str]] = []

    def node(self, value: Any, path: str) -> Node:
        if self._declarations.is_shared(path):
            self.shared.append(path)
            self.holds_values |= value is not None
            return SharedNode(value)
        if value is None:
            return SharedNode(None)
        if self._declarations.is_batch_size(path):
            return _batch_size(value, path)
        if jagged.is_keyed_jagged_tensor(value):
            return self._keyed(value, path)
        if jagged.is_jagged_tensor(value):
            return self._jagged(value, path)
        if jagged.is_nested(value):
            return self._nested(value, path)
        if isinstance(value, torch.Tensor):
            return self._dense(value, path)
        return self._container(value, path)

    def _container(self, value: Any, path: str) -> Node:
        if isinstance(value, dict):
            items = tuple((key, self.node(item, _join(path, key))) for key, item in value.items())
            factory = value.default_factory if isinstance(value, defaultdict) else None
            return DictNode(type(value), items, factory)
        if isinstance(value, list | tuple):
            names = getattr(value, "_fields", range(len(value)))
            nodes = tuple(self.node(item, _join(path, name)) for name, item in zip(names, value, strict=True))
            return SequenceNode(type(value), nodes)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            present = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
            members = tuple((name, self.node(getattr(value, name), _join(path, name))) for name in present)
            return DataclassNode(type(value), members)
        raise BatchError(_remedy(value, path))

    def _dense(self, tensor: torch.Tensor, path: str) -> Node:
        _check_tensor(tensor, path)
        if tensor.dim() == 0:
            raise BatchError(
                f"{_name(path)} is a tensor without dimensions, so it holds no samples; declare it in shared, in "
                "batch_size if it is the number of samples, or give it a dimension of the batch size"
            )
        rows = self._declarations.rows(path)
        if isinstance(rows, str):
            draft = _Draft(path=path, tensor=tensor, rows=0, field_paths=(path,))
            self._rows_from.append((draft, rows))
        else:
            rows = 1 if rows is None else rows
            draft = _Draft(path=path, tensor=tensor, rows=rows, field_paths=(path,))
            samples, rest = divmod(tensor.shape[0], rows)
            if rest:
                raise BatchError(
                    f"{_name(path)} has {tensor.shape[0]} rows, which rows_per_sample = {rows} does not divide"
                )
            self._sizes.append((path, samples))
        return TensorNode(self._add(draft))

    def _jagged(self, value: Any, path: str) -> Node:
        self._refuse_rows(path)
        lengths = jagged.jagged_lengths(value)
        self.jagged.append((path,))
        self._add_column(path, lengths, lengths.numel())
        values = self._add(_Draft(path=path, tensor=value.values(), rows=0, columns=(path,), field_paths=(path,)))
        weights = self._weights(value, path, (path,))
        return jagged.JaggedNode(path, values, weights, lengths.dtype)

    def _keyed(self, value: Any, path: str) -> Node:
        self._refuse_rows(path)
        jagged.check_keyed(value, path)
        keys, stride = tuple(value.keys()), value.stride()
        columns = tuple(_join(path, key) for key in keys)
        lengths = jagged.jagged_lengths(value)
        self.jagged.append(columns)
        for index, column in enumerate(columns):
            self._add_column(column, lengths[index * stride : (index + 1) * stride], stride)
        values = self._add(_Draft(path=path, tensor=value.values(), rows=0, columns=columns, field_paths=columns))
        weights = self._weights(value, path, columns)
        return jagged.KeyedNode(keys, columns, values, weights, lengths.dtype)

    def _weights(self, value: Any, path: str, columns: tuple[str, ...]) -> int | None:
        weights = value.weights_or_none()
        if weights is None:
            return None
        return self._add(
            _Draft(
                path=_join(path, "weights"),
                tensor=weights,
                rows=0,
                columns=columns,
                field_paths=tuple(f"{column}.weights" for column in columns),
            )
        )

    def _nested(self, value: torch.Tensor, path: str) -> Node:
        self._refuse_rows(path)
        values, offsets = jagged.nested_parts(value, path)
        self.jagged.append((path,))
        self._add_column(path, torch.diff(offsets), offsets.numel() - 1)
        return jagged.NestedNode(
            path, self._add(_Draft(path=path, tensor=values, rows=0, columns=(path,), field_paths=(path,)))
        )

    def _refuse_rows(self, path: str) -> None:
        if self._declarations.rows(path) is not None:
            raise BatchError(f"rows_per_sample names {path!r}, whose lengths are known; declare tensors only")

    def _add(self, draft: _Draft) -> int:
        _check_tensor(draft.tensor, draft.path)
        self.drafts.append(draft)
        return len(self.drafts) - 1

    def _add_column(self, path: str, lengths: torch.Tensor, samples: int) -> None:
        if path in self.columns:
            raise BatchError(f"two jagged fields have the path {path!r}; rename one")
        self.columns[path] = lengths
        self._sizes.append((path, samples))

    def resolve_rows(self) -> None:
        """Gives flattened tensors the column that another field's lengths or counts make."""
        counts = {
            draft.path: draft.tensor
            for draft in self.drafts
            if draft.rows == 1 and draft.tensor.dim() == 1 and draft.tensor.dtype in (torch.int32, torch.int64)
        }
        for draft, source in self._rows_from:
            if source not in self.columns:
                if source not in counts:
                    raise BatchError(
                        f"rows_per_sample of {draft.path!r} names {source!r}, which is neither a jagged field nor an "
                        "int32 or int64 tensor with one count per sample"
                    )
                self.columns[source] = counts[source]
            draft.columns = (source,)

    def sources(self, order: dict[str, int]) -> tuple[tuple[int, list[int]], ...]:
        """Where the lengths are; see `Recipe`."""
        places = {draft.path: index for index, draft in enumerate(self.drafts)}
        own = [(-1 - index, [order[path] for path in paths]) for index, paths in enumerate(self.jagged) if paths]
        known = {path for paths in self.jagged for path in paths}
        return (*own, *((places[path], [order[path]]) for path in order if path not in known))

    def check_sizes(self) -> int:
        """The number of samples.

        Raises:
            BatchError: If fields disagree, there are none, or two have one path.
        """
        if not self._sizes:
            raise BatchError("the batch has no tensor with samples; at least one must not be shared")
        first_path, first = self._sizes[0]
        for path, samples in self._sizes[1:]:
            if samples != first:
                raise BatchError(
                    f"batch sizes disagree: {_name(first_path)} holds {first} samples, {_name(path)} {samples}; "
                    "declare rows_per_sample for a flattened tensor, or shared for a value common to all samples"
                )
        seen: set[str] = set()
        for path in (path for draft in self.drafts for path in draft.field_paths):
            if path in seen:
                raise BatchError(f"two fields have the path {path!r}; rename one")
            seen.add(path)
        return first

    def host_lengths(self, path: str, allow_sync: bool) -> NDArray[np.int64]:
        """(n,) lengths of a column."""
        tensor = self.columns[path]
        if tensor.device.type != "cpu" and not allow_sync:
            raise BatchError(
                f"the lengths of {path!r} are only on {tensor.device}, and reading them would make the host wait; "
                "flatten the host's batch and move it with .to(device), pass lengths, or set allow_sync=True"
            )
        values: NDArray[np.int64] = tensor.detach().cpu().numpy()
        return values


def _batch_size(value: Any, path: str) -> BatchSizeNode:
    if isinstance(value, int) and not isinstance(value, bool):
        return BatchSizeNode(None)
    if isinstance(value, torch.Tensor) and value.dim() == 0 and not value.dtype.is_floating_point:
        return BatchSizeNode(value.dtype)
    raise BatchError(f"batch_size names {path!r}, which is {_type_name(value)}; give an int or a 0-d integer tensor")


def _check_tensor(tensor: torch.Tensor, path: str) -> None:
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    if tensor.layout is not torch.strided or tensor.is_quantized or not plain:
        raise BatchError(
            f"{_name(path)} is a {_type_name(tensor)} of layout {tensor.layout}; only plain strided tensors can "
            "be moved: convert it, or declare it in shared"
        )
    if tensor.requires_grad:
        raise BatchError(f"{_name(path)} requires a gradient, which would end where samples move; pass {path}.detach()")


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
        dtype = str(leaf.dtype).removeprefix("torch.")
        if leaf.rows:
            fields.append(FieldSchema(path=leaf.path, dtype=dtype, shape=leaf.shape, rows=leaf.rows))
        fields.extend(
            FieldSchema(path=path, dtype=dtype, kind="jagged", shape=leaf.shape, lengths=columns[column])
            for path, column in zip(leaf.field_paths, leaf.columns, strict=False)
        )
    return Schema(fields=tuple(sorted(fields, key=lambda field: field.path)))


def _join(path: str, part: object) -> str:
    return f"{path}.{part}" if path else str(part)


def _name(path: str) -> str:
    return repr(path) if path else "the batch"


def _type_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def _remedy(value: object, path: str) -> str:
    found = f"{_name(path)} is a {_type_name(value)}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{found} ({value}); declare it in batch_size if it is the number of samples, else in shared"
    if isinstance(value, bool | float | complex | str | bytes):
        return f"{found} ({value!r}); declare it in shared if it is the same for all samples, or drop it from the batch"
    if isinstance(value, np.ndarray):
        return f"{found}; convert it with torch.from_numpy"
    return (
        f"{found}; supported are dicts, lists, tuples, named tuples and dataclasses of tensors, JaggedTensor, "
        "KeyedJaggedTensor and jagged nested tensors: convert it, or declare it in shared"
    )
