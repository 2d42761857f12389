"""Where two batches differ, bit by bit and type by type."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from tests.trainer_client.balancing.redistribution.random_fields import Attributes, Frozen, Record
from tests.trainer_client.random_batches import as_bytes


def difference(found: Any, expected: Any, path: str) -> str:
    """Where two batches differ; "" if they do not."""
    if type(found) is not type(expected):
        return f"{path}: {type(found)} instead of {type(expected)}"
    if isinstance(expected, KeyedJaggedTensor):
        pairs = [("lengths", found.lengths(), expected.lengths()), ("values", found.values(), expected.values())]
        pairs.append(("weights", found.weights_or_none(), expected.weights_or_none()))
        if found.keys() != expected.keys() or found.stride() != expected.stride():
            return f"{path}: keys or stride"
        return next((wrong for name, one, two in pairs if (wrong := difference(one, two, f"{path}.{name}"))), "")
    if isinstance(expected, JaggedTensor):
        wrong = difference(found.values(), expected.values(), f"{path}.values")
        return wrong or difference(found.lengths(), expected.lengths(), f"{path}.lengths")
    if isinstance(expected, torch.Tensor):
        if expected.is_nested:
            wrong = difference(found.values(), expected.values(), f"{path}.values")
            return wrong or difference(found.offsets(), expected.offsets(), f"{path}.offsets")
        found = found.cpu()
        if found.dtype != expected.dtype or found.shape != expected.shape or as_bytes(found) != as_bytes(expected):
            return f"{path}: {found} instead of {expected}"
        return ""
    if isinstance(expected, np.ndarray):
        # The dtype of strings is as wide as this rank's own batch asks for, which is not known here.
        same = found.dtype.kind == expected.dtype.kind if expected.dtype.kind in "SU" else found.dtype == expected.dtype
        same = same and found.shape == expected.shape and np.array_equal(found, expected)
        return "" if same else f"{path}: {found!r} instead of {expected!r}"
    if isinstance(expected, dict | UserDict):
        if list(found) != list(expected):
            return f"{path}: keys {list(found)} instead of {list(expected)}"
        return next(
            (wrong for key in expected if (wrong := difference(found[key], expected[key], f"{path}.{key}"))), ""
        )
    if isinstance(expected, Record | Frozen | Attributes):
        names = ("first", "second")
        return next(
            (wrong for n in names if (wrong := difference(getattr(found, n), getattr(expected, n), f"{path}.{n}"))), ""
        )
    if isinstance(expected, list | tuple):
        if len(found) != len(expected):
            return f"{path}: {found} instead of {expected}"
        pairs = [(f"{path}.{i}", one, two) for i, (one, two) in enumerate(zip(found, expected, strict=True))]
        return next((wrong for where, one, two in pairs if (wrong := difference(one, two, where))), "")
    return "" if found == expected else f"{path}: {found!r} instead of {expected!r}"
