"""NumPy arrays: numbers travel as tensors do, and are arrays in the host's memory again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trainer_client.balancing.batches.nodes import Parts, Taken

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
        dtype: Of the array, in the machine's byte order.
    """

    leaf: int
    dtype: np.dtype[Any]

    def build(self, parts: Parts) -> NDArray[Any]:
        """See `Node`."""
        array: NDArray[Any] = parts.tensor(self.leaf).numpy()
        return array.view(self.dtype) if self.dtype.kind in _TIMES else array

    def take(self, value: Any, taken: Taken) -> bool:
        """See `Node`."""
        if type(value) is not np.ndarray or value.dtype.newbyteorder("=") != self.dtype:
            return False
        taken.tensors.append(as_tensor(value))
        return True


def _widest(array: NDArray[Any]) -> int:
    return 16 if array.dtype.kind == "c" else 8
