"""How a batch is taken apart: one walk over it, by its declarations; what is ambiguous is refused with a remedy."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trainer_client.balancing.batches.containers import (
    Tree,
    container_of,
    is_keyed,
    is_list_of_objects,
    is_torchrec,
)
from trainer_client.balancing.batches.jagged import jagged_lengths, jagged_values
from trainer_client.balancing.batches.kinds import (
    PICKLES,
    Derived,
    Field,
    Jagged,
    Leaf,
    Objects,
    Rows,
    Shared,
    reads_lengths,
)
from trainer_client.balancing.batches.refusals import (
    DERIVED,
    name_of,
    refusal,
    tensor_refusal,
    type_name,
)
from trainer_client.balancing.batches.roles import roles_of, shown_role
from trainer_client.balancing.batches.schema import Schema
from trainer_client.balancing.batches.spec import (
    BatchError,
    BatchSpec,
    Declarations,
    MaxLength,
    Padded,
    declarations_of,
)
from trainer_client.balancing.batches.structure import Structure, as_range, is_count

_MAX_STRUCTURES = 16  # that are remembered of a spec
_MOST_DECLARED = 8  # values of a list that are looked up by a pattern
Declared = dict[str, Any]


class Reading:
    """A batch that is taken apart, wherever it is: what a walk over it has found, and what follows.

    Attributes:
        tensors: One per leaf; those that are padded with their padding.
        shared: The values that all samples share.
        structure: What it has in common with others like it.
        num_samples: On which all fields agree.
    """

    structure: Structure
    num_samples: int

    def __init__(self, declared: Declarations, *, empty_lists_are_objects: bool = False) -> None:
        self._declared, self._empty_lists_are_objects = declared, empty_lists_are_objects
        self.fields: list[Field] = []  # the leaves of the tree
        self.leaves: list[tuple[Any, ...]] = []  # what makes the `Leaf` of each tensor, but with paths for columns
        self.tensors: list[torch.Tensor] = []
        self.lengths: list[tuple[torch.Tensor, tuple[str, ...]]] = []  # (columns × n) each, and paths of its columns
        self.shared: list[Any] = []
        self.sizes: list[tuple[str, int]] = []  # numbers of samples, and who says so
        self.batch_sizes: list[tuple[str, int]] = []  # those that are fields of the batch
        self.paths: list[str] = []  # but those of most tensors
        self.has_empty_lists = False
        self._offsets: list[tuple[str, torch.Tensor]] = []  # of nested tensors
        self._lists: list[str] = []  # around the value that is looked at, undeclared

    @property
    def all_lengths(self) -> list[torch.Tensor]:
        """(columns × n) each, of the columns of `Structure.lengths`."""
        return [tensor for tensor, _ in self.lengths] + [self.tensors[leaf] for leaf in self.structure.counts]

    def visit(self, value: Any, path: str) -> Tree | None:
        """Takes a value apart; its containers, None for a field."""
        declared, rows_at = self._declared.at(path), self._declared.rows_at
        self.paths.append(path)
        is_list = isinstance(value, list | tuple)
        field = self._field(value, path, declared) if declared or type(value) is not dict else None
        if field is None and is_list and ("objects" in declared or self._holds_objects(value, path)):
            field = self._objects(value, path)
        if field is not None:
            self.fields.append(field)
            return None
        container = container_of(value)
        if container is None:
            raise BatchError(refusal(value, path) + self._hint())
        if is_list and path:
            self._lists.append(path)
        values, names, context = container.flatten(value)
        begin = f"{path}." if path else ""
        children: list[Tree | None] = []
        for name, item in zip(names, values, strict=True):
            inner = f"{begin}{name}"
            is_tensor = type(item) is torch.Tensor and not item.is_nested
            if is_tensor and (rows := rows_at(inner)) is not None:  # most: without a detour
                self.fields.append(self._rows(item, inner, rows))
                children.append(None)
            else:
                children.append(self.visit(item, inner))
        if is_list and path:
            self._lists.pop()
        return Tree(type(value), context, tuple(children))

    def _holds_objects(self, values: Any, path: str) -> bool:
        """Whether a list that is not declared holds one object for each sample: by what it holds."""
        if hasattr(values, "_fields") or self._declared.are_below(path, min(len(values), _MOST_DECLARED)):
            return False
        if not values:
            self.has_empty_lists = True
            return self._empty_lists_are_objects
        is_objects = is_list_of_objects(values)
        if is_objects is None:
            raise BatchError(
                f"{name_of(path)} is a {type_name(values)} with lists in it, which may mean two things: declare "
                f"objects={{{path!r}}} if it holds one entry for each sample, objects={{{_join(path, '*')!r}}} if each "
                "of the lists in it does, or shared if it is the same for all samples"
            )
        return is_objects

    def _hint(self) -> str:
        """What else to do about a value in a list that is read as a container."""
        return f"; if {self._lists[0]!r} holds one entry for each sample, declare it in objects" if self._lists else ""

    def _add(
        self,
        tensor: torch.Tensor,
        path: str,
        rows: int,
        columns: tuple[str, ...],
        field_paths: tuple[str, ...],
        label: str = "",
        on_host: bool = False,
        padding: Padded | None = None,
    ) -> int:
        """Adds a tensor, see `Leaf`; the number of its leaf."""
        size = tuple(tensor.shape)
        is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
        may_move = is_plain and not (tensor.is_meta or tensor.requires_grad or tensor.is_quantized)
        if not (may_move and size) and (reason := tensor_refusal(tensor, path)):
            raise BatchError(reason + ("" if size else self._hint()))
        shape = size[1:] if padding is None else size[2:]
        self.tensors.append(tensor)
        self.leaves.append((path, tensor.dtype, shape, rows, columns, field_paths, label, on_host, padding))
        return len(self.leaves) - 1

    # ------------------------------------------------------------------------------ the kinds of fields

    def _field(self, value: Any, path: str, declared: Declared) -> Field | None:
        """The field of a value, by what is declared, or by its type; None: it may be a container."""
        if "shared" in declared:
            self.shared.append(value)
            return Shared(path, len(self.shared) - 1)
        if "derived" in declared:
            return Derived(path, declared["derived"], None)
        if value is None and path:
            return Shared(path, -1)
        if "batch_size" in declared:
            return self._batch_size(value, path)
        kind: Any = type(value)
        read = _reader_of(kind)
        return None if read is None else read(self, value, path, declared)

    def _tensor(self, tensor: torch.Tensor, path: str, declared: Declared) -> Field:
        if tensor.is_nested:
            return self._jagged(tensor, path, declared)
        if "padded" in declared:
            return self._padded(tensor, path, declared["padded"])
        return self._rows(tensor, path, declared.get("rows_per_sample", 1))

    def _array(self, array: NDArray[Any], path: str, declared: Declared) -> Field | None:
        if not array.ndim:
            return None
        is_numeric = array.dtype.kind in "biufc" and array.dtype.itemsize <= (16 if array.dtype.kind == "c" else 8)
        if "objects" in declared or not is_numeric:  # which no tensor can hold
            return self._objects(array, path)
        if "padded" in declared:
            raise BatchError(f"{path!r} is in padded, which is for tensors; convert it with torch.from_numpy")
        plain = array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
        if not plain.flags.writeable or any(stride < 0 for stride in plain.strides):  # torch cannot read its memory
            plain = plain.copy()
        return self._rows(torch.from_numpy(plain), path, declared.get("rows_per_sample", 1), array.dtype)

    def _rows(self, tensor: torch.Tensor, path: str, rows: int | str, dtype: np.dtype[Any] | None = None) -> Rows:
        """A tensor with as many rows for each sample, or as many as the lengths at a path say."""
        if isinstance(rows, str):
            leaf = self._add(tensor, path, 0, (rows,), (path,), "", dtype is not None)
        else:
            leaf = self._add(tensor, path, rows, (), (path,), "", dtype is not None)
            count = tensor.shape[0]
            if count % rows:
                raise BatchError(f"{name_of(path)} has {count} rows, which rows_per_sample = {rows} does not divide")
            self.sizes.append((path, count // rows))
        return _plain_rows(leaf) if dtype is None else Rows(leaf, dtype)

    def _padded(self, tensor: torch.Tensor, path: str, padding: Padded) -> Rows:
        column = padding.lengths or path
        leaf = self._add(tensor, path, 0, (column,), (path,), padding=padding)
        if tensor.dim() < 2:
            raise BatchError(
                f"{path!r} is in padded, but has the shape {tuple(tensor.shape)}; give (samples, width, …)"
            )
        if not _can_hold(tensor.dtype, padding.value):
            raise BatchError(f"padded[{path!r}] has the value {padding.value}, which {tensor.dtype} cannot hold")
        if padding.lengths is None:
            widths = torch.full(tensor.shape[:1], tensor.shape[1], dtype=torch.int64, device="cpu")
            self.lengths.append((widths, (path,)))
        self.sizes.append((path, tensor.shape[0]))
        return Rows(leaf, None, padding, column)

    def _jagged(self, value: Any, path: str, _declared: Declared) -> Jagged:
        lengths, (values, weights) = jagged_lengths(value, path), jagged_values(value, path)
        is_nested, alike = isinstance(value, torch.Tensor), None
        if is_nested:
            offsets = value.offsets()
            alike = next((column for column, earlier in self._offsets if earlier is offsets), None)
            self._offsets.append((path, offsets))
        keys = tuple(value.keys()) if is_keyed(value) else None
        columns, weight_paths = _jagged_paths(path, keys)
        leaf, weight_leaf = self._add(values, path, 0, columns, columns), None
        if weights is not None:
            weight_leaf = self._add(weights, _join(path, "weights"), 0, columns, weight_paths)
        if columns:
            self.lengths.append((lengths, columns))
            self.sizes.append((columns[0], lengths.numel() if keys is None else lengths.shape[1]))
        return Jagged(columns, leaf, weight_leaf, lengths.dtype, keys, is_nested, alike)

    def _objects(self, values: Sequence[Any] | NDArray[Any], path: str) -> Objects:
        """A list or array with one object for each sample, which can be pickled."""
        pickles = []
        for sample, value in enumerate(values):
            try:
                pickles.append(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))
            except Exception as error:
                raise BatchError(
                    f"sample {sample} of {path!r} is a {type(value).__qualname__} that cannot be sent to another rank "
                    f"({error}); drop it from the batch, or replace it by what can be pickled"
                ) from error
        data = b"".join(pickles)
        on_host = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)]
        sizes = torch.tensor([len(one) for one in pickles], dtype=torch.int64, device="cpu")
        dtype, shape = (values.dtype, values.shape[1:]) if isinstance(values, np.ndarray) else (None, ())
        leaf = self._add(on_host, path, 0, (path,), (path,), PICKLES, True)
        self.lengths.append((sizes, (path,)))
        self.sizes.append((path, len(values)))
        return Objects(path, leaf, type(values), dtype, shape)

    def _batch_size(self, value: Any, path: str) -> Derived:
        if isinstance(value, int) and not isinstance(value, bool):
            self.batch_sizes.append((path, value))
            return Derived(path, None, None)
        if isinstance(value, torch.Tensor) and value.dim() == 0 and not value.dtype.is_floating_point:
            if value.device.type == "cpu":  # a device would have to be waited for
                self.batch_sizes.append((path, int(value)))
            return Derived(path, None, value.dtype)
        raise BatchError(f"batch_size names {path!r}, which is {type_name(value)}; give an int or a 0-d integer tensor")


@lru_cache(maxsize=1024)
def _reader_of(kind: type) -> Callable[[Reading, Any, str, Declared], Field | None] | None:
    """How all values of a type are read; None: as containers, if at all."""
    if issubclass(kind, torch.Tensor):
        return Reading._tensor
    if kind is np.ndarray:
        return Reading._array
    return Reading._jagged if is_torchrec(kind, "JaggedTensor", "KeyedJaggedTensor") else None


_plain_rows: Callable[[int], Rows] = lru_cache(maxsize=1024)(Rows)


def _can_hold(dtype: torch.dtype, value: float) -> bool:
    if dtype is torch.bool:
        return value in (0, 1)
    if dtype.is_floating_point or dtype.is_complex:
        return True
    return value == value // 1 and torch.iinfo(dtype).min <= value <= torch.iinfo(dtype).max


@lru_cache(maxsize=256)
def _jagged_paths(path: str, keys: tuple[str, ...] | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Paths of the keys of a `KeyedJaggedTensor` or of a `JaggedTensor`, and of their weights."""
    columns = (path,) if keys is None else tuple(_join(path, key) for key in keys)
    return columns, tuple(_join(column, "weights") for column in columns)


