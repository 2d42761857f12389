"""Why a value cannot be part of a batch, in its own terms, and what to do about it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from trainer_client.balancing.batches.containers import is_lazy_stack, is_torchrec

DERIVED = "in derived, with the function that gives it, if it follows from the samples"


def name_of(path: str) -> str:
    """A path in a message."""
    return repr(path) if path else "the batch"


def type_name(value: object) -> str:
    """A type in a message."""
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def tensor_refusal(tensor: torch.Tensor, path: str) -> str:
    """Why a tensor cannot be moved; "" if it can."""
    if tensor.layout is not torch.strided:
        why = (
            f"is a tensor of layout {tensor.layout}, whose rows have no fixed place; convert it with .to_dense(), or "
            "to a JaggedTensor of its values"
        )
    elif type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        why = f"is a {type_name(tensor)}; only plain tensors can be moved: pass {path}.as_subclass(torch.Tensor)"
    elif tensor.is_meta:
        why = (
            "is a meta tensor, which has a shape but no values; make the batch on the host or on a device, for example "
            "within torch.device('cpu')"
        )
    elif tensor.is_quantized:
        why = f"is quantized, with a scale that other ranks do not have; pass {path}.dequantize() or .int_repr()"
    elif tensor.requires_grad:
        why = f"requires a gradient, which would end where samples move; pass {path}.detach()"
    elif tensor.dim() == 0:
        why = (
            f"is a tensor without dimensions, so it holds no samples; declare it {DERIVED} (a longest length, a sum), "
            "in batch_size if it is the number of samples, in shared if it is the same for all samples"
        )
    else:
        return ""
    return f"{name_of(path)} {why}"


def refusal(value: Any, path: str) -> str:
    """Why a value that is neither a field nor a container is no part of a batch."""
    if value is None:
        return (
            "the batch is None, which holds no samples; a loader that has no more data ends, and one that has none "
            "for this step gives a batch whose tensors have no rows"
        )
    kind = type_name(value)
    if is_torchrec(type(value), "KeyedTensor"):
        why = (
            "KeyedTensor, pooled embeddings of which only the model knows how keys follow each other; pass the dense "
            f"tensor {path}.values(), and make the KeyedTensor again in the model"
        )
    elif is_lazy_stack(type(value)):
        why = (
            "lazy stack of TensorDicts, whose tensors are one for each sample and not stacked; stack them: pass "
            f"{path}.contiguous(), or where their shapes differ {path}.densify(layout=torch.jagged)"
        )
    elif isinstance(value, torch.nn.utils.rnn.PackedSequence):
        why = f"{kind}, which is sorted by time step; pad it with pad_packed_sequence, or give a JaggedTensor"
    elif isinstance(value, int) and not isinstance(value, bool):
        why = (
            f"{kind} ({value}); declare it in batch_size if it is the number of samples, {DERIVED} (a longest length), "
            "in shared if it is the same on all ranks"
        )
    elif isinstance(value, bool | float | complex | str | bytes | np.generic):
        why = (
            f"{kind} ({value!r}); declare it in shared if it is the same for all samples, {DERIVED}, or drop it from "
            "the batch; one for each sample would be a list"
        )
    elif isinstance(value, np.ndarray) and not value.ndim:
        why = f"{kind} without dimensions, so it holds no samples; declare it {DERIVED}, or in shared"
    elif isinstance(value, np.ndarray):
        why = f"{kind}, which is no plain array; convert it with numpy.asarray or torch.as_tensor"
    else:
        why = (
            f"{kind}; supported are tensors, arrays and jagged tensors in dicts, lists, tuples, dataclasses, attrs and "
            "pydantic classes, TensorDict and classes that hold tensors: convert it, declare it in shared if it is the "
            "same for all samples, or put one for each sample in a list"
        )
    return f"{name_of(path)} is a {why}"
