"""What is said of values that cannot be moved: what they are, where, and what to do."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

DERIVED = "in derived, with the function that gives it, if it follows from the samples"


def name_of(path: str) -> str:
    """A path in a message."""
    return repr(path) if path else "the batch"


def type_name(value: object) -> str:
    """A type in a message."""
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def tensor_problem(tensor: torch.Tensor, path: str) -> str:
    """Why a tensor cannot be moved and what to do; "" if it can."""
    name, found = name_of(path), type_name(tensor)
    if tensor.layout is not torch.strided:
        return (
            f"{name} is a tensor of layout {tensor.layout}, whose rows have no fixed place; convert it with "
            ".to_dense(), or to a JaggedTensor of its values"
        )
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return f"{name} is a {found}; only plain tensors can be moved: pass {path}.as_subclass(torch.Tensor)"
    if tensor.is_quantized:
        return (
            f"{name} is quantized, with a scale that other ranks do not have; pass {path}.dequantize() or .int_repr()"
        )
    if tensor.requires_grad:
        return f"{name} requires a gradient, which would end where samples move; pass {path}.detach()"
    if tensor.dim() == 0:
        return (
            f"{name} is a tensor without dimensions, so it holds no samples; declare it {DERIVED} (a longest "
            "length, a sum), in batch_size if it is the number of samples, in shared if it is the same for all samples"
        )
    return ""


def remedy(value: Any, path: str) -> str:
    """What to do about a value that is no part of a batch."""
    found = f"{name_of(path)} is a {type_name(value)}"
    if isinstance(value, int) and not isinstance(value, bool):
        return (
            f"{found} ({value}); declare it in batch_size if it is the number of samples, {DERIVED} (a longest "
            "length), in shared if it is the same on all ranks"
        )
    if isinstance(value, bool | float | complex | str | bytes | np.generic):
        return (
            f"{found} ({value!r}); declare it in shared if it is the same for all samples, {DERIVED}, or drop it from "
            "the batch; one for each sample would be a list"
        )
    if isinstance(value, np.ndarray):
        if not value.ndim:
            return f"{found} without dimensions, so it holds no samples; declare it {DERIVED}, or in shared"
        return f"{found}, which is no plain array; convert it with numpy.asarray or torch.as_tensor"
    if isinstance(value, torch.nn.utils.rnn.PackedSequence):
        return f"{found}, which is sorted by time step; pad it with pad_packed_sequence, or give a JaggedTensor"
    return (
        f"{found}; supported are tensors, arrays and jagged tensors in dicts, lists, tuples, dataclasses, attrs and "
        "pydantic classes, TensorDict and classes that hold tensors: convert it, declare it in shared if it is the "
        "same for all samples, or put one for each sample in a list"
    )


def join(path: str, part: object) -> str:
    """The path of a part of what is at `path`."""
    return f"{path}.{part}" if path else str(part)
