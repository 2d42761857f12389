"""How a batch is taken apart: one walk over it, by its declarations; what is ambiguous is refused with a remedy.

A walk notes fields and tensors. What follows from them alone is found once for all batches that have the same ones.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from evenkeel.partitioning.splits import ALL, FIRST, LAST
from trainer_client.balancing.batches.containers import Tree, container_of, is_list_of_objects, is_torchrec
from trainer_client.balancing.batches.flat import (
    PICKLES,
    Derived,
    Field,
    Jagged,
    Leaf,
    Objects,
    Rows,
    Shared,
    Structure,
)
from trainer_client.balancing.batches.refusals import (
    DERIVED,
    jagged_refusal,
    name_of,
    refusal,
    tensor_refusal,
    type_name,
)
from trainer_client.balancing.batches.roles import roles_of
from trainer_client.balancing.batches.schema import Schema
from trainer_client.balancing.batches.spec import BatchError, BatchSpec, Declarations, MaxLength, Padded

_MAX_STRUCTURES = 16  # that are remembered of a spec
_MOST_DECLARED = 8  # values of a list that are looked up by a pattern
_PARTS = {LAST: "the last part", FIRST: "the first part", ALL: "all parts"}


class Parts(NamedTuple):
    """A batch that is taken apart, wherever it is."""

    structure: Structure
    tensors: list[torch.Tensor]  # one per leaf, those that are padded with their padding
    lengths: list[tuple[torch.Tensor, list[int]]]  # (columns × n,) each, and their columns
    shared: list[Any]
    num_samples: int


class Reader:
    """Reads the batches of one spec."""

    def __init__(self, spec: BatchSpec) -> None:
        self._declared = Declarations(spec)
        self._seen: list[tuple[Any, Structure]] = []  # by all that it follows from

    def read(self, batch: Any) -> Parts:
        """Takes a batch apart.

        Raises:
            BatchError: If a value is not understood, a declaration matches nothing or something else, or batch sizes
                disagree.
        """
        walk = _Walk(self._declared, batch)
        if walk.has_empty_lists and not any(samples for _, samples in walk.sizes):
            walk = _Walk(self._declared, batch, empty_lists_are_objects=True)
        structure = self._structure(walk)
        order, tensors = structure.order, walk.tensors
        lengths = [(tensor, [order[path] for path in paths]) for tensor, paths in walk.lengths if paths]
        lengths += [(tensors[leaf], [column]) for leaf, column in structure.counts.items()]
        return Parts(structure, tensors, lengths, walk.shared, walk.num_samples())

    def _structure(self, walk: _Walk) -> Structure:
        signature = walk.tree, walk.fields, walk.leaves
        for seen, structure in self._seen:
            if seen == signature:
                return structure
        structure = walk.structure()
        self._seen = [(signature, structure), *self._seen[: _MAX_STRUCTURES - 1]]
        return structure


@lru_cache(maxsize=64)
def reader_of(spec: BatchSpec) -> Reader:
    """The reader of a spec, which is the same as long as the spec is."""
    return Reader(spec)


class _Walk:
    """What one pass over a batch finds."""

    def __init__(self, declared: Declarations, batch: Any, *, empty_lists_are_objects: bool = False) -> None:
        self.fields: list[Field] = []  # the leaves of the tree
        self.leaves: list[tuple[Any, ...]] = []  # what makes the `Leaf` of each tensor, but with paths for columns
        self.tensors: list[torch.Tensor] = []
        self.lengths: list[tuple[torch.Tensor, tuple[str, ...]]] = []  # and the paths of their columns
        self.shared: list[Any] = []
        self.sizes: list[tuple[str, int]] = []  # numbers of samples, and who says so
        self.has_empty_lists = False  # which may be those of no samples
        self._declared = declared
        self._empty_lists_are_objects = empty_lists_are_objects
        self._paths: list[str] = []  # but those of most tensors
        self._batch_sizes: list[tuple[str, int]] = []  # numbers of samples that are fields of the batch
        self._offsets: list[tuple[str, torch.Tensor]] = []  # of nested tensors
        self._lists: list[str] = []  # around the value that is looked at, undeclared
        self.tree = self._visit(batch, "")

    def _visit(self, value: Any, path: str) -> Tree | None:
        self._paths.append(path)
        field = self._field(value, path, self._declared.at(path))
        if field is not None:
            self.fields.append(field)
            return None
        container = container_of(value)
        if container is None:
            raise BatchError(refusal(value, path) + self._list_hint())
        is_list = isinstance(value, list | tuple) and bool(path)
        if is_list:
            self._lists.append(path)
        values, names, context = container.flatten(value)
        begin = f"{path}." if path else ""
        children: list[Tree | None] = []
        for name, item in zip(names, values, strict=True):
            inner = f"{begin}{name}"
            rows = self._declared.rows_at(inner)
            if rows is not None and type(item) is torch.Tensor and not item.is_nested:  # most: without a detour
                self.fields.append(self._rows(item, inner, None, rows))
                children.append(None)
            else:
                children.append(self._visit(item, inner))
        if is_list:
            self._lists.pop()
        return Tree(type(value), context, tuple(children))

    def _field(self, value: Any, path: str, declared: Mapping[str, Any]) -> Field | None:
        """The field at a path; None for a container."""
        if type(value) is dict and not declared:
            return None
        if "shared" in declared:
            self.shared.append(value)
            return Shared(path, len(self.shared) - 1)
        if "derived" in declared:
            return Derived(path, declared["derived"], None)
        if value is None and path:
            return Shared(path, -1)
        if "batch_size" in declared:
            return self._batch_size(value, path)
        if isinstance(value, torch.Tensor) and value.is_nested:
            return self._nested(value, path)
        is_array = type(value) is np.ndarray and value.ndim > 0
        if is_array and ("objects" in declared or not _is_numeric(value)):
            return self._objects(value, path)
        if is_array or isinstance(value, torch.Tensor):
            tensor, dtype = (_as_tensor(value), value.dtype) if is_array else (value, None)
            if "padded" in declared:
                return self._padded(tensor, path, declared["padded"], is_array=is_array)
            return self._rows(tensor, path, dtype, declared.get("rows_per_sample", 1))
        if is_torchrec(value, "JaggedTensor", "KeyedJaggedTensor"):
            return self._jagged(value, path)
        if isinstance(value, list | tuple) and ("objects" in declared or self._holds_objects(value, path)):
            return self._objects(value, path)
        return None

    def _batch_size(self, value: Any, path: str) -> Derived:
        if isinstance(value, int) and not isinstance(value, bool):
            self._batch_sizes.append((path, value))
            return Derived(path, None, None)
        if isinstance(value, torch.Tensor) and value.dim() == 0 and not value.dtype.is_floating_point:
            if value.device.type == "cpu":  # a device would have to be waited for
                self._batch_sizes.append((path, int(value)))
            return Derived(path, None, value.dtype)
        raise BatchError(f"batch_size names {path!r}, which is {type_name(value)}; give an int or a 0-d integer tensor")

    def _rows(self, tensor: torch.Tensor, path: str, dtype: np.dtype[Any] | None, rows: int | str) -> Rows:
        if isinstance(rows, str):
            self._add(tensor, path, 0, (rows,), (path,), "", dtype is not None)
        else:
            samples = count = self._add(tensor, path, rows, (), (path,), "", dtype is not None)
            if rows != 1:
                samples, rest = divmod(count, rows)
                if rest:
                    raise BatchError(
                        f"{name_of(path)} has {count} rows, which rows_per_sample = {rows} does not divide"
                    )
            self.sizes.append((path, samples))
        leaf = len(self.leaves) - 1
        return _plain_rows(leaf) if dtype is None else Rows(leaf, dtype, None, "")

    def _padded(self, tensor: torch.Tensor, path: str, padding: Padded, *, is_array: bool) -> Rows:
        if is_array:
            raise BatchError(f"{path!r} is in padded, which is for tensors; convert it with torch.from_numpy")
        column = padding.lengths or path
        self._add(tensor, path, 0, (column,), (path,), "", False, padding)
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
        return Rows(len(self.leaves) - 1, None, padding, column)

    def _jagged(self, value: Any, path: str) -> Jagged:
        if reason := jagged_refusal(value, path):
            raise BatchError(reason)
        keys = tuple(value.keys()) if is_torchrec(value, "KeyedJaggedTensor") else None
        columns, weight_paths = ((path,), (join(path, "weights"),)) if keys is None else _columns(path, keys)
        lengths, weights = jagged_lengths(value), value.weights_or_none()
        leaf = len(self.leaves)
        self._add(value.values(), path, 0, columns, columns)
        if weights is not None:
            self._add(weights, join(path, "weights"), 0, columns, weight_paths)
        self.lengths.append((lengths, columns))
        if columns:
            self.sizes.append((columns[0], lengths.numel() if keys is None else value.stride()))
        return Jagged(columns, leaf, None if weights is None else leaf + 1, lengths.dtype, keys)

    def _nested(self, value: Any, path: str) -> Jagged:
        if reason := jagged_refusal(value, path):
            raise BatchError(reason)
        offsets = value.offsets()
        alike = next((column for column, earlier in self._offsets if earlier is offsets), None)
        self._offsets.append((path, offsets))
        self._add(value.values(), path, 0, (path,), (path,))
        self.lengths.append((torch.diff(offsets), (path,)))
        self.sizes.append((path, offsets.numel() - 1))
        return Jagged((path,), len(self.leaves) - 1, None, torch.int64, is_nested=True, alike=alike)

    def _objects(self, value: Any, path: str) -> Objects:
        dtype, shape = (value.dtype, value.shape[1:]) if isinstance(value, np.ndarray) else (None, ())
        data, sizes = _pickled(value, path)
        self._add(data, path, 0, (path,), (path,), PICKLES, True)
        self.lengths.append((sizes, (path,)))
        self.sizes.append((path, len(value)))
        return Objects(path, len(self.leaves) - 1, type(value), dtype, shape)

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
                f"objects={{{path!r}}} if it holds one entry for each sample, objects={{{join(path, '*')!r}}} if each "
                "of the lists in it does, or shared if it is the same for all samples"
            )
        return is_objects

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
        """Adds a tensor, see `Leaf`; returns its number of rows."""
        size = tuple(tensor.shape)
        is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
        may_move = is_plain and not (tensor.is_meta or tensor.requires_grad or tensor.is_quantized)
        if not (may_move and size) and (reason := tensor_refusal(tensor, path)):
            raise BatchError(reason + ("" if size else self._list_hint()))
        shape = size[1:] if padding is None else size[2:]
        self.tensors.append(tensor)
        self.leaves.append((path, tensor.dtype, shape, rows, columns, field_paths, label, on_host, padding))
        return size[0]

    def _list_hint(self) -> str:
        """What else to do about a value in a list that is read as a container."""
        if not self._lists:
            return ""
        return f"; if {self._lists[0]!r} holds one entry for each sample, declare it in objects"

    # -------------------------------------------------------------- what follows from fields and leaves

    def structure(self) -> Structure:
        """The structure, after a look at all declarations."""
        by_path: list[Any] = [Leaf(*one) for one in self.leaves]
        columns = tuple(sorted({path for _, paths in self.lengths for path in paths} | self._counted(by_path)))
        order = {path: index for index, path in enumerate(columns)}
        leaves = [leaf._replace(columns=tuple([order[path] for path in leaf.columns])) for leaf in by_path]
        roles = roles_of(leaves, columns, self._declared)
        paths = sorted({*self._paths, *(leaf.path for leaf in leaves)})
        absent = [one.path for one in self.fields if isinstance(one, Shared) and one.number < 0]
        self._declared.check_used(self._used(leaves, columns), absent, paths)
        self._check_paths("jagged fields", [path for _, paths in self.lengths for path in paths])
        self._check_paths("fields", [path for leaf in leaves for path in leaf.field_paths])
        shared = [one.path for one in self.fields if isinstance(one, Shared) and one.number >= 0]
        return Structure(
            tree=self.tree,
            fields=tuple(self.fields),
            leaves=tuple(leaves),
            columns=columns,
            schema=_schema(leaves, columns, shared, roles),
            roles=roles,
        )

    def _counted(self, leaves: Sequence[Any]) -> set[str]:
        """Columns that are named and are no jagged field's, but integer tensors with the lengths."""
        objects = {leaf.path for leaf in leaves if leaf.label == PICKLES}  # whose lengths are bytes
        jagged = {path for _, paths in self.lengths for path in paths} - objects
        counts = {
            leaf.path
            for leaf in leaves
            if leaf.rows == 1 and not leaf.shape and leaf.dtype in (torch.int32, torch.int64)
        }
        named = [
            (one.function.path, f"derived[{one.path!r}] is the longest")
            for one in self.fields
            if isinstance(one, Derived) and isinstance(one.function, MaxLength)
        ]
        for leaf in [leaves[one.leaf] for one in self.fields if isinstance(one, Rows)]:
            if leaf.columns and (leaf.padding is None or leaf.padding.lengths is not None):
                what = "rows_per_sample" if leaf.padding is None else "padded"
                named.append((leaf.columns[0], f"{what} of {leaf.path!r} names"))
        for column, who in named:
            if column not in jagged | counts:
                raise BatchError(
                    f"{who} {column!r}, which is neither a jagged field nor an int32 or int64 tensor with one "
                    f"count per sample: {self._what_is(column, jagged, leaves)}"
                )
        return {column for column, _ in named} - jagged

    def _what_is(self, path: str, jagged: set[str], leaves: Sequence[Leaf]) -> str:
        """What there is at a path that has no lengths, and what to do."""
        leaf, tensor = next(
            (pair for pair in zip(leaves, self.tensors, strict=True) if pair[0].path == path), (None, None)
        )
        if leaf is None or tensor is None:
            below = sorted(column for column in jagged if column.startswith(f"{path}."))
            if below:
                return f"name one of {', '.join(below[:8])}"
            if any(isinstance(one, Shared) and one.path == path and one.number >= 0 for one in self.fields):
                return "it is declared in shared"
            return "the batch has no field of this path with one entry for each sample"
        if leaf.label == PICKLES:
            return "it is a list or array of Python objects; make it a tensor, as with torch.tensor"
        if leaf.rows == 0:
            return "it is flattened by the lengths of another field itself; name those"
        if leaf.rows > 1:
            return f"it has {leaf.rows} rows per sample"
        dtype = str(tensor.dtype).removeprefix("torch.")
        return f"it is of {dtype} and shape {tuple(tensor.shape)}; convert it, as with .flatten() or .to(torch.int64)"

    def _used(self, leaves: Sequence[Leaf], columns: Sequence[str]) -> set[tuple[str, str]]:
        """Parameters of the spec and paths that they say something about."""
        used: set[tuple[str, str]] = set()
        for one in self.fields:
            if isinstance(one, Rows):
                used.add(("rows_per_sample" if one.padding is None else "padded", leaves[one.leaf].path))
            elif isinstance(one, Objects):
                used.add(("objects", one.path))
            elif isinstance(one, Derived):
                used.add(("batch_size" if one.function is None else "derived", one.path))
            elif isinstance(one, Shared) and one.number >= 0:
                used.add(("shared", one.path))
        if self._declared.spec.sequence:
            jagged = {*columns, *(path for leaf in leaves if leaf.columns for path in leaf.field_paths)}
            used.update((name, path) for name in ("sequence", "parts") for path in jagged)
        return used

    def _check_paths(self, what: str, paths: Sequence[str]) -> None:
        if len(set(paths)) < len(paths):
            path = next(path for index, path in enumerate(paths) if path in paths[:index])
            raise BatchError(f"two {what} have the path {path!r}; rename one")

    def num_samples(self) -> int:
        """The number of samples, on which all must agree."""
        if not self.sizes:
            raise BatchError(
                "the batch has no field with samples: all that it holds is None, shared or derived; at least one "
                "tensor, array or list must have one entry for each sample"
            )
        first_path, first = self.sizes[0]
        for path, samples in self.sizes:
            if samples != first:
                raise BatchError(
                    f"batch sizes disagree: {name_of(first_path)} holds {first} samples, {name_of(path)} {samples}; "
                    "declare rows_per_sample for a flattened tensor, objects for a list with one entry for each "
                    f"sample, or shared for a value common to all samples{self._offsets_hint()}"
                )
        for path, size in self._batch_sizes:
            if size != first:
                raise BatchError(
                    f"batch_size names {path!r}, which is {size}, but the batch holds {first} samples; give their "
                    f"number, or declare it in shared if it is the same on all ranks, {DERIVED}"
                )
        return first

    def _offsets_hint(self) -> str:
        """What to do about a tensor that says where samples begin, with one number more than there are samples."""
        for (path, *_), tensor in zip(self.leaves, self.tensors, strict=True):
            if tensor.dim() == 1 and tensor.numel() > 1 and not tensor.dtype.is_floating_point and not tensor.is_cuda:
                ends = {other.shape[0] for other in self.tensors if other is not tensor}
                if not tensor[0] and (tensor.diff() >= 0).all() and int(tensor[-1]) in ends:
                    return (
                        f"; {path!r} looks like offsets, which do not move: give the samples' lengths instead, "
                        f"{path}.diff(), and make offsets of those of the batch that is trained"
                    )
        return ""