def _join(path: str, part: str) -> str:
    """The path of a part of what is at `path`."""
    return f"{path}.{part}" if path else part


def read(batch: Any, spec: BatchSpec) -> Reading:
    """Takes a batch apart, wherever it is; refuses what is not understood, and batch sizes that disagree."""
    declared = declarations_of(spec)
    reading = Reading(declared)
    tree = reading.visit(batch, "")
    if reading.has_empty_lists and not any(samples for _, samples in reading.sizes):
        reading = Reading(declared, empty_lists_are_objects=True)  # those of no samples
        tree = reading.visit(batch, "")
    signature = tree, reading.fields, reading.leaves  # from which the structure follows
    structure = next((structure for known, structure in declared.structures if known == signature), None)
    if structure is None:
        structure = structure_of(reading, tree, declared)
        declared.structures = [(signature, structure), *declared.structures[: _MAX_STRUCTURES - 1]]
    reading.structure, reading.num_samples = structure, _num_samples(reading)
    return reading


def _num_samples(reading: Reading) -> int:
    """The number of samples, on which all must agree."""
    if not reading.sizes:
        raise BatchError(
            "the batch has no field with samples: all that it holds is None, shared or derived; at least one "
            "tensor, array or list must have one entry for each sample"
        )
    first_path, first = reading.sizes[0]
    for path, samples in reading.sizes:
        if samples != first:
            raise BatchError(
                f"batch sizes disagree: {name_of(first_path)} holds {first} samples, {name_of(path)} {samples}; "
                "declare rows_per_sample for a flattened tensor, objects for a list with one entry for each "
                f"sample, or shared for a value common to all samples{_offsets_hint(reading)}"
            )
    for path, size in reading.batch_sizes:
        if size != first:
            raise BatchError(
                f"batch_size names {path!r}, which is {size}, but the batch holds {first} samples; give their "
                f"number, or declare it in shared if it is the same on all ranks, {DERIVED}"
            )
    return first


