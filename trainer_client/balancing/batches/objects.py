"""Leaves that are no tensors: NumPy arrays travel as tensors do, lists of Python objects as their pickles.

Numbers of arrays are in the host's memory again after the move; each object is a jagged field of bytes.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trainer_client.balancing.batches.nodes import Parts, Taken
from trainer_client.balancing.batches.sequences import is_objects
from trainer_client.balancing.batches.spec import BatchError

_TIMES = "mM"  # datetime64 and timedelta64: int64 of a unit


def is_numeric(array: NDArray[Any]) -> bool:
    """Whether a tensor can hold its values; others travel as Python objects."""
    return array.dtype.kind in _TIMES or (array.dtype.kind in "biufc" and array.dtype.itemsize <= _widest(array))


def as_tensor(array: NDArray[Any]) -> torch.Tensor:
    """The array as a tensor, without a copy where torch can read its memory."""
    plain = array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
    if plain.dtype.kind in _TIMES:
        plain = plain.view(np.int64)
    if not plain.flags.writeable or any(stride < 0 for stride in plain.strides):
        plain = plain.copy()
    return torch.from_numpy(plain)


def unit(array: NDArray[Any]) -> str:
    """What a tensor's dtype does not say, such as `datetime64[s]`; else nothing."""
    return str(array.dtype.newbyteorder("=")) if array.dtype.kind in _TIMES else ""


@dataclass(frozen=True, slots=True)
class ArrayNode:
    """An array of numbers or times.

    Attributes:
        leaf: The leaf.
        dtype: Of the array.
    """

    leaf: int
    dtype: np.dtype[Any]

    def build(self, parts: Parts) -> NDArray[Any]:
        """Makes it again, around the tensors of `parts`."""
        array: NDArray[Any] = parts.tensor(self.leaf).numpy()
        native = self.dtype.newbyteorder("=")
        array = array.view(native) if self.dtype.kind in _TIMES else array
        return array if native == self.dtype else array.astype(self.dtype)

    def take(self, value: Any, taken: Taken) -> bool:
        """Takes another of its kind apart."""
        if type(value) is not np.ndarray or value.dtype != self.dtype:
            return False
        taken.tensors.append(as_tensor(value))
        return True


def _widest(array: NDArray[Any]) -> int:
    return 16 if array.dtype.kind == "c" else 8


def pickled(values: Any, path: str) -> tuple[torch.Tensor, torch.Tensor]:
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


@dataclass(frozen=True, slots=True)
class ObjectsNode:
    """A list, tuple or NumPy array with one object for each sample.

    Attributes:
        path: Where it is, and its jagged column.
        values: The leaf of the bytes.
        kind: List, tuple or a subclass of them, or `numpy.ndarray`.
        dtype: Of an array.
        shape: Of each sample in an array.
        declared: It is declared to be one; what else is read so is told by what it holds.
    """

    path: str
    values: int
    kind: type[Any]
    dtype: np.dtype[Any] | None = None
    shape: tuple[int, ...] = ()
    declared: bool = False

    @staticmethod
    def of(value: Any, path: str, leaf: int, *, declared: bool) -> ObjectsNode:
        """The node of such a list or array."""
        if not isinstance(value, np.ndarray):
            return ObjectsNode(path, leaf, type(value), declared=declared)
        return ObjectsNode(path, leaf, np.ndarray, value.dtype, value.shape[1:], declared)

    def build(self, parts: Parts) -> Any:
        """Makes it again, around the tensors of `parts`."""
        data = parts.tensor(self.values).numpy().data
        ends = list(accumulate(parts.lengths_on_host(self.path), initial=0))
        objects = [pickle.loads(data[since:until]) for since, until in pairwise(ends)]
        if self.kind is not np.ndarray:
            return self.kind(objects)
        if self.dtype == np.object_:
            array = np.empty((len(objects), *self.shape), dtype=object)
            for index, one in enumerate(objects):
                array[index] = one
            return array
        assert self.dtype is not None
        array = np.array(objects, dtype=self._dtype_for(objects))
        return array.reshape(len(objects), *self.shape)

    def _dtype_for(self, objects: list[Any]) -> np.dtype[Any]:
        """That of the batch; strings of other ranks may need a wider one."""
        assert self.dtype is not None
        if self.dtype.kind not in "US" or not objects:
            return self.dtype
        found = np.array(objects, dtype=self.dtype.kind).dtype
        return self.dtype if found.itemsize <= self.dtype.itemsize else found.newbyteorder(self.dtype.byteorder)

    def take(self, value: Any, taken: Taken) -> bool:
        """Takes another of its kind apart."""
        if type(value) is not self.kind:
            return False
        if self.kind is np.ndarray:
            if not value.ndim or (value.dtype, value.shape[1:]) != (self.dtype, self.shape):
                return False
        elif not self.declared and not is_objects(value):
            return False
        data, sizes = pickled(value, self.path)
        taken.tensors.append(data)
        taken.lengths.append(sizes)
        return True