def _schema(leaves: Sequence[Leaf], columns: Sequence[str], shared: Sequence[str], roles: Sequence[int]) -> Schema:
    fields = [(path, f"{path}: shared") for path in shared]
    for leaf in leaves:
        dtype = leaf.label or str(leaf.dtype).removeprefix("torch.")
        if leaf.rows:
            text = f"{leaf.path}: {dtype}{list(leaf.shape)}, {leaf.rows} rows per sample"
            fields.append((leaf.path, text))
        for path, column in zip(leaf.field_paths, leaf.columns, strict=False):  # fixed rows have no columns
            parts = ""
            if roles:
                role = roles[column]
                parts = f", {role} an item of the sequence" if role > 0 else f", with {_PARTS[role]}"
            fields.append((path, f"{path}: {dtype}{list(leaf.shape)}, jagged by {columns[column]}{parts}"))
    return Schema(lines=tuple(text for _, text in sorted(fields)))


@lru_cache(maxsize=1024)
def _plain_rows(leaf: int) -> Rows:
    return Rows(leaf, None, None, "")


@lru_cache(maxsize=256)
def _columns(path: str, keys: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Paths of the keys of a `KeyedJaggedTensor`, and of their weights."""
    columns = tuple(join(path, key) for key in keys)
    return columns, tuple(f"{column}.weights" for column in columns)


def join(path: str, part: object) -> str:
    """The path of a part of what is at `path`."""
    return f"{path}.{part}" if path else str(part)


def jagged_lengths(value: Any) -> torch.Tensor:
    """Lengths of a `JaggedTensor`, `KeyedJaggedTensor` or nested tensor, on its device, without changing its caches."""
    lengths: torch.Tensor | None = None if isinstance(value, torch.Tensor) else value.lengths_or_none()
    return lengths if lengths is not None else torch.diff(value.offsets())


def _can_hold(dtype: torch.dtype, value: float) -> bool:
    if dtype is torch.bool:
        return value in (0, 1)
    if dtype.is_floating_point or dtype.is_complex:
        return True
    return value == value // 1 and torch.iinfo(dtype).min <= value <= torch.iinfo(dtype).max


def _is_numeric(array: NDArray[Any]) -> bool:
    """Whether a tensor can hold its values; others travel as Python objects."""
    return array.dtype.kind in "biufc" and array.dtype.itemsize <= (16 if array.dtype.kind == "c" else 8)


def _as_tensor(array: NDArray[Any]) -> torch.Tensor:
    """The array as a tensor, without a copy where torch can read its memory."""
    plain = array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
    if not plain.flags.writeable or any(stride < 0 for stride in plain.strides):
        plain = plain.copy()
    return torch.from_numpy(plain)


def _pickled(values: Sequence[Any] | NDArray[Any], path: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of all objects, one after the other, and (n,) int64 how many each has.

    Raises:
        BatchError: If an object cannot be pickled.
    """
    pickles = []
    for sample, value in enumerate(values):
        try:
            pickles.append(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))
        except Exception as error:
            raise BatchError(
                f"sample {sample} of {path!r} is a {type(value).__qualname__} that cannot be sent to another rank "
                f"({error}); drop it from the batch, or replace it by what can be pickled"
            ) from error
    sizes = torch.tensor([len(one) for one in pickles], dtype=torch.int64, device="cpu")
    return torch.frombuffer(bytearray(b"".join(pickles)) or bytearray(1), dtype=torch.uint8)[: int(sizes.sum())], sizes
