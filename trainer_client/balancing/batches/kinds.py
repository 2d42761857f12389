"""The five kinds of fields: how a value is recognised, read from a user's batch, and built for another one."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from trainer_client.balancing.batches.containers import is_keyed, is_torchrec
from trainer_client.balancing.batches.refusals import jagged_refusal, name_of, tensor_refusal, type_name
from trainer_client.balancing.batches.spec import BatchError, BatchSpec, Declarations, MaxLength, Padded

if TYPE_CHECKING:
    from trainer_client.balancing.batches.flat import FlatBatch
    from trainer_client.balancing.batches.structure import Structure

PICKLES = "objects"  # label of the bytes of Python objects
Declared = Mapping[str, Any]


class Leaf(NamedTuple):
    """One tensor of a batch."""

    path: str
    dtype: torch.dtype
    shape: tuple[int, ...]  # of one row
    rows: int  # of each sample if fixed, 0 if jagged
    columns: tuple[int, ...]  # jagged columns whose values lie in it, one after the other; () if rows are fixed
    field_paths: tuple[str, ...]  # of each of its fields: one per column, or one
    label: str  # what the schema says instead of the dtype; "" for the dtype
    on_host: bool  # it is in the host's memory wherever the batch is
    padding: Padded | None  # how it is padded outside of a `FlatBatch`

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def jagged_fields(self) -> list[tuple[str, int]]:
        """Path and column of each of its fields; none if rows are fixed."""
        return list(zip(self.field_paths, self.columns, strict=False))


class Contents:
    """A batch that is taken apart, wherever it is; first what a walk over it notes, then what follows."""

    structure: Structure
    num_samples: int

    def __init__(self, *, empty_lists_are_objects: bool = False) -> None:
        self.fields: list[Field] = []  # the leaves of the tree
        self.leaves: list[tuple[Any, ...]] = []  # what makes the `Leaf` of each tensor, but with paths for columns
        self.tensors: list[torch.Tensor] = []  # those that are padded with their padding
        self.lengths: list[tuple[torch.Tensor, tuple[str, ...]]] = []  # (columns × n,) each, and paths of its columns
        self.shared: list[Any] = []
        self.sizes: list[tuple[str, int]] = []  # numbers of samples, and who says so
        self.batch_sizes: list[tuple[str, int]] = []  # those that are fields of the batch
        self.offsets: list[tuple[str, torch.Tensor]] = []  # of nested tensors
        self.paths: list[str] = []  # but those of most tensors
        self.lists: list[str] = []  # around the value that is looked at, undeclared
        self.has_empty_lists = False
        self.empty_lists_are_objects = empty_lists_are_objects

    @property
    def all_lengths(self) -> list[torch.Tensor]:
        """(columns × n,) each, of the columns of `Structure.lengths`."""
        return [tensor for tensor, _ in self.lengths] + [self.tensors[leaf] for leaf in self.structure.counts]

    def add(
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
            raise BatchError(reason + ("" if size else self.hint()))
        shape = size[1:] if padding is None else size[2:]
        self.tensors.append(tensor)
        self.leaves.append((path, tensor.dtype, shape, rows, columns, field_paths, label, on_host, padding))
        return size[0]

    def hint(self) -> str:
        """What else to do about a value in a list that is read as a container."""
        return f"; if {self.lists[0]!r} holds one entry for each sample, declare it in objects" if self.lists else ""


def read_field(contents: Contents, value: Any, path: str, declared: Declared) -> Field | None:
    """The field of a value, by what is declared, or by its type; None: it may be a container."""
    if declared:
        if "shared" in declared:
            contents.shared.append(value)
            return Shared(path, len(contents.shared) - 1)
        if "derived" in declared:
            return Derived(path, declared["derived"], None)
        if "batch_size" in declared and not (value is None and path):
            return _read_batch_size(contents, value, path)
    if value is None and path:
        return Shared(path, -1)
    kind: Any = type(value)
    read = _reader_of(kind)
    return None if read is None else read(contents, value, path, declared)


@lru_cache(maxsize=1024)
def _reader_of(kind: type) -> Callable[[Contents, Any, str, Declared], Field | None] | None:
    """How all values of a type are read; None: as containers, if at all."""
    if issubclass(kind, torch.Tensor):
        return _read_tensor
    if kind is np.ndarray:
        return _read_array
    return _read_jagged if is_torchrec(kind, "JaggedTensor", "KeyedJaggedTensor") else None


def _read_tensor(contents: Contents, tensor: torch.Tensor, path: str, declared: Declared) -> Field:
    if tensor.is_nested:
        return _read_nested(contents, tensor, path)
    if "padded" in declared:
        return _read_padded(contents, tensor, path, declared["padded"])
    return read_rows(contents, tensor, path, declared.get("rows_per_sample", 1))


def _read_array(contents: Contents, array: NDArray[Any], path: str, declared: Declared) -> Field | None:
    if not array.ndim:
        return None
    is_numeric = array.dtype.kind in "biufc" and array.dtype.itemsize <= (16 if array.dtype.kind == "c" else 8)
    if "objects" in declared or not is_numeric:  # which no tensor can hold
        return read_objects(contents, array, path)
    if "padded" in declared:
        raise BatchError(f"{path!r} is in padded, which is for tensors; convert it with torch.from_numpy")
    plain = array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
    if not plain.flags.writeable or any(stride < 0 for stride in plain.strides):  # torch cannot read its memory
        plain = plain.copy()
    return read_rows(contents, torch.from_numpy(plain), path, declared.get("rows_per_sample", 1), array.dtype)


# Fields are tuples of different lengths, so that those of two batches are compared without a look at their kinds.


class Rows(NamedTuple):
    """A tensor or array whose rows belong to samples: as many for each, flattened, or padded to the longest sample."""

    leaf: int
    dtype: np.dtype[Any] | None  # of an array
    padding: Padded | None
    column: str  # of its lengths, if it is padded

    def build(self, batch: FlatBatch) -> Any:
        """The field of another batch."""
        values = batch.tensors[self.leaf]
        if self.padding is not None:
            longest = max(batch.host_lengths_at(self.column), default=0)
            return with_padding(values, batch.lengths_at((self.column,), torch.int64), longest, self.padding)
        if self.dtype is None:
            return values
        return values.numpy().astype(self.dtype, copy=False)  # in its own byte order


def read_rows(
    contents: Contents, tensor: torch.Tensor, path: str, rows: int | str, dtype: np.dtype[Any] | None = None
) -> Rows:
    """A tensor with as many rows for each sample, or as many as the lengths at a path say."""
    if isinstance(rows, str):
        contents.add(tensor, path, 0, (rows,), (path,), "", dtype is not None)
    else:
        samples = count = contents.add(tensor, path, rows, (), (path,), "", dtype is not None)
        if rows != 1:
            samples, rest = divmod(count, rows)
            if rest:
                raise BatchError(f"{name_of(path)} has {count} rows, which rows_per_sample = {rows} does not divide")
        contents.sizes.append((path, samples))
    leaf = len(contents.leaves) - 1
    return _plain_rows(leaf) if dtype is None else Rows(leaf, dtype, None, "")


def _read_padded(contents: Contents, tensor: torch.Tensor, path: str, padding: Padded) -> Rows:
    column = padding.lengths or path
    contents.add(tensor, path, 0, (column,), (path,), padding=padding)
    if tensor.dim() < 2:
        raise BatchError(f"{path!r} is in padded, but has the shape {tuple(tensor.shape)}; give (samples, width, …)")
    if not _can_hold(tensor.dtype, padding.value):
        raise BatchError(f"padded[{path!r}] has the value {padding.value}, which {tensor.dtype} cannot hold")
    if padding.lengths is None:
        widths = torch.full(tensor.shape[:1], tensor.shape[1], dtype=torch.int64, device="cpu")
        contents.lengths.append((widths, (path,)))
    contents.sizes.append((path, tensor.shape[0]))
    return Rows(len(contents.leaves) - 1, None, padding, column)


@lru_cache(maxsize=1024)
def _plain_rows(leaf: int) -> Rows:
    return Rows(leaf, None, None, "")


def _can_hold(dtype: torch.dtype, value: float) -> bool:
    if dtype is torch.bool:
        return value in (0, 1)
    if dtype.is_floating_point or dtype.is_complex:
        return True
    return value == value // 1 and torch.iinfo(dtype).min <= value <= torch.iinfo(dtype).max


# Padded tensors travel without their padding, and are padded again to their own longest sample.


def without_padding(
    tensor: torch.Tensor, lengths: NDArray[np.int64], padding: Padded, path: str, column: str
) -> torch.Tensor:
    """(sum of lengths, …) values of a padded tensor (n, width, …), sample after sample.

    On the host, what is cut off must be the same everywhere.
    """
    width = tensor.shape[1]
    if lengths.size and lengths.max() > width:
        sample = int(lengths.argmax())
        raise BatchError(
            f"{path!r} is {width} wide, but sample {sample} has length {lengths[sample]} by {column!r}; name the "
            f"lengths that belong to it in padded[{path!r}]"
        )
    rows = tensor.flatten(0, 1)
    if (lengths == width).all():
        return rows
    place = np.arange(width)
    is_value = place < lengths[:, None] if padding.side == "right" else place >= width - lengths[:, None]
    if tensor.is_cpu:
        _check_cut(tensor, is_value, padding, path, column)
    index = torch.from_numpy(np.flatnonzero(is_value)).to(tensor.device, non_blocking=True)
    return _bytes_if_small(rows).index_select(0, index).view(tensor.dtype)


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def _check_cut(tensor: torch.Tensor, is_value: NDArray[np.bool_], padding: Padded, path: str, column: str) -> None:
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    if not plain.numel():
        return
    bits = plain.view(is_value.size, -1).view(_BITS[plain.itemsize])  # NaN differs from itself, its bits do not
    is_same = (bits == bits[int(is_value.argmin())]).all(dim=1).numpy().reshape(is_value.shape)
    if not (is_same | is_value).all():
        sample, position = np.argwhere(~(is_same | is_value))[0]
        other = "left" if padding.side == "right" else "right"
        raise BatchError(
            f"padded[{path!r}] would cut values off: with the lengths of {column!r} and padding on the "
            f"{padding.side}, sample {sample} has another value at position {position} than the padding elsewhere; "
            f"declare Padded(lengths={column!r}, side={other!r}) if the padding is on the {other}, or name the "
            "lengths that belong to it"
        )


def with_padding(values: torch.Tensor, lengths: torch.Tensor, longest: int, padding: Padded) -> torch.Tensor:
    """(n, width, …) padded tensor of (sum of lengths, …) values, of which samples have (n,) int64 lengths."""
    width = -(-longest // padding.multiple) * padding.multiple
    samples = lengths.shape[0]
    starts = torch.arange(samples, device=values.device) * width - (torch.cumsum(lengths, 0) - lengths)
    if padding.side == "left":
        starts += width - lengths
    # with the size given, a device is not waited for
    rows = torch.repeat_interleave(starts, lengths, output_size=values.shape[0])
    rows += torch.arange(values.shape[0], device=values.device)
    result = values.new_full((samples * width, *values.shape[1:]), padding.value)
    _bytes_if_small(result).index_copy_(0, rows, _bytes_if_small(values))
    return result.view(samples, width, *values.shape[1:])


def _bytes_if_small(tensor: torch.Tensor) -> torch.Tensor:
    """As bytes if its values are single bytes: indexing is not implemented for floating-point numbers of 8 bits."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


