"""Padded tensors travel without their padding, and are padded again to their own longest sample."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from trainer_client.balancing.batches.spec import BatchError, Padded


def without_padding(
    tensor: torch.Tensor, lengths: NDArray[np.int64], padding: Padded, path: str, column: str
) -> torch.Tensor:
    """(sum of lengths, …) values of a padded tensor (n, width, …), sample after sample.

    On the host, what is cut off must be the same everywhere.
    """
    width = tensor.shape[1]
    if lengths.size and lengths.max() > width:
        sample = int(lengths.argmax())
        raise BatchError(
            f"{path!r} is {width} wide, but sample {sample} has length {lengths[sample]} by {column!r}; name the "
            f"lengths that belong to it in padded[{path!r}]"
        )
    rows = tensor.flatten(0, 1)
    if (lengths == width).all():
        return rows
    place = np.arange(width)
    is_value = place < lengths[:, None] if padding.side == "right" else place >= width - lengths[:, None]
    if tensor.is_cpu:
        _check_cut(tensor, is_value, padding, path, column)
    index = torch.from_numpy(np.flatnonzero(is_value)).to(tensor.device, non_blocking=True)
    return _bytes_if_small(rows).index_select(0, index).view(tensor.dtype)


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def _check_cut(tensor: torch.Tensor, is_value: NDArray[np.bool_], padding: Padded, path: str, column: str) -> None:
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    if not plain.numel():
        return
    bits = plain.view(is_value.size, -1).view(_BITS[plain.itemsize])  # NaN differs from itself, its bits do not
    is_same = (bits == bits[int(is_value.argmin())]).all(dim=1).numpy().reshape(is_value.shape)
    if not (is_same | is_value).all():
        sample, position = np.argwhere(~(is_same | is_value))[0]
        other = "left" if padding.side == "right" else "right"
        raise BatchError(
            f"padded[{path!r}] would cut values off: with the lengths of {column!r} and padding on the "
            f"{padding.side}, sample {sample} has another value at position {position} than the padding elsewhere; "
            f"declare Padded(lengths={column!r}, side={other!r}) if the padding is on the {other}, or name the "
            "lengths that belong to it"
        )


def with_padding(values: torch.Tensor, lengths: torch.Tensor, longest: int, padding: Padded) -> torch.Tensor:
    """(n, width, …) padded tensor of (sum of lengths, …) values, of which samples have (n,) int64 lengths."""
    width = -(-longest // padding.multiple) * padding.multiple
    samples = lengths.shape[0]
    starts = torch.arange(samples, device=values.device) * width - (torch.cumsum(lengths, 0) - lengths)
    if padding.side == "left":
        starts += width - lengths
    # with the size given, a device is not waited for
    rows = torch.repeat_interleave(starts, lengths, output_size=values.shape[0])
    rows += torch.arange(values.shape[0], device=values.device)
    result = values.new_full((samples * width, *values.shape[1:]), padding.value)
    _bytes_if_small(result).index_copy_(0, rows, _bytes_if_small(values))
    return result.view(samples, width, *values.shape[1:])


def _bytes_if_small(tensor: torch.Tensor) -> torch.Tensor:
    """As bytes if its values are single bytes: indexing is not implemented for floating-point numbers of 8 bits."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