def _offsets_hint(reading: Reading) -> str:
    """What to do about a tensor that says where samples begin, with one number more than there are samples."""
    for (path, *_), tensor in zip(reading.leaves, reading.tensors, strict=True):
        if tensor.dim() == 1 and tensor.numel() > 1 and not tensor.dtype.is_floating_point and not tensor.is_cuda:
            ends = {other.shape[0] for other in reading.tensors if other is not tensor}
            if not tensor[0] and (tensor.diff() >= 0).all() and int(tensor[-1]) in ends:
                return (
                    f"; {path!r} looks like offsets, which do not move: give the samples' lengths instead, "
                    f"{path}.diff(), and make offsets of those of the batch that is trained"
                )
    return ""


def structure_of(reading: Reading, tree: Tree | None, declared: Declarations) -> Structure:
    """The structure of a batch whose fields are in a tree of containers; refuses declarations that do not fit it."""
    fields = reading.fields
    by_path: list[Any] = [Leaf(*one) for one in reading.leaves]  # whose columns are paths yet
    jagged = [path for _, columns in reading.lengths for path in columns]
    columns = tuple(sorted({*jagged, *_counted(reading, by_path, jagged)}))
    order = {path: index for index, path in enumerate(columns)}
    leaves = tuple(leaf._replace(columns=tuple([order[path] for path in leaf.columns])) for leaf in by_path)
    roles = roles_of(leaves, columns, declared)
    absent = [one.path for one in fields if isinstance(one, Shared) and one.number < 0]
    all_paths = sorted({*reading.paths, *(leaf.path for leaf in leaves)})
    declared.check_used(_used(fields, leaves, columns, declared), absent, all_paths)
    for what, paths in ("jagged fields", jagged), ("fields", [path for leaf in leaves for path in leaf.field_paths]):
        if len(set(paths)) < len(paths):
            twice = next(path for index, path in enumerate(paths) if path in paths[:index])
            raise BatchError(f"two {what} have the path {twice!r}; rename one")
    counts = {index: order[leaf.path] for index, leaf in enumerate(leaves) if leaf.rows and leaf.path in order}
    numbers = [[order[path] for path in paths] for _, paths in reading.lengths]
    return Structure(
        tree=tree,
        fields=tuple(fields),
        leaves=leaves,
        columns=columns,
        lengths=tuple(map(as_range, [*numbers, *([column] for column in counts.values())])),
        schema=_schema(fields, leaves, columns, roles),
        roles=roles,
        order=order,
        counts=counts,
        jagged=tuple(index for index, leaf in enumerate(leaves) if not leaf.rows),
        on_host=frozenset(index for index, leaf in enumerate(leaves) if leaf.on_host),
        reads_lengths=any(map(reads_lengths, fields)),
        derived={i: one for i, one in enumerate(fields) if isinstance(one, Derived) and one.needs_batch},
    )