class Jagged(NamedTuple):
    """TorchRec's `JaggedTensor` and `KeyedJaggedTensor`, and torch's nested tensors in jagged layout."""

    columns: tuple[str, ...]  # path of each key's lengths, or of the field
    values: int  # the leaf
    weights: int | None  # their leaf
    dtype: torch.dtype  # of the lengths
    keys: tuple[str, ...] | None = None
    is_nested: bool = False
    alike: str | None = None  # an earlier nested tensor with the same offsets, which torch wants to compute with both

    def build(self, batch: FlatBatch) -> Any:
        """The field of another batch."""
        values = batch.tensors[self.values]
        if self.is_nested:
            return torch.nested.nested_tensor_from_jagged(values, offsets=batch.offsets_at(self.columns[0], self.alike))
        from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

        weights = None if self.weights is None else batch.tensors[self.weights]
        lengths = batch.lengths_at(self.columns, self.dtype)
        if self.keys is None:
            return JaggedTensor(values, weights=weights, lengths=lengths)
        totals = [int(batch.totals[batch.structure.order[path]]) for path in self.columns]
        empty = None
        if not batch.num_samples:  # for which TorchRec 1.8's `to_dict` raises an IndexError
            begin = lengths.new_zeros(1)
            empty = {key: JaggedTensor(values, weights=weights, lengths=lengths, offsets=begin) for key in self.keys}
        return KeyedJaggedTensor(
            list(self.keys),
            values,
            weights=weights,
            lengths=lengths,
            stride=batch.num_samples,
            length_per_key=totals,  # else TorchRec would ask the device for them
            offset_per_key=list(accumulate(totals, initial=0)),
            jt_dict=empty,
        )


