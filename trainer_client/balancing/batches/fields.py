"""The kinds of fields, each a pair of functions: one reads a user's value, the other builds it for another batch.

A field is one value of a user's batch, a leaf one tensor of a flat batch: most fields have one leaf, values without
samples none. Here are rows, objects and values without samples; padded and jagged fields have files of their own.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from trainer_client.balancing.batches.refusals import name_of, tensor_refusal, type_name
from trainer_client.balancing.batches.spec import BatchError, BatchSpec, MaxLength, Padded, declarations_of

if TYPE_CHECKING:
    from trainer_client.balancing.batches.flat import FlatBatch

OBJECTS = "objects"  # `declared_in` of the bytes of Python objects
_COUNTS = (torch.int32, torch.int64)


class Leaf(NamedTuple):
    """One tensor of a flat batch."""

    path: str
    dtype: torch.dtype
    shape: tuple[int, ...]  # of one row
    rows: int  # of each sample if fixed, 0 if jagged
    columns: tuple[int, ...]  # jagged columns whose values lie in it, one after the other; () if rows are fixed
    field_paths: tuple[str, ...]  # of what ranks compare: one per column, or one
    declared_in: str  # parameter of `BatchSpec` that says how it is read; "" if its type alone does
    on_host: bool  # it is in the host's memory wherever the batch is
    padding: Padded | None  # how it is padded outside of a `FlatBatch`

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def jagged_fields(self) -> list[tuple[str, int]]:
        """Path and column of all that lies in it; none if rows are fixed."""
        return list(zip(self.field_paths, self.columns, strict=False))

    @property
    def is_count(self) -> bool:
        """Whether it is an integer for each sample, which may be a length."""
        return self.rows == 1 and not self.shape and self.dtype in _COUNTS


Leaves = Iterator[tuple[Leaf, torch.Tensor]]
"""Those of a flat batch of which no field has been built yet."""
Field = tuple[Any, ...]
"""The function that builds a field, of a flat batch and its `Leaves`, and what else it is called with."""


class Contents:
    """What a walk over a batch has found."""

    def __init__(self) -> None:
        self.fields: list[Field] = []  # in the order of the walk
        self.leaves: list[tuple[Any, ...]] = []  # what makes the `Leaf` of each tensor, with paths of columns
        self.tensors: list[torch.Tensor] = []  # one per leaf; those that are padded with their padding
        self.lengths: list[tuple[torch.Tensor, tuple[str, ...]]] = []  # (columns × n) each, and paths of the columns
        self.named: list[tuple[str, str, str]] = []  # columns that fields name: parameter, path of the field, column
        self.offsets: list[tuple[int, torch.Tensor]] = []  # of nested tensors, by the number of their leaf
        self.reads_lengths = False  # whether building the batch does, on the host
        self.shared: list[Any] = []  # the values that all samples share
        self.derived: dict[int, Derived] = {}  # by the number of their field
        self.values: list[tuple[str, str]] = []  # fields without samples: parameter, "" for None, and path
        self.sizes: list[tuple[str, int]] = []  # who says how many samples there are
        self.batch_sizes: list[tuple[str, int]] = []  # the same of fields that are declared to be their number
        self.lists: list[str] = []  # undeclared ones around the value that is looked at

    def add(
        self,
        tensor: torch.Tensor,
        path: str,
        rows: int,
        columns: tuple[str, ...],
        field_paths: tuple[str, ...],
        declared_in: str = "",
        on_host: bool = False,
        padding: Padded | None = None,
    ) -> None:
        """Adds a tensor, see `Leaf`; refuses one whose rows cannot be moved."""
        size = tuple(tensor.shape)
        is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
        may_move = is_plain and not (tensor.is_meta or tensor.requires_grad or tensor.is_quantized)
        if not (may_move and size) and (reason := tensor_refusal(tensor, path)):
            raise BatchError(reason if size else f"{reason}{self.hint()}")
        shape = size[1:] if padding is None else size[2:]
        self.tensors.append(tensor)
        self.leaves.append((path, tensor.dtype, shape, rows, columns, field_paths, declared_in, on_host, padding))

    def hint(self) -> str:
        """What else to do about a value in a list that is read as a container."""
        return f"; if {self.lists[0]!r} holds one entry for each sample, declare it in objects" if self.lists else ""


# --------------------------------------------------------------------------- rows, of tensors and arrays


def read_rows(
    found: Contents, tensor: torch.Tensor, path: str, rows: int | str, array: np.dtype[Any] | None = None
) -> Field:
    """A tensor, or an array of a dtype, with as many rows for each sample, or as many as the lengths at a path say."""
    if isinstance(rows, str):
        found.add(tensor, path, 0, (rows,), (path,), "rows_per_sample", array is not None)
        found.named.append(("rows_per_sample", path, rows))
    else:
        found.add(tensor, path, rows, (), (path,), "rows_per_sample", array is not None)
        count = tensor.shape[0]
        if count % rows:
            raise BatchError(f"{name_of(path)} has {count} rows, which rows_per_sample = {rows} does not divide")
        found.sizes.append((path, count // rows))
    return build_rows, array


def build_rows(_flat: FlatBatch, leaves: Leaves, array: np.dtype[Any] | None) -> Any:
    """The tensor as it is, or an array of a dtype, in its own byte order."""
    values = next(leaves)[1]
    return values if array is None else values.numpy().astype(array, copy=False)


def read_array(found: Contents, array: NDArray[Any], path: str, declared: Mapping[str, Any]) -> Field | None:
    """An array of numbers as a tensor, another one as Python objects; None if it has no samples."""
    if not array.ndim:
        return None
    is_numeric = array.dtype.kind in "biufc" and array.dtype.itemsize <= (16 if array.dtype.kind == "c" else 8)
    if "objects" in declared or not is_numeric:  # which no tensor can hold
        return read_objects(found, array, path)
    if "padded" in declared:
        raise BatchError(f"{path!r} is in padded, which is for tensors; convert it with torch.from_numpy")
    plain = array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
    if not plain.flags.writeable or any(stride < 0 for stride in plain.strides):  # torch cannot read its memory
        plain = plain.copy()
    return read_rows(found, torch.from_numpy(plain), path, declared.get("rows_per_sample", 1), array.dtype)


# --------------------------------------------------------------------------------------------- objects


def read_objects(found: Contents, values: Sequence[Any] | NDArray[Any], path: str) -> Field:
    """A list, tuple or array with one Python object for each sample: a jagged field of the bytes of their pickles."""
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
    found.add(on_host, path, 0, (path,), (path,), OBJECTS, True)
    found.lengths.append((torch.tensor([len(one) for one in pickles], dtype=torch.int64, device="cpu"), (path,)))
    found.sizes.append((path, len(values)))
    found.reads_lengths = True
    dtype, shape = (values.dtype, values.shape[1:]) if isinstance(values, np.ndarray) else (None, ())
    return build_objects, type(values), dtype, shape


def build_objects(
    flat: FlatBatch, leaves: Leaves, kind: type[Any], dtype: np.dtype[Any] | None, shape: tuple[int, ...]
) -> Any:
    """A list or tuple, or an array of a dtype, with a shape for each sample."""
    leaf, values = next(leaves)
    data, ends = values.numpy().data, accumulate(flat.lengths[:, leaf.columns[0]].tolist(), initial=0)
    objects = [pickle.loads(data[since:until]) for since, until in pairwise(ends)]
    if dtype is None:
        return kind(objects)
    if dtype == np.object_:
        array = np.empty((len(objects), *shape), dtype=object)
        for index, one in enumerate(objects):
            array[index] = one
        return array
    if dtype.kind in "US" and objects:  # strings of other ranks may need a wider one
        widest = np.array(objects, dtype=dtype.kind).dtype
        dtype = dtype if widest.itemsize <= dtype.itemsize else widest.newbyteorder(dtype.byteorder)
    return np.array(objects, dtype=dtype).reshape(len(objects), *shape)


# ----------------------------------------------------------------------------- values without samples


def read_none(found: Contents, path: str) -> Field:
    """None, which need not be declared."""
    found.values.append(("", path))
    return (build_none,)


def build_none(_flat: FlatBatch, _leaves: Leaves, *_: Any) -> None:
    """None, also for values that `FlatBatch.unflatten` derives from the others."""


def read_shared(found: Contents, value: Any, path: str) -> Field:
    """A value that stays as it is, of the batch that it comes from."""
    found.shared.append(value)
    found.values.append(("shared", path))
    return build_shared, len(found.shared) - 1


def build_shared(flat: FlatBatch, _leaves: Leaves, number: int) -> Any:
    """A shared value with its tensors on the batch's device."""
    return _moved(flat.shared[number], flat.device)


