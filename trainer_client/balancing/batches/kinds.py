"""The five kinds of fields: what is known of one, and how it is built from another batch's tensors."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from trainer_client.balancing.batches.spec import BatchError, BatchSpec, MaxLength, Padded, declarations_of

if TYPE_CHECKING:
    from trainer_client.balancing.batches.flat import FlatBatch

PICKLES = "objects"  # label of the bytes of Python objects


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


# Fields are tuples of different lengths, so that those of two batches are compared without a look at their kinds.


class Rows(NamedTuple):
    """A tensor or array whose rows belong to samples: as many for each, flattened, or padded to the longest sample."""

    leaf: int
    dtype: np.dtype[Any] | None = None  # of an array
    padding: Padded | None = None
    column: str = ""  # of its lengths, if it is padded

    def build(self, batch: FlatBatch) -> Any:
        """The field of another batch."""
        values = batch.tensors[self.leaf]
        if self.padding is not None:
            return with_padding(values, batch.host_lengths_at(self.column), self.padding)
        if self.dtype is None:
            return values
        return values.numpy().astype(self.dtype, copy=False)  # in its own byte order


# Padded tensors travel without their padding, and are padded again to their own longest sample.


def _is_value(lengths: NDArray[np.int64], width: int, padding: Padded) -> NDArray[np.bool_]:
    """(n, width) where samples of (n,) lengths have values."""
    places = np.arange(width)
    return (places if padding.side == "right" else places[::-1]) < lengths[:, None]


def _rows_of(is_value: NDArray[np.bool_], device: torch.device) -> torch.Tensor:
    rows = torch.from_numpy(np.flatnonzero(is_value))
    # from other memory the host would wait for what the device is doing
    return rows.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else rows


def _bytes_if_small(tensor: torch.Tensor) -> torch.Tensor:
    """As bytes if its values are single bytes: indexing is not implemented for floating-point numbers of 8 bits."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def take_rows(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Those at some places, in their order."""
    return _bytes_if_small(rows).index_select(0, places).view(rows.dtype)


def without_padding(
    tensor: torch.Tensor, lengths: NDArray[np.int64], padding: Padded, path: str, column: str
) -> torch.Tensor:
    """(sum of lengths, …) values of a padded tensor (n, width, …), sample after sample.

    On the host, what is cut off must be what `with_padding` fills in.
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
    is_value = _is_value(lengths, width, padding)
    if tensor.is_cpu:
        places = _rows_of(~is_value, tensor.device)
        cut, filled = take_rows(rows, places), rows.new_full((), padding.value)
        is_other = ~cut.isnan() if filled.isnan() else cut != filled
        if is_other.any():
            first = int(is_other.flatten().byte().argmax())
            sample, position = divmod(int(places[first // math.prod(cut.shape[1:])]), width)
            other, found = "left" if padding.side == "right" else "right", cut.flatten()[first].item()
            raise BatchError(
                f"padded[{path!r}] would cut values off: with the lengths of {column!r} and padding on the "
                f"{padding.side}, sample {sample} has {found} at position {position} instead of the padding "
                f"{padding.value}; declare Padded(lengths={column!r}, side={other!r}) if the padding is on the "
                f"{other}, Padded(lengths={column!r}, value={found}) if it is {found}, or name the lengths that belong "
                "to it"
            )
    return take_rows(rows, _rows_of(is_value, tensor.device))


def with_padding(values: torch.Tensor, lengths: NDArray[np.int64], padding: Padded) -> torch.Tensor:
    """(n, width, …) padded tensor of (sum of lengths, …) values; a device is not waited for."""
    width = -(-int(lengths.max(initial=0)) // padding.multiple) * padding.multiple
    result = values.new_full((len(lengths) * width, *values.shape[1:]), padding.value)
    index = _rows_of(_is_value(lengths, width, padding), values.device)
    _bytes_if_small(result).index_copy_(0, index, _bytes_if_small(values))
    return result.view(len(lengths), width, *values.shape[1:])


class Jagged(NamedTuple):
    """TorchRec's `JaggedTensor` and `KeyedJaggedTensor`, and torch's nested tensors in jagged layout."""

    columns: tuple[str, ...]  # path of each key's lengths, or of the field
    values: int  # the leaf
    weights: int | None  # their leaf
    dtype: torch.dtype  # of the lengths
    keys: tuple[str, ...] | None
    is_nested: bool
    alike: str | None  # an earlier nested tensor with the same offsets, which torch wants to compute with both

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
        totals = [batch.total_at(path) for path in self.columns]
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
        ends = accumulate(batch.host_lengths_at(self.path).tolist(), initial=0)
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
            return int(batch.host_lengths_at(self.function.path).max(initial=0))
        if self.function is None and self.dtype is not None:
            return torch.full((), batch.num_samples, dtype=self.dtype, device=batch.device)
        return batch.num_samples if self.function is None else None

    def compute(self, batch: Any, spec: BatchSpec | None) -> Any:
        """Its value, from a batch in which such values are None."""
        function: Any = self.function
        if isinstance(function, _Missing) and spec is not None:
            function = declarations_of(spec).at(self.path).get("derived", function)
        return function(batch)


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