def _counted(reading: Reading, leaves: Sequence[Any], jagged: Sequence[str]) -> set[str]:
    """Columns that are named and are no jagged field's, but integer tensors with the lengths."""
    lengths = set(jagged) - {leaf.path for leaf in leaves if leaf.label == PICKLES}  # whose lengths are bytes
    counts = {leaf.path for leaf in leaves if is_count(leaf)}
    named = [
        (one.function.path, f"derived[{one.path!r}] is the longest")
        for one in reading.fields
        if isinstance(one, Derived) and isinstance(one.function, MaxLength)
    ]
    for leaf in [leaves[one.leaf] for one in reading.fields if isinstance(one, Rows)]:
        if leaf.columns and (leaf.padding is None or leaf.padding.lengths is not None):
            what = "rows_per_sample" if leaf.padding is None else "padded"
            named.append((leaf.columns[0], f"{what} of {leaf.path!r} names"))
    for column, who in named:
        if column not in lengths | counts:
            raise BatchError(
                f"{who} {column!r}, which is neither a jagged field nor an int32 or int64 tensor with one "
                f"count per sample: {_what_is(column, reading, leaves, lengths)}"
            )
    return {column for column, _ in named} - lengths


def _what_is(path: str, reading: Reading, leaves: Sequence[Leaf], jagged: set[str]) -> str:
    """What there is at a path that has no lengths, and what to do."""
    index = next((index for index, leaf in enumerate(leaves) if leaf.path == path), None)
    if index is None:
        below = sorted(column for column in jagged if column.startswith(f"{path}."))
        if below:
            return f"name one of {', '.join(below[:8])}"
        if any(isinstance(one, Shared) and one.path == path and one.number >= 0 for one in reading.fields):
            return "it is declared in shared"
        return "the batch has no field of this path with one entry for each sample"
    leaf, tensor = leaves[index], reading.tensors[index]
    if leaf.label == PICKLES:
        return "it is a list or array of Python objects; make it a tensor, as with torch.tensor"
    if leaf.rows == 0:
        return "it is flattened by the lengths of another field itself; name those"
    if leaf.rows > 1:
        return f"it has {leaf.rows} rows per sample"
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"it is of {dtype} and shape {tuple(tensor.shape)}; convert it, as with .flatten() or .to(torch.int64)"


