"""What a list or tuple is that nothing is declared about: by what it holds, never by how long it is or which values.

So the ranks of a job read it alike, in every step and whatever the batch size.
"""

from __future__ import annotations

import dataclasses
from collections import UserDict
from collections.abc import Iterable
from enum import Enum
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from trainer_client.balancing.batches import jagged
from trainer_client.balancing.batches.containers import attributes_of, is_record
from trainer_client.balancing.batches.tensordicts import is_tensordict


class Reading(Enum):
    """What a list or tuple is."""

    CONTAINER = "container"  # tensors are in it: its parts are fields of the batch
    OBJECTS = "objects"  # one Python object for each sample
    UNCLEAR = "unclear"  # lists in it: one for each sample, or fields with one entry for each sample


def reading(values: list[Any] | tuple[Any, ...]) -> Reading:
    """What a list or tuple that is not empty is."""
    kinds = set(map(type, values))
    if all(map(_holds_nothing, kinds)):
        return Reading.OBJECTS
    if hasattr(values, "_fields") or any(map(_holds_tensors, values)):
        return Reading.CONTAINER
    return Reading.UNCLEAR if any(map(_is_lists, values)) else Reading.OBJECTS


def is_objects(values: list[Any] | tuple[Any, ...]) -> bool:
    """Whether it holds one Python object for each sample; also where there are no samples."""
    return not hasattr(values, "_fields") and (not values or reading(values) is Reading.OBJECTS)


@lru_cache(maxsize=1024)
def _holds_nothing(kind: type[Any]) -> bool:
    """Whether values of a type are no containers, such as strings, numbers, None and dates."""
    if issubclass(kind, torch.Tensor | np.ndarray | dict | list | tuple | UserDict) or dataclasses.is_dataclass(kind):
        return False
    slots = any(base.__dict__.get("__slots__") for base in kind.__mro__)
    return kind.__dictoffset__ == 0 and not slots


def _parts(value: Any) -> Iterable[Any] | None:
    """What a container holds; None if it is none."""
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, UserDict):
        return value.data.values()
    if isinstance(value, list | tuple):
        return value
    return [item for _, item in attributes_of(value)] if is_record(value) else None


def _holds_tensors(value: Any) -> bool:
    kind: Any = type(value)
    if _holds_nothing(kind):
        return False
    if isinstance(value, torch.Tensor | np.ndarray) or is_tensordict(value):
        return True
    if jagged.is_jagged_tensor(value) or jagged.is_keyed_jagged_tensor(value):
        return True
    return any(map(_holds_tensors, _parts(value) or ()))


def _is_lists(value: Any) -> bool:
    """Whether all that it holds, without tensors, is in lists, each of which could have one entry for each sample."""
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return True
    parts = [part for part in _parts(value) or () if part is not None]
    return bool(parts) and all(map(_is_lists, parts))
