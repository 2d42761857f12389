"""How a batch is taken apart: one pass over it, by its declarations; what is ambiguous is refused with a remedy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trainer_client.balancing.batches.containers import (
    Tree,
    container_of,
    is_keyed_jagged_tensor,
    is_list_of_objects,
    is_tensordict,
    is_torchrec,
)
from trainer_client.balancing.batches.fields import (
    Derived,
    Field,
    Jagged,
    Objects,
    Rows,
    Shared,
    Taken,
    can_hold,
    describe,
    is_numeric,
    is_variable,
)
from trainer_client.balancing.batches.flat import PICKLES, FieldSchema, Leaf, Schema, Structure
from trainer_client.balancing.batches.roles import roles_of
from trainer_client.balancing.batches.spec import BatchError, BatchSpec, Declarations, MaxLength, Padded

DERIVED = "in derived, with the function that gives it, if it follows from the samples"


def name_of(path: str) -> str:
    """A path in a message."""
    return repr(path) if path else "the batch"


def type_name(value: object) -> str:
    """A type in a message."""
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


class Plan:
    """What one pass over a batch finds.

    Attributes:
        taken: Its tensors and lengths.
        has_empty_lists: It has lists that hold nothing, which may be those of no samples.
    """

    def __init__(self, spec: BatchSpec, batch: Any, *, empty_lists_are_objects: bool = False) -> None:
        self.taken = Taken()
        self.has_empty_lists = False
        self._empty_lists_are_objects = empty_lists_are_objects
        self._declared = Declarations(spec)
        self._fields: list[Field] = []
        self._leaves: list[Leaf] = []
        self._columns_of: list[tuple[str, ...]] = []  # of each leaf
        self._lengths_of: list[tuple[str, ...]] = []  # columns of each of `taken.lengths`
        self._sizes: list[tuple[str, int]] = []  # samples, by path
        self._batch_sizes: list[tuple[str, int]] = []  # what the batch says that they are
        self._needed: list[tuple[str, str, int | None]] = []  # column, who names it, and the leaf that it cuts
        self._offsets: list[tuple[str, torch.Tensor]] = []  # of nested tensors
        self._reads_lengths = False  # building the batch does, on the host
        self._lists: list[str] = []  # around the value that is looked at, undeclared
        self._tree = self._visit(batch, "")

    @property
    def has_samples(self) -> bool:
        """Whether anything in the batch holds a sample."""
        return any(samples for _, samples in self._sizes)

    def finish(self) -> tuple[Structure, int]:
        """The structure, and the number of samples.

        Raises:
            BatchError: If a declaration matches nothing or something else, or batch sizes disagree.
        """
        jagged = {path for paths in self._lengths_of for path in paths}
        counted = self._resolve(jagged)
        columns = tuple(sorted(jagged | counted.keys()))
        order = {path: index for index, path in enumerate(columns)}
        leaves = tuple(
            replace(leaf, columns=tuple(order[path] for path in paths))
            for leaf, paths in zip(self._leaves, self._columns_of, strict=True)
        )
        roles = roles_of(leaves, columns, self._declared)
        self._declared.check_used()
        num_samples = self._check_sizes()
        sources = [(-1 - i, [order[path] for path in paths]) for i, paths in enumerate(self._lengths_of) if paths]
        structure = Structure(
            tree=self._tree,
            fields=tuple(self._fields),
            leaves=leaves,
            columns=columns,
            schema=_schema(leaves, columns, tuple(path for path, _ in self.taken.shared), roles),
            shared=describe(self.taken.shared),
            roles=roles,
            reads_lengths=self._reads_lengths,
            sources=(*sources, *((leaf, [order[path]]) for path, leaf in counted.items())),
            has_empty_lists=self.has_empty_lists,
        )
        return structure, num_samples

    # ------------------------------------------------------------------------------------------ visiting

    def _visit(self, value: Any, path: str) -> Tree | None:
        field = self._field(value, path)
        if field is not None:
            self._fields.append(field)
            return None
        container = container_of(value)
        if container is None:
            raise BatchError(remedy(value, path) + self._list_hint())
        is_list = isinstance(value, list | tuple) and bool(path)
        if is_list:
            self._lists.append(path)
        values, context = container.flatten(value)
        names = container.names(value)
        children = [self._visit(item, join(path, name)) for name, item in zip(names, values, strict=True)]
        if is_list:
            self._lists.pop()
        return Tree(type(value), context, tuple(children))

    def _field(self, value: Any, path: str) -> Field | None:
        """The field at a path; None for a container."""
        declared = self._declared
        is_shared, derive = declared.find("shared", path), declared.find("derived", path)
        declared.visit(path, is_none=value is None and not is_shared and derive is None)
        if is_shared:
            self.taken.shared.append((path, value))
            return Shared(path, value)
        if derive is not None:
            if isinstance(derive, MaxLength):
                self._reads_lengths = True
                self._needed.append((derive.path, f"derived[{path!r}] is the longest", None))
            return Derived(path, derive)
        if value is None and path:
            return Shared()
        if reason := problem(value, path):
            raise BatchError(reason)
        if declared.find("batch_size", path):
            return self._batch_size(value, path)
        if is_torchrec(value, "JaggedTensor", "KeyedJaggedTensor"):
            return self._jagged(value, path)
        if isinstance(value, torch.Tensor):
            return self._nested(value, path) if value.is_nested else self._rows(value, path)
        if type(value) is np.ndarray and value.ndim:
            if is_numeric(value) and not declared.find("objects", path):
                return self._rows(value, path)
            return self._objects(value, path)
        if isinstance(value, list | tuple) and self._holds_objects(value, path):
            return self._objects(value, path)
        return None

    def _batch_size(self, value: Any, path: str) -> Derived:
        if isinstance(value, int) and not isinstance(value, bool):
            self._batch_sizes.append((path, value))
            return Derived(path)
        if isinstance(value, torch.Tensor) and value.dim() == 0 and not value.dtype.is_floating_point:
            if value.device.type == "cpu":  # a device would have to be waited for
                self._batch_sizes.append((path, int(value)))
            return Derived(path, dtype=value.dtype)
        raise BatchError(f"batch_size names {path!r}, which is {type_name(value)}; give an int or a 0-d integer tensor")

    def _rows(self, value: torch.Tensor | NDArray[Any], path: str) -> Rows:
        dtype = value.dtype if isinstance(value, np.ndarray) else None
        if isinstance(value, torch.Tensor):
            self._check_tensor(value, path)
        leaf = len(self._leaves)
        rows, padding = None, self._declared.find("padded", path)
        if padding is None:
            rows = self._declared.find("rows_per_sample", path)
        else:
            padding = Padded(lengths=padding) if isinstance(padding, str) else padding
            self._check_padding(value, path, padding)
        field = Rows(leaf, dtype, padding, padding.lengths or path if padding is not None else "")
        field.take(value, self.taken)
        fixed = 0 if padding is not None or isinstance(rows, str) else rows or 1
        self._add(path, (path,), rows=fixed, on_host=dtype is not None, padding=padding)
        if padding is not None:
            self._reads_lengths = True
            self._sizes.append((path, value.shape[0]))
            if padding.lengths is None:
                self._lengths_of.append((path,))
                self._columns_of[leaf] = (path,)
            else:
                self._needed.append((padding.lengths, f"padded of {path!r} names", leaf))
        elif isinstance(rows, str):
            self._needed.append((rows, f"rows_per_sample of {path!r} names", leaf))
        else:
            samples, rest = divmod(value.shape[0], fixed)
            if rest:
                raise BatchError(
                    f"{name_of(path)} has {value.shape[0]} rows, which rows_per_sample = {rows} does not divide"
                )
            self._sizes.append((path, samples))
        return field

    def _check_padding(self, value: Any, path: str, padding: Padded) -> None:
        if isinstance(value, np.ndarray):
            raise BatchError(f"{path!r} is in padded, which is for tensors; convert it with torch.from_numpy")
        if value.dim() < 2:
            raise BatchError(f"{path!r} is in padded, but has the shape {tuple(value.shape)}; give (samples, width, …)")
        if not can_hold(value.dtype, padding.value):
            raise BatchError(f"padded[{path!r}] has the value {padding.value}, which {value.dtype} cannot hold")

    def _jagged(self, value: Any, path: str) -> Jagged:
        keys = tuple(value.keys()) if is_torchrec(value, "KeyedJaggedTensor") else None
        columns = (path,) if keys is None else tuple(join(path, key) for key in keys)
        leaf = len(self._leaves)
        weights = None if value.weights_or_none() is None else leaf + 1
        lengths = value.lengths_or_none()
        field = Jagged(columns, leaf, weights, value.offsets().dtype if lengths is None else lengths.dtype, keys)
        field.take(value, self.taken)
        self._add(path, columns, columns)
        if weights is not None:
            self._add(join(path, "weights"), tuple(f"{column}.weights" for column in columns), columns)
        self._add_columns(columns, self.taken.lengths[-1].numel() if keys is None else value.stride())
        return field

    def _nested(self, value: Any, path: str) -> Jagged:
        offsets = value.offsets()
        alike = next((column for column, earlier in self._offsets if earlier is offsets), None)
        self._reads_lengths |= alike is not None
        self._offsets.append((path, offsets))
        self.taken.tensors.append(value.values())
        self.taken.lengths.append(torch.diff(offsets))
        self._add(path, (path,), (path,))
        self._add_columns((path,), offsets.numel() - 1)
        return Jagged((path,), len(self._leaves) - 1, is_nested=True, alike=alike)

    def _objects(self, value: Any, path: str) -> Objects:
        dtype, shape = (value.dtype, value.shape[1:]) if isinstance(value, np.ndarray) else (None, ())
        is_declared = bool(self._declared.find("objects", path))
        self._reads_lengths = True
        field = Objects(path, len(self._leaves), type(value), dtype, shape, is_declared)
        field.take(value, self.taken)
        self._add(path, (path,), (path,), label=PICKLES, on_host=True)
        self._add_columns((path,), len(value))
        return field

    def _holds_objects(self, values: Any, path: str) -> bool:
        """Whether a list holds one object for each sample: by declaration, or by what it holds."""
        if self._declared.find("objects", path):
            return True
        if hasattr(values, "_fields") or self._declared.declares_below(path, len(values)):
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

    # ----------------------------------------------------------------------------- leaves and columns

    def _add(self, path: str, field_paths: tuple[str, ...], columns: tuple[str, ...] = (), **leaf: Any) -> None:
        """Adds the leaf of the next of the tensors that are taken."""
        tensor = self.taken.tensors[len(self._leaves)]
        self._check_tensor(tensor, path)
        shape = tuple(tensor.shape[2 if leaf.get("padding") is not None else 1 :])
        arguments = {"rows": 0, **leaf}
        self._leaves.append(
            Leaf(path=path, dtype=tensor.dtype, shape=shape, columns=(), field_paths=field_paths, **arguments)
        )
        self._columns_of.append(columns)

    def _add_columns(self, columns: tuple[str, ...], samples: int) -> None:
        self._lengths_of.append(columns)
        self._sizes += [(column, samples) for column in columns]

    def _check_tensor(self, tensor: torch.Tensor, path: str) -> None:
        if reason := tensor_problem(tensor, path):
            raise BatchError(reason + (self._list_hint() if tensor.dim() == 0 else ""))

    def _list_hint(self) -> str:
        """What else to do about a value in a list that is read as a container."""
        if not self._lists:
            return ""
        return f"; if {self._lists[0]!r} holds one entry for each sample, declare it in objects"

    # -------------------------------------------------------------------------------------- afterwards

    def _resolve(self, jagged: set[str]) -> dict[str, int]:
        """Gives flattened and padded tensors their columns; of those that integer tensors count, the leaves."""
        counts = {
            leaf.path: index
            for index, leaf in enumerate(self._leaves)
            if leaf.rows == 1 and not leaf.shape and leaf.dtype in (torch.int32, torch.int64)
        }
        pickles = {leaf.path for leaf in self._leaves if leaf.label == PICKLES}  # whose lengths are bytes
        counted = {}
        for column, who, leaf in self._needed:
            if column not in jagged or column in pickles:
                if column not in counts:
                    raise BatchError(
                        f"{who} {column!r}, which is neither a jagged field nor an int32 or int64 tensor with one "
                        f"count per sample: {self._what_is(column, jagged)}"
                    )
                counted[column] = counts[column]
            if leaf is not None:
                self._columns_of[leaf] = (column,)
        return counted

    def _what_is(self, path: str, jagged: set[str]) -> str:
        """What there is at a path that has no lengths, and what to do."""
        index = next((index for index, leaf in enumerate(self._leaves) if leaf.path == path), None)
        if index is None:
            below = sorted(column for column in jagged if column.startswith(f"{path}."))
            if below:
                return f"name one of {', '.join(below[:8])}"
            if any(path == shared for shared, _ in self.taken.shared):
                return "it is declared in shared"
            return "the batch has no field of this path with one entry for each sample"
        leaf, tensor = self._leaves[index], self.taken.tensors[index]
        if leaf.label == PICKLES:
            return "it is a list or array of Python objects; make it a tensor, as with torch.tensor"
        if leaf.rows == 0:
            return "it is flattened by the lengths of another field itself; name those"
        if leaf.rows > 1:
            return f"it has {leaf.rows} rows per sample"
        dtype = str(tensor.dtype).removeprefix("torch.")
        return f"it is of {dtype} and shape {tuple(tensor.shape)}; convert it, as with .flatten() or .to(torch.int64)"

    def _check_sizes(self) -> int:
        """The number of samples."""
        if not self._sizes:
            raise BatchError(
                "the batch has no field with samples: all that it holds is None, shared or derived; at least one "
                "tensor, array or list must have one entry for each sample"
            )
        first_path, first = self._sizes[0]
        for path, samples in self._sizes[1:]:
            if samples != first:
                raise BatchError(
                    f"batch sizes disagree: {name_of(first_path)} holds {first} samples, {name_of(path)} {samples}; "
                    "declare rows_per_sample for a flattened tensor, objects for a list with one entry for each "
                    f"sample, or shared for a value common to all samples{self._offsets_hint()}"
                )
        self._check_paths("jagged fields", [path for paths in self._lengths_of for path in paths])
        self._check_paths("fields", [path for leaf in self._leaves for path in leaf.field_paths])
        for path, size in self._batch_sizes:
            if size != first:
                raise BatchError(
                    f"batch_size names {path!r}, which is {size}, but the batch holds {first} samples; give their "
                    f"number, or declare it in shared if it is the same on all ranks, {DERIVED}"
                )
        return first

    def _check_paths(self, what: str, paths: Sequence[str]) -> None:
        if len(set(paths)) < len(paths):
            path = next(path for index, path in enumerate(paths) if path in paths[:index])
            raise BatchError(f"two {what} have the path {path!r}; rename one")

    def _offsets_hint(self) -> str:
        """What to do about a tensor that says where samples begin, with one number more than there are samples."""
        for index, tensor in enumerate(self.taken.tensors):
            if tensor.dim() == 1 and tensor.numel() > 1 and not tensor.dtype.is_floating_point and not tensor.is_cuda:
                ends = {other.shape[0] for i, other in enumerate(self.taken.tensors) if i != index}
                if not tensor[0] and (tensor.diff() >= 0).all() and int(tensor[-1]) in ends:
                    path = self._leaves[index].path
                    return (
                        f"; {path!r} looks like offsets, which do not move: give the samples' lengths instead, "
                        f"{path}.diff(), and make offsets of those of the batch that is trained"
                    )
        return ""


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
        for path, column in zip(leaf.field_paths, leaf.columns, strict=False):  # fixed rows have no columns
            role = roles[column] if roles else None
            fields.append(
                FieldSchema(path=path, dtype=dtype, kind="jagged", shape=leaf.shape, lengths=columns[column], role=role)
            )
    return Schema(fields=tuple(sorted(fields, key=lambda field: field.path)))


# ------------------------------------------------------- what is said of values that cannot be moved


def problem(value: object, path: str) -> str:
    """Why a value that looks like a field or a container is none, and what to do; "" if it may be one."""
    name, kind = name_of(path), f"{name_of(path)} is a {type_name(value)}"
    if value is None:
        return (
            "the batch is None, which holds no samples; a loader that has no more data ends, and one that has none "
            "for this step gives a batch whose tensors have no rows"
        )
    if is_torchrec(value, "KeyedTensor"):
        return (
            f"{name} is a KeyedTensor, pooled embeddings of which only the model knows how keys follow each other; "
            f"pass the dense tensor {path}.values(), and make the KeyedTensor again in the model"
        )
    if is_tensordict(value) and type(value).__name__ == "LazyStackedTensorDict":
        return (
            f"{name} is a lazy stack of TensorDicts, whose tensors are one for each sample and not stacked; stack "
            f"them: pass {path}.contiguous(), or where their shapes differ {path}.densify(layout=torch.jagged)"
        )
    if isinstance(value, torch.nn.utils.rnn.PackedSequence):
        return f"{kind}, which is sorted by time step; pad it with pad_packed_sequence, or give a JaggedTensor"
    if is_keyed_jagged_tensor(value) and is_variable(value):
        return (
            f"{name} is a KeyedJaggedTensor with a variable batch size per feature; its rows are no samples: balance "
            "before deduplicating, or build it without stride_per_key_per_rank and inverse_indices"
        )
    if isinstance(value, torch.Tensor) and value.is_nested:
        nested: Any = value
        if value.layout is not torch.jagged or nested.lengths() is not None or getattr(nested, "_ragged_idx", 1) != 1:
            return (
                f"{name} is a nested tensor of layout {value.layout}, with holes or another ragged dimension than 1; "
                "use layout=torch.jagged, ragged right after the batch, and .contiguous()"
            )
    return ""


def tensor_problem(tensor: torch.Tensor, path: str) -> str:
    """Why a tensor cannot be moved and what to do; "" if it can."""
    name, kind = name_of(path), type_name(tensor)
    if tensor.layout is not torch.strided:
        return (
            f"{name} is a tensor of layout {tensor.layout}, whose rows have no fixed place; convert it with "
            ".to_dense(), or to a JaggedTensor of its values"
        )
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return f"{name} is a {kind}; only plain tensors can be moved: pass {path}.as_subclass(torch.Tensor)"
    if tensor.is_meta:
        return (
            f"{name} is a meta tensor, which has a shape but no values; make the batch on the host or on a device, for "
            "example within torch.device('cpu')"
        )
    if tensor.is_quantized:
        return (
            f"{name} is quantized, with a scale that other ranks do not have; pass {path}.dequantize() or .int_repr()"
        )
    if tensor.requires_grad:
        return f"{name} requires a gradient, which would end where samples move; pass {path}.detach()"
    if tensor.dim() == 0:
        return (
            f"{name} is a tensor without dimensions, so it holds no samples; declare it {DERIVED} (a longest "
            "length, a sum), in batch_size if it is the number of samples, in shared if it is the same for all samples"
        )
    return ""


def remedy(value: Any, path: str) -> str:
    """What to do about a value that is no part of a batch."""
    kind = f"{name_of(path)} is a {type_name(value)}"
    if isinstance(value, int) and not isinstance(value, bool):
        return (
            f"{kind} ({value}); declare it in batch_size if it is the number of samples, {DERIVED} (a longest "
            "length), in shared if it is the same on all ranks"
        )
    if isinstance(value, bool | float | complex | str | bytes | np.generic):
        return (
            f"{kind} ({value!r}); declare it in shared if it is the same for all samples, {DERIVED}, or drop it from "
            "the batch; one for each sample would be a list"
        )
    if isinstance(value, np.ndarray):
        if not value.ndim:
            return f"{kind} without dimensions, so it holds no samples; declare it {DERIVED}, or in shared"
        return f"{kind}, which is no plain array; convert it with numpy.asarray or torch.as_tensor"
    return (
        f"{kind}; supported are tensors, arrays and jagged tensors in dicts, lists, tuples, dataclasses, attrs and "
        "pydantic classes, TensorDict and classes that hold tensors: convert it, declare it in shared if it is the "
        "same for all samples, or put one for each sample in a list"
    )


def join(path: str, part: object) -> str:
    """The path of a part of what is at `path`."""
    return f"{path}.{part}" if path else str(part)