def _used(
    fields: Sequence[Field], leaves: Sequence[Leaf], columns: Sequence[str], declared: Declarations
) -> set[tuple[str, str]]:
    """Parameters of the spec and paths that they say something about."""
    used: set[tuple[str, str]] = set()
    for one in fields:
        if isinstance(one, Rows):
            used.add(("rows_per_sample" if one.padding is None else "padded", leaves[one.leaf].path))
        elif isinstance(one, Objects):
            used.add(("objects", one.path))
        elif isinstance(one, Derived):
            used.add(("batch_size" if one.function is None else "derived", one.path))
        elif isinstance(one, Shared) and one.number >= 0:
            used.add(("shared", one.path))
    if declared.spec.sequence:
        jagged = {*columns, *(path for leaf in leaves if leaf.columns for path in leaf.field_paths)}
        used.update((name, path) for name in ("sequence", "parts") for path in jagged)
    return used


def _schema(fields: Sequence[Field], leaves: Sequence[Leaf], columns: Sequence[str], roles: Sequence[int]) -> Schema:
    shown = [(one.path, f"{one.path}: shared") for one in fields if isinstance(one, Shared) and one.number >= 0]
    for leaf in leaves:
        kind = f"{leaf.label or str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
        if leaf.rows:
            shown.append((leaf.path, f"{leaf.path}: {kind}, {leaf.rows} rows per sample"))
        for path, column in leaf.jagged_fields:
            parts = shown_role(roles[column]) if roles else ""
            shown.append((path, f"{path}: {kind}, jagged by {columns[column]}{parts}"))
    return Schema(lines=tuple(text for _, text in sorted(shown)))
