"""The five kinds of fields: how each is taken out of a batch, and made again from the tensors of another one."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from trainer_client.balancing.batches.containers import is_list_of_objects, is_torchrec
from trainer_client.balancing.batches.spec import BatchError, BatchSpec, Declarations, MaxLength, Padded

if TYPE_CHECKING:
    from trainer_client.balancing.batches.flat import FlatBatch


@dataclass(slots=True)
class Taken:
    """What is taken out of a batch.

    Attributes:
        tensors: Its tensors in the order of the leaves.
        lengths: The lengths of each jagged field, one column after the other.
        sizes: What it says that its number of samples is.
        shared: Its shared values, by path.
    """

    tensors: list[torch.Tensor] = field(default_factory=list)
    lengths: list[torch.Tensor] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    shared: list[tuple[str, Any]] = field(default_factory=list)


class Field(Protocol):
    """A field of the batch, without its values."""

    def take(self, value: Any, taken: Taken) -> bool:
        """Takes a value apart; whether it is of this kind."""

    def build(self, flat: FlatBatch) -> Any:
        """The field of another batch."""


@dataclass(frozen=True, slots=True)
class Rows:
    """A tensor or array whose rows belong to samples: as many for each, flattened, or padded to the longest sample.

    Attributes:
        leaf: Its leaf.
        dtype: That of an array.
        padding: How it is padded.
        column: The column of lengths, if it is padded.
    """

    leaf: int
    dtype: np.dtype[Any] | None = None
    padding: Padded | None = None
    column: str = ""

    def take(self, value: Any, taken: Taken) -> bool:
        """See `Field`."""
        if self.dtype is not None:
            if type(value) is not np.ndarray or value.dtype != self.dtype:
                return False
            value = _as_tensor(value)
        taken.tensors.append(value)
        if not isinstance(value, torch.Tensor) or self.padding is None:
            return isinstance(value, torch.Tensor)
        if value.dim() < 2:
            return False
        if self.padding.lengths is None:
            taken.lengths.append(torch.full(value.shape[:1], value.shape[1], dtype=torch.int64, device="cpu"))
        return True

    def build(self, flat: FlatBatch) -> Any:
        """See `Field`."""
        values = flat.tensors[self.leaf]
        if self.padding is not None:
            return _padded(values, self.padding, self.column, flat)
        if self.dtype is None:
            return values
        return values.numpy().astype(self.dtype, copy=False)  # in its own byte order


@dataclass(frozen=True, slots=True)
class Jagged:
    """TorchRec's `JaggedTensor` and `KeyedJaggedTensor`, and torch's nested tensors in jagged layout.

    Attributes:
        columns: Path of each key's lengths, or of the field.
        values: The leaf of its values.
        weights: The leaf of its weights.
        dtype: That of its lengths.
        keys: Those of a `KeyedJaggedTensor`.
        is_nested: It is a nested tensor.
        alike: The column of an earlier nested tensor whose offsets it shares, without which torch does not compute
            with both.
    """

    columns: tuple[str, ...]
    values: int
    weights: int | None = None
    dtype: torch.dtype = torch.int64
    keys: tuple[str, ...] | None = None
    is_nested: bool = False
    alike: str | None = None

    def take(self, value: Any, taken: Taken) -> bool:
        """See `Field`."""
        # nested tensors are always read by their declarations: which ones share their offsets may differ
        if not is_torchrec(value, "JaggedTensor" if self.keys is None else "KeyedJaggedTensor"):
            return False
        if self.keys is not None and (tuple(value.keys()) != self.keys or is_variable(value)):
            return False
        lengths, weights = jagged_lengths(value), value.weights_or_none()
        taken.tensors += [value.values()] if weights is None else [value.values(), weights]
        taken.lengths.append(lengths)
        return lengths.dtype is self.dtype and (weights is None) == (self.weights is None)

    def build(self, flat: FlatBatch) -> Any:
        """See `Field`."""
        values = flat.tensors[self.values]
        if self.is_nested:
            return torch.nested.nested_tensor_from_jagged(values, offsets=flat.offsets_at(self.columns[0], self.alike))
        from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

        weights = None if self.weights is None else flat.tensors[self.weights]
        lengths = flat.lengths_at(self.columns, self.dtype)
        if self.keys is None:
            return JaggedTensor(values, weights=weights, lengths=lengths)
        totals = [int(flat.totals[flat.structure.order[path]]) for path in self.columns]
        empty = None
        if not flat.num_samples:  # for which TorchRec 1.8's `to_dict` raises an IndexError
            begin = lengths.new_zeros(1)
            empty = {key: JaggedTensor(values, weights=weights, lengths=lengths, offsets=begin) for key in self.keys}
        return KeyedJaggedTensor(
            list(self.keys),
            values,
            weights=weights,
            lengths=lengths,
            stride=flat.num_samples,
            length_per_key=totals,  # else TorchRec would ask the device for them
            offset_per_key=list(accumulate(totals, initial=0)),
            jt_dict=empty,
        )


@dataclass(frozen=True, slots=True)
class Objects:
    """A list, tuple or array with one Python object for each sample: a jagged field of the bytes of their pickles.

    Attributes:
        path: Where it is, and its column.
        leaf: The leaf of the bytes.
        kind: Its type.
        dtype: That of an array.
        shape: Of each sample in an array.
        is_declared: It is declared to be one; what else is read so is told by what it holds.
    """

    path: str
    leaf: int
    kind: type[Any]
    dtype: np.dtype[Any] | None = None
    shape: tuple[int, ...] = ()
    is_declared: bool = False

    def take(self, value: Any, taken: Taken) -> bool:
        """See `Field`."""
        if type(value) is not self.kind:
            return False
        if self.kind is np.ndarray:
            if not value.ndim or (value.dtype, value.shape[1:]) != (self.dtype, self.shape):
                return False
        elif not self.is_declared and is_list_of_objects(value) is not True:
            return False
        data, sizes = _pickled(value, self.path)
        taken.tensors.append(data)
        taken.lengths.append(sizes)
        return True

    def build(self, flat: FlatBatch) -> Any:
        """See `Field`."""
        data = flat.tensors[self.leaf].numpy().data
        ends = accumulate(flat.host_lengths_at(self.path), initial=0)
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


@dataclass(frozen=True, slots=True)
class Shared:
    """A value that stays as it is, of the batch that it comes from; None is one that need not be declared.

    Attributes:
        path: Where it is, if it is declared.
        value: The value.
    """

    path: str | None = None
    value: Any = None

    def take(self, value: Any, taken: Taken) -> bool:
        """See `Field`."""
        if self.path is not None:
            taken.shared.append((self.path, value))
        return value is None or self.path is not None

    def build(self, flat: FlatBatch) -> Any:
        """See `Field`."""
        return self.value if self.value is None else _moved(self.value, flat.device)


@dataclass(frozen=True, slots=True)
class Derived:
    """A value that follows from the batch that is trained: its number of samples, a longest length, or a function.

    Attributes:
        path: Where it is.
        function: What gives it; None: the number of samples.
        dtype: That of a number of samples that is a tensor.
    """

    path: str
    function: Callable[[Any], Any] | MaxLength | None = None
    dtype: torch.dtype | None = None

    @property
    def needs_batch(self) -> bool:
        """Whether it is computed from the other fields."""
        return self.function is not None and not isinstance(self.function, MaxLength)

    def __reduce__(self) -> tuple[Any, ...]:
        """A function that cannot be pickled, such as a lambda, is replaced by what says so."""
        function = self.function
        try:
            pickle.dumps(function)
        except Exception as error:
            function = _Missing(self.path, str(error))
        return Derived, (self.path, function, self.dtype)

    def take(self, value: Any, taken: Taken) -> bool:
        """See `Field`."""
        if self.function is None:
            if type(value) is not int or self.dtype is not None:
                return False
            taken.sizes.append(value)
        return True

    def build(self, flat: FlatBatch) -> Any:
        """See `Field`."""
        if isinstance(self.function, MaxLength):
            return max(flat.host_lengths_at(self.function.path), default=0)
        if self.function is None and self.dtype is not None:
            return torch.full((), flat.num_samples, dtype=self.dtype, device=flat.device)
        return flat.num_samples if self.function is None else None

    def compute(self, batch: Any, spec: BatchSpec | None) -> Any:
        """Its value, from a batch in which such values are None."""
        function = self.function
        if isinstance(function, _Missing) and spec is not None:
            function = Declarations(spec).find("derived", self.path) or function
        assert callable(function)
        return function(batch)


@dataclass(frozen=True, slots=True)
class _Missing:
    path: str
    why: str

    def __call__(self, _batch: Any) -> Any:
        raise BatchError(
            f"the function that gives {self.path!r} did not reach this rank, which has had no batch of its own: "
            f"{self.why}; declare a function of a module, or a MaxLength, in derived"
        )


# ------------------------------------------------------------------------------------- shared values

_MOST_BYTES = 65536  # of a tensor that is looked into, as this is done for every batch
_MOST_SHOWN = 60

SharedValues = tuple[tuple[str, str], ...]
"""Path of each shared value, and what it is."""


def describe(values: Iterable[tuple[str, Any]]) -> SharedValues:
    """What shared values are, alike on all ranks where these are equal; of what is on a device only the kind."""
    return tuple((path, _short(_canonical(value))) for path, value in values)


def digest(shared: SharedValues) -> int:
    """64 bits of it; 0: there are none."""
    return int(_hash(repr(shared).encode()), 16) if shared else 0


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _short(text: str) -> str:
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}… (digest {_hash(text.encode())})"


def _canonical(value: Any) -> str:
    """Equal values give equal texts; of other objects than plain ones only their type is known."""
    if isinstance(value, bool | np.bool_):
        return repr(bool(value))
    if isinstance(value, int | float | np.integer | np.floating):
        is_exact = isinstance(value, int | np.integer) and abs(int(value)) >= 2**53
        return repr(int(value) if is_exact else float(value))
    if value is None or isinstance(value, str | bytes):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_canonical, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(sorted(f'{_canonical(key)}: {_canonical(item)}' for key, item in value.items()))}}}"
    if isinstance(value, torch.Tensor):
        if (
            type(value) is not torch.Tensor
            or value.layout is not torch.strided
            or not value.is_cpu
            or value.is_quantized
        ):
            return "Tensor"  # a rank's may have arrived on its device already
        plain = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        return _bytes(value.dtype, value.shape, plain.view(torch.uint8).numpy() if plain.numel() else np.zeros(0))
    if type(value) is np.ndarray and value.dtype.kind in "biufc":
        return _bytes(value.dtype, value.shape, value)
    return type(value).__qualname__


def _bytes(dtype: Any, shape: Sequence[int], array: NDArray[Any]) -> str:
    kind = f"{str(dtype).removeprefix('torch.')}{list(shape)}"
    return kind if array.nbytes > _MOST_BYTES or not array.size else f"{kind} of digest {_hash(array.tobytes())}"


def _moved(value: Any, device: torch.device | None) -> Any:
    """A shared value with its tensors on a device."""
    if type(value) is dict:
        return {key: _moved(item, device) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_moved(item, device) for item in value)
    return value.to(device, non_blocking=True) if device and callable(getattr(value, "to", None)) else value


# ------------------------------------------------------------------------------------ jagged tensors


def jagged_lengths(value: Any) -> torch.Tensor:
    """Lengths of a `JaggedTensor`, `KeyedJaggedTensor` or nested tensor, on its device, without changing its caches."""
    lengths: torch.Tensor | None = None if isinstance(value, torch.Tensor) else value.lengths_or_none()
    return lengths if lengths is not None else torch.diff(value.offsets())


def is_variable(value: Any) -> bool:
    """Whether the batch size of a `KeyedJaggedTensor` differs between its keys."""
    return bool(value.variable_stride_per_key()) or value.inverse_indices_or_none() is not None


# ------------------------------------------------------------------------------------------- padding


def without_padding(
    tensor: torch.Tensor, lengths: NDArray[np.int64], padding: Padded, path: str, column: str
) -> torch.Tensor:
    """(sum of lengths, …) values of a padded tensor (n, width, …), sample after sample.

    Raises:
        BatchError: If a sample is longer than the tensor is wide, or what is cut off is no padding: on the host, if it
            is not the same everywhere.
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


