"""What is said of values that cannot be moved: what they are, where, and what to do."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from trainer_client.balancing.batches.containers import is_tensordict, is_torchrec
from trainer_client.balancing.batches.fields import is_keyed_jagged_tensor, is_variable

DERIVED = "in derived, with the function that gives it, if it follows from the samples"


def name_of(path: str) -> str:
    """A path in a message."""
    return repr(path) if path else "the batch"


def type_name(value: object) -> str:
    """A type in a message."""
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def problem(value: object, path: str) -> str:
    """Why a value that looks like a field or a container is none, and what to do; "" if it may be one."""
    name, kind = name_of(path), f"{name_of(path)} is a {type_name(value)}"
    if value is None:
        return (
            "the batch is None, which holds no samples; a loader that has no more data ends, and one that has none "
            "for this step gives a batch whose tensors have no rows"
        )
    if is_torchrec(value, "KeyedTensor"):
        return (
            f"{name} is a KeyedTensor, pooled embeddings of which only the model knows how keys follow each other; "
            f"pass the dense tensor {path}.values(), and make the KeyedTensor again in the model"
        )
    if is_tensordict(value) and type(value).__name__ == "LazyStackedTensorDict":
        return (
            f"{name} is a lazy stack of TensorDicts, whose tensors are one for each sample and not stacked; stack "
            f"them: pass {path}.contiguous(), or where their shapes differ {path}.densify(layout=torch.jagged)"
        )
    if isinstance(value, torch.nn.utils.rnn.PackedSequence):
        return f"{kind}, which is sorted by time step; pad it with pad_packed_sequence, or give a JaggedTensor"
    if is_keyed_jagged_tensor(value) and is_variable(value):
        return (
            f"{name} is a KeyedJaggedTensor with a variable batch size per feature; its rows are no samples: balance "
            "before deduplicating, or build it without stride_per_key_per_rank and inverse_indices"
        )
    if isinstance(value, torch.Tensor) and value.is_nested:
        nested: Any = value
        if value.layout is not torch.jagged or nested.lengths() is not None or getattr(nested, "_ragged_idx", 1) != 1:
            return (
                f"{name} is a nested tensor of layout {value.layout}, with holes or another ragged dimension than 1; "
                "use layout=torch.jagged, ragged right after the batch, and .contiguous()"
            )
    return ""


def tensor_problem(tensor: torch.Tensor, path: str) -> str:
    """Why a tensor cannot be moved and what to do; "" if it can."""
    name, kind = name_of(path), type_name(tensor)
    if tensor.layout is not torch.strided:
        return (
            f"{name} is a tensor of layout {tensor.layout}, whose rows have no fixed place; convert it with "
            ".to_dense(), or to a JaggedTensor of its values"
        )
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return f"{name} is a {kind}; only plain tensors can be moved: pass {path}.as_subclass(torch.Tensor)"
    if tensor.is_meta:
        return (
            f"{name} is a meta tensor, which has a shape but no values; make the batch on the host or on a device, for "
            "example within torch.device('cpu')"
        )
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
    kind = f"{name_of(path)} is a {type_name(value)}"
    if isinstance(value, int) and not isinstance(value, bool):
        return (
            f"{kind} ({value}); declare it in batch_size if it is the number of samples, {DERIVED} (a longest "
            "length), in shared if it is the same on all ranks"
        )
    if isinstance(value, bool | float | complex | str | bytes | np.generic):
        return (
            f"{kind} ({value!r}); declare it in shared if it is the same for all samples, {DERIVED}, or drop it from "
            "the batch; one for each sample would be a list"
        )
    if isinstance(value, np.ndarray):
        if not value.ndim:
            return f"{kind} without dimensions, so it holds no samples; declare it {DERIVED}, or in shared"
        return f"{kind}, which is no plain array; convert it with numpy.asarray or torch.as_tensor"
    return (
        f"{kind}; supported are tensors, arrays and jagged tensors in dicts, lists, tuples, dataclasses, attrs and "
        "pydantic classes, TensorDict and classes that hold tensors: convert it, declare it in shared if it is the "
        "same for all samples, or put one for each sample in a list"
    )


def join(path: str, part: object) -> str:
    """The path of a part of what is at `path`."""
    return f"{path}.{part}" if path else str(part)
