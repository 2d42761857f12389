"""Fields of a user's batch by their paths, and their lengths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trainer_client.balancing.batches.containers import container_of, is_keyed, is_torchrec
from trainer_client.balancing.batches.flat import FlatBatch
from trainer_client.balancing.batches.jagged import jagged_lengths
from trainer_client.balancing.batches.spec import BatchError


def lookup(batch: Any, path: str) -> Any:
    """The value at a path; a key of a `KeyedJaggedTensor` gives its lengths.

    Raises:
        BatchError: If there is none; the message shows what there is instead.
    """
    value, rest = batch, path
    while rest:
        step = _step(value, rest, path.removesuffix(rest).rstrip("."))
        if step is None:
            raise BatchError(f"the batch has no {path!r}: nothing is called {rest!r} in {_describe(value)}")
        value, rest = step
    return value


def read_lengths(batch: Any, path: str) -> NDArray[np.int64]:
    """(n,) int64: lengths of the jagged field at `path`, or the values of an integer tensor (n,), from the host.

    Args:
        batch: A user's batch or a `FlatBatch`.
        path: The field.

    Returns:
        (n,) int64.

    Raises:
        BatchError: If there is no such field, or its lengths are on a device.
    """
    value = find_lengths(batch, path)
    if value.device.type != "cpu":
        raise BatchError(f"{path!r} is on {value.device}; compute costs from the host's batch, before the copy")
    lengths: NDArray[np.int64] = value.numpy().astype(np.int64)
    return lengths


def find_lengths(batch: Any, path: str) -> torch.Tensor:
    """The same in their own dtype, and wherever they are."""
    if isinstance(batch, FlatBatch):
        return torch.from_numpy(batch.lengths_of(path).copy())
    value = lookup(batch, path)
    if is_torchrec(type(value), "JaggedTensor") or (isinstance(value, torch.Tensor) and value.is_nested):
        value = jagged_lengths(value, path)
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "iu":
        value = torch.from_numpy(value.astype(np.int64))
    is_tensor = isinstance(value, torch.Tensor) and value.dim() == 1
    if not is_tensor or value.is_floating_point() or value.is_complex() or value.dtype is torch.bool:
        raise BatchError(
            f"{path!r} is {_describe(value)}; name a jagged field (of a KeyedJaggedTensor one key), or an integer "
            "tensor with one number per sample"
        )
    lengths: torch.Tensor = value
    return lengths


def _step(value: Any, path: str, before: str) -> tuple[Any, str] | None:
    """One part of the path further; keys may hold dots themselves."""
    keyed = is_keyed(value)
    container = None if keyed else container_of(value)
    values, names, _ = container.flatten(value) if container is not None else ((), (), None)
    named = dict(zip(map(str, names), values, strict=True))
    parts = path.split(".")
    for count in range(1, len(parts) + 1):
        name, rest = ".".join(parts[:count]), ".".join(parts[count:])
        if keyed:
            if name in value.keys():  # noqa: SIM118 - not a dict
                return jagged_lengths(value, before)[list(value.keys()).index(name)], rest
        elif name in named:
            return named[name], rest
        elif not isinstance(value, torch.Tensor | Mapping) and name.isidentifier() and hasattr(value, name):
            return getattr(value, name), rest
    return None


def _describe(value: Any) -> str:
    if is_keyed(value):
        return f"a KeyedJaggedTensor of {', '.join(value.keys())}"
    if isinstance(value, Mapping):
        return f"a dict of {', '.join(map(str, value.keys()))}"
    if isinstance(value, torch.Tensor):
        return f"a tensor {value.dtype} of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
