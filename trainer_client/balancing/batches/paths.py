"""Finding one field of a batch by its path, without taking the batch apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trainer_client.balancing.batches import jagged
from trainer_client.balancing.batches.flat import FlatBatch
from trainer_client.balancing.batches.spec import BatchError


def lookup(batch: Any, path: str) -> Any:
    """The value at a path; a key of a `KeyedJaggedTensor` gives its lengths.

    Raises:
        BatchError: If there is none; the message shows what there is instead.
    """
    value, rest = batch, path
    while rest:
        step = _step(value, rest)
        if step is None:
            raise BatchError(f"the batch has no {path!r}: nothing is called {rest!r} in {_describe(value)}")
        value, rest = step
    return value


def read_lengths(batch: Any, path: str) -> NDArray[np.int64]:
    """(n,) int64: lengths of the jagged field at `path`, or the values of an integer tensor (n,), from the host.

    Args:
        batch: A user's batch or a `FlatBatch`.
        path: The field.

    Raises:
        BatchError: If there is no such field, or its lengths are on a device.
    """
    if isinstance(batch, FlatBatch):
        return batch.lengths_of(path)
    value = lookup(batch, path)
    if jagged.is_jagged_tensor(value):
        value = jagged.jagged_lengths(value)
    elif jagged.is_nested(value):
        value = torch.diff(jagged.nested_parts(value, path)[1])
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "iu":
        return value.astype(np.int64)
    if not isinstance(value, torch.Tensor) or value.dim() != 1 or value.dtype not in (torch.int32, torch.int64):
        raise BatchError(
            f"{path!r} is {_describe(value)}; name a jagged field (of a KeyedJaggedTensor one key), or an int32 or "
            "int64 tensor with one number per sample"
        )
    if value.device.type != "cpu":
        raise BatchError(f"{path!r} is on {value.device}; compute costs from the host's batch, before the copy")
    lengths: NDArray[np.int64] = value.numpy().astype(np.int64)
    return lengths


def _step(value: Any, path: str) -> tuple[Any, str] | None:
    """One part of the path further; keys may hold dots themselves."""
    parts = path.split(".")
    for taken in range(1, len(parts) + 1):
        name, rest = ".".join(parts[:taken]), ".".join(parts[taken:])
        if jagged.is_keyed_jagged_tensor(value):
            if name in value.keys():  # noqa: SIM118 - not a dict
                return _keyed_lengths(value, name), rest
        elif isinstance(value, Mapping):
            for key in value:
                if str(key) == name:
                    return value[key], rest
        elif isinstance(value, list | tuple) and name.isdecimal() and int(name) < len(value):
            return value[int(name)], rest
        elif not isinstance(value, torch.Tensor) and name.isidentifier() and hasattr(value, name):
            return getattr(value, name), rest
    return None


def _keyed_lengths(value: Any, key: str) -> torch.Tensor:
    """Lengths of one key, without splitting the values of all."""
    stride, index = value.stride(), list(value.keys()).index(key)
    return jagged.jagged_lengths(value)[index * stride : (index + 1) * stride]


def _describe(value: Any) -> str:
    if jagged.is_keyed_jagged_tensor(value):
        return f"a KeyedJaggedTensor of {', '.join(value.keys())}"
    if isinstance(value, Mapping):
        return f"a dict of {', '.join(map(str, value))}"
    if isinstance(value, torch.Tensor):
        return f"a tensor {value.dtype} of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