def _padded(values: torch.Tensor, padding: Padded, column: str, flat: FlatBatch) -> torch.Tensor:
    longest = max(flat.host_lengths_at(column), default=0)
    width = -(-longest // padding.multiple) * padding.multiple
    lengths = flat.lengths_at((column,), torch.int64)
    starts = torch.arange(flat.num_samples, device=values.device) * width - (torch.cumsum(lengths, 0) - lengths)
    if padding.side == "left":
        starts += width - lengths
    # with the size given, a device is not waited for
    rows = torch.repeat_interleave(starts, lengths, output_size=values.shape[0])
    rows += torch.arange(values.shape[0], device=values.device)
    result = values.new_full((flat.num_samples * width, *values.shape[1:]), padding.value)
    _bytes_if_small(result).index_copy_(0, rows, _bytes_if_small(values))
    return result.view(flat.num_samples, width, *values.shape[1:])


def _bytes_if_small(tensor: torch.Tensor) -> torch.Tensor:
    """As bytes if its values are single bytes: indexing is not implemented for floating-point numbers of 8 bits."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def can_hold(dtype: torch.dtype, value: float) -> bool:
    """Whether tensors of a dtype can hold a number."""
    if dtype is torch.bool:
        return value in (0, 1)
    if dtype.is_floating_point or dtype.is_complex:
        return True
    return value == value // 1 and torch.iinfo(dtype).min <= value <= torch.iinfo(dtype).max


# -------------------------------------------------------------------------------- arrays and objects


def is_numeric(array: NDArray[Any]) -> bool:
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
