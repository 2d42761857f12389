"""Tensors that are padded to the longest sample of their batch: they travel as jagged fields, without the padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trainer_client.balancing.batches.nodes import Parts, Taken
from trainer_client.balancing.batches.spec import BatchError, Padded


def without_padding(
    tensor: torch.Tensor, lengths: NDArray[np.int64], padding: Padded, path: str, column: str
) -> torch.Tensor:
    """(sum of lengths, …) values of a padded tensor (n, width, …), sample after sample.

    Raises:
        BatchError: If a sample is longer than the tensor is wide.
    """
    num_samples, width = tensor.shape[:2]
    if lengths.size and lengths.max() > width:
        sample = int(lengths.argmax())
        raise BatchError(
            f"{path!r} is {width} wide, but sample {sample} has length {lengths[sample]} by {column!r}; name the "
            f"lengths that belong to it in padded[{path!r}]"
        )
    if (lengths == width).all():
        return tensor.flatten(0, 1)
    starts = np.arange(num_samples) * width + (width - lengths if padding.side == "left" else 0)
    index = np.arange(int(lengths.sum())) + np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
    rows = torch.from_numpy(index).to(tensor.device, non_blocking=True)
    return _bytes_if_small(tensor.flatten(0, 1)).index_select(0, rows).view(tensor.dtype)


@dataclass(frozen=True, slots=True)
class PaddedNode:
    """A padded tensor."""

    leaf: int
    column: str
    padding: Padded

    def build(self, parts: Parts) -> torch.Tensor:
        """See `Node`."""
        values = parts.tensor(self.leaf)
        longest = max(parts.lengths_on_host(self.column), default=0)
        width = -(-longest // self.padding.multiple) * self.padding.multiple
        lengths = parts.lengths((self.column,), torch.int64)
        samples = torch.arange(parts.num_samples, device=values.device)
        starts = samples * width - (torch.cumsum(lengths, 0) - lengths)  # of each sample's rows, less those before it
        if self.padding.side == "left":
            starts += width - lengths
        # with the size given, a device is not waited for
        rows = torch.repeat_interleave(starts, lengths, output_size=values.shape[0])
        rows += torch.arange(values.shape[0], device=values.device)
        result = values.new_full((parts.num_samples * width, *values.shape[1:]), self.padding.value)
        _bytes_if_small(result).index_copy_(0, rows, _bytes_if_small(values))
        return result.view(parts.num_samples, width, *values.shape[1:])

    def take(self, value: Any, taken: Taken) -> bool:
        """See `Node`."""
        taken.tensors.append(value)
        if not isinstance(value, torch.Tensor) or value.dim() < 2:
            return False
        if self.padding.lengths is None:
            taken.lengths.append(torch.full(value.shape[:1], value.shape[1], dtype=torch.int64, device="cpu"))
        return True


def fits(value: float, dtype: torch.dtype) -> bool:
    """Whether tensors of a dtype can hold a number."""
    if dtype is torch.bool:
        return value in (0, 1)
    if dtype.is_floating_point or dtype.is_complex:
        return True
    return value == value // 1 and torch.iinfo(dtype).min <= value <= torch.iinfo(dtype).max


def _bytes_if_small(tensor: torch.Tensor) -> torch.Tensor:
    """As bytes if its values are single bytes: indexing is not implemented for floating-point numbers of 8 bits."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