def _read_jagged(contents: Contents, value: Any, path: str, _declared: Declared) -> Jagged:
    if reason := jagged_refusal(value, path):
        raise BatchError(reason)
    keys = tuple(value.keys()) if is_keyed(value) else None
    columns, weight_paths = _jagged_paths(path, keys)
    lengths, weights = jagged_lengths(value), value.weights_or_none()
    leaf = len(contents.leaves)
    contents.add(value.values(), path, 0, columns, columns)
    if weights is not None:
        contents.add(weights, join(path, "weights"), 0, columns, weight_paths)
    if columns:
        contents.lengths.append((lengths, columns))
        contents.sizes.append((columns[0], lengths.numel() if keys is None else value.stride()))
    return Jagged(columns, leaf, None if weights is None else leaf + 1, lengths.dtype, keys)


def _read_nested(contents: Contents, value: Any, path: str) -> Jagged:
    if reason := jagged_refusal(value, path):
        raise BatchError(reason)
    offsets = value.offsets()
    alike = next((column for column, earlier in contents.offsets if earlier is offsets), None)
    contents.offsets.append((path, offsets))
    contents.add(value.values(), path, 0, (path,), (path,))
    contents.lengths.append((torch.diff(offsets), (path,)))
    contents.sizes.append((path, offsets.numel() - 1))
    return Jagged((path,), len(contents.leaves) - 1, None, torch.int64, is_nested=True, alike=alike)