def _moved(value: Any, device: torch.device | None) -> Any:
    if type(value) is dict:
        return {key: _moved(item, device) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_moved(item, device) for item in value)
    return value.to(device, non_blocking=True) if device and callable(getattr(value, "to", None)) else value


def read_batch_size(found: Contents, value: Any, path: str) -> Field:
    """An integer that says how many samples there are; on a device, which would have to be waited for, any."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    is_tensor = isinstance(value, torch.Tensor) and value.dim() == 0 and not value.dtype.is_floating_point
    if not (is_number or is_tensor):
        raise BatchError(f"batch_size names {path!r}, which is {type_name(value)}; give an int or a 0-d integer tensor")
    if is_number or value.device.type == "cpu":
        found.batch_sizes.append((path, int(value)))
    found.values.append(("batch_size", path))
    return build_batch_size, value.dtype if is_tensor else None


def build_batch_size(flat: FlatBatch, _leaves: Leaves, dtype: torch.dtype | None) -> Any:
    """The number of samples, as a tensor of a dtype if there is one."""
    return flat.num_samples if dtype is None else torch.full((), flat.num_samples, dtype=dtype, device=flat.device)


def read_derived(found: Contents, path: str, function: Callable[[Any], Any] | MaxLength) -> Field:
    """A value that follows from the batch that is trained: a longest length, or what a function gives."""
    found.values.append(("derived", path))
    if isinstance(function, MaxLength):
        found.reads_lengths = True
        found.named.append(("derived", path, function.path))
        return build_longest, function.path
    found.derived[len(found.fields)] = one = Derived(path, function)
    return build_none, one


def build_longest(flat: FlatBatch, _leaves: Leaves, column: str) -> int:
    """The longest length of a column."""
    return int(flat.lengths[:, flat.structure.order[column]].max(initial=0))


class Derived(NamedTuple):
    """A value that a function gives, of a batch in which such values are None."""

    path: str
    function: Callable[[Any], Any]

    def compute(self, batch: Any, spec: BatchSpec | None) -> Any:
        """The value."""
        function: Any = self.function
        if isinstance(function, _Missing) and spec is not None:
            function = declarations_of(spec).at(self.path).get("derived", function)
        return function(batch)

    def __reduce__(self) -> tuple[Any, ...]:
        """A function that cannot be pickled, such as a lambda, is replaced by what says so."""
        function: Any = self.function
        try:
            pickle.dumps(function)
        except Exception as error:
            function = _Missing(self.path, str(error))
        return Derived, (self.path, function)


class _Missing(NamedTuple):
    path: str
    why: str

    def __call__(self, _batch: Any) -> Any:
        raise BatchError(
            f"the function that gives {self.path!r} did not reach this rank, which has had no batch of its own: "
            f"{self.why}; declare a function of a module, or a MaxLength, in derived"
        )