@lru_cache(maxsize=256)
def _jagged_paths(path: str, keys: tuple[str, ...] | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Paths of the keys of a `KeyedJaggedTensor` or of a `JaggedTensor`, and of their weights."""
    columns = (path,) if keys is None else tuple(join(path, key) for key in keys)
    return columns, tuple(join(column, "weights") for column in columns)


def jagged_lengths(value: Any) -> torch.Tensor:
    """Lengths of a `JaggedTensor`, `KeyedJaggedTensor` or nested tensor, on its device, without changing its caches."""
    lengths: torch.Tensor | None = None if isinstance(value, torch.Tensor) else value.lengths_or_none()
    return lengths if lengths is not None else torch.diff(value.offsets())


class Objects(NamedTuple):
    """A list, tuple or array with one Python object for each sample: a jagged field of the bytes of their pickles."""

    path: str
    leaf: int
    kind: type[Any]
    dtype: np.dtype[Any] | None  # of an array
    shape: tuple[int, ...]  # of each sample in an array

    def build(self, batch: FlatBatch) -> Any:
        """The field of another batch."""
        data = batch.tensors[self.leaf].numpy().data
        ends = accumulate(batch.host_lengths_at(self.path), initial=0)
        objects = [pickle.loads(data[since:until]) for since, until in pairwise(ends)]
        if self.dtype is None:
            return self.kind(objects)
        if self.dtype == np.object_:
            array = np.empty((len(objects), *self.shape), dtype=object)
            for index, one in enumerate(objects):
                array[index] = one
            return array
        dtype = self.dtype
        if dtype.kind in "US" and objects:  # strings of other ranks may need a wider one
            widest = np.array(objects, dtype=dtype.kind).dtype
            dtype = dtype if widest.itemsize <= dtype.itemsize else widest.newbyteorder(dtype.byteorder)
        return np.array(objects, dtype=dtype).reshape(len(objects), *self.shape)


def read_objects(contents: Contents, values: Sequence[Any] | NDArray[Any], path: str) -> Objects:
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
    contents.add(on_host, path, 0, (path,), (path,), PICKLES, True)
    contents.lengths.append((sizes, (path,)))
    contents.sizes.append((path, len(values)))
    return Objects(path, len(contents.leaves) - 1, type(values), dtype, shape)


class Shared(NamedTuple):
    """A value that stays as it is, of the batch that it comes from; or None, which need not be declared."""

    path: str
    number: int  # among the shared values; -1: it is None

    def build(self, batch: FlatBatch) -> Any:
        """The field of another batch."""
        return None if self.number < 0 else _moved(batch.shared[self.number], batch.device)


def _moved(value: Any, device: torch.device | None) -> Any:
    """A shared value with its tensors on a device."""
    if type(value) is dict:
        return {key: _moved(item, device) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_moved(item, device) for item in value)
    return value.to(device, non_blocking=True) if device and callable(getattr(value, "to", None)) else value


class Derived(NamedTuple):
    """A value that follows from the batch that is trained: its number of samples, a longest length, or a function."""

    path: str
    function: Callable[[Any], Any] | MaxLength | None  # None: the number of samples
    dtype: torch.dtype | None  # of a number of samples that is a tensor

    @property
    def needs_batch(self) -> bool:
        """Whether it is computed from the other fields."""
        return self.function is not None and not isinstance(self.function, MaxLength)

    def __reduce__(self) -> tuple[Any, ...]:
        """A function that cannot be pickled, such as a lambda, is replaced by what says so."""
        function: Any = self.function
        try:
            pickle.dumps(function)
        except Exception as error:
            function = _Missing(self.path, str(error))
        return Derived, (self.path, function, self.dtype)

    def build(self, batch: FlatBatch) -> Any:
        """The field of another batch; None where `compute` gives it."""
        if isinstance(self.function, MaxLength):
            return max(batch.host_lengths_at(self.function.path), default=0)
        if self.function is None and self.dtype is not None:
            return torch.full((), batch.num_samples, dtype=self.dtype, device=batch.device)
        return batch.num_samples if self.function is None else None

    def compute(self, batch: Any, spec: BatchSpec | None) -> Any:
        """Its value, from a batch in which such values are None."""
        function = self.function
        if isinstance(function, _Missing) and spec is not None:
            function = Declarations(spec).at(self.path).get("derived", function)
        assert callable(function)
        return function(batch)


def _read_batch_size(contents: Contents, value: Any, path: str) -> Derived:
    if isinstance(value, int) and not isinstance(value, bool):
        contents.batch_sizes.append((path, value))
        return Derived(path, None, None)
    if isinstance(value, torch.Tensor) and value.dim() == 0 and not value.dtype.is_floating_point:
        if value.device.type == "cpu":  # a device would have to be waited for
            contents.batch_sizes.append((path, int(value)))
        return Derived(path, None, value.dtype)
    raise BatchError(f"batch_size names {path!r}, which is {type_name(value)}; give an int or a 0-d integer tensor")


class _Missing(NamedTuple):
    path: str
    why: str

    def __call__(self, _batch: Any) -> Any:
        raise BatchError(
            f"the function that gives {self.path!r} did not reach this rank, which has had no batch of its own: "
            f"{self.why}; declare a function of a module, or a MaxLength, in derived"
        )


Field = Rows | Jagged | Objects | Shared | Derived


def reads_lengths(field: Field) -> bool:
    """Whether building it does, on the host."""
    if isinstance(field, Derived):
        return isinstance(field.function, MaxLength)
    is_padded = isinstance(field, Rows) and field.padding is not None
    shares_offsets = isinstance(field, Jagged) and field.alike is not None
    return isinstance(field, Objects) or is_padded or shares_offsets


def join(path: str, part: object) -> str:
    """The path of a part of what is at `path`."""
    return f"{path}.{part}" if path else str(part)
