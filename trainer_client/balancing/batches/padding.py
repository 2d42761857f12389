"""Padded tensors: they travel without their padding, and are padded again to their own longest sample."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from trainer_client.balancing.batches.contents import Contents, Field, Leaves
from trainer_client.balancing.batches.spec import BatchError, Padded

if TYPE_CHECKING:
    from trainer_client.balancing.batches.flat import FlatBatch


def read_padded(found: Contents, tensor: torch.Tensor, path: str, padding: Padded) -> Field:
    """A tensor (samples, width, …), with its padding until `trim`."""
    found.add(tensor, path, 0, (padding.lengths or path,), (path,), "padded", padding=padding)
    if tensor.dim() < 2:
        raise BatchError(f"{path!r} is in padded, but has the shape {tuple(tensor.shape)}; give (samples, width, …)")
    if not _can_hold(tensor.dtype, padding.value):
        raise BatchError(f"padded[{path!r}] has the value {padding.value}, which {tensor.dtype} cannot hold")
    found.sizes.append((path, tensor.shape[0]))
    found.reads_lengths = True
    if padding.lengths is not None:
        found.named.append(("padded", path, padding.lengths))
    else:
        widths = torch.full(tensor.shape[:1], tensor.shape[1], dtype=torch.int64, device="cpu")
        found.lengths.append((widths, (path,)))
    return (build_padded,)


def _can_hold(dtype: torch.dtype, value: float) -> bool:
    if dtype is torch.bool:
        return value in (0, 1)
    if dtype.is_floating_point or dtype.is_complex:
        return True
    return value == value // 1 and torch.iinfo(dtype).min <= value <= torch.iinfo(dtype).max


def trim(tensor: torch.Tensor, lengths: NDArray[np.int64], padding: Padded, path: str, column: str) -> torch.Tensor:
    """(sum of lengths, …) values of a padded tensor (n, width, …) at `path`, by the (n,) lengths of a column.

    On the host, what is cut off must be what `build_padded` fills in.
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
    is_value = _is_value(lengths, width, padding)
    if tensor.is_cpu:
        places = _places_of(~is_value, tensor.device)
        cut, filled = take_rows(rows, places), rows.new_full((), padding.value)
        is_other = ~cut.isnan() if filled.isnan() else cut != filled
        if is_other.any():
            first = int(is_other.flatten().byte().argmax())
            sample, position = divmod(int(places[first // math.prod(cut.shape[1:])]), width)
            other, found = "left" if padding.side == "right" else "right", cut.flatten()[first].item()
            raise BatchError(
                f"padded[{path!r}] would cut values off: with the lengths of {column!r} and padding on the "
                f"{padding.side}, sample {sample} has {found} at position {position} instead of the padding "
                f"{padding.value}; declare Padded(lengths={column!r}, side={other!r}) if the padding is on the "
                f"{other}, Padded(lengths={column!r}, value={found}) if it is {found}, or name the lengths that belong "
                "to it"
            )
    return take_rows(rows, _places_of(is_value, tensor.device))


def build_padded(flat: FlatBatch, leaves: Leaves) -> torch.Tensor:
    """(n, width, …) again, as wide as the longest sample; a device is not waited for."""
    leaf, values = next(leaves)
    padding, lengths = leaf.padding, flat.lengths[:, leaf.columns[0]]
    assert padding is not None
    width = -(-int(lengths.max(initial=0)) // padding.multiple) * padding.multiple
    result = values.new_full((len(lengths) * width, *values.shape[1:]), padding.value)
    places = _places_of(_is_value(lengths, width, padding), values.device)
    _bytes_if_small(result).index_copy_(0, places, _bytes_if_small(values))
    return result.view(len(lengths), width, *values.shape[1:])


def _is_value(lengths: NDArray[np.int64], width: int, padding: Padded) -> NDArray[np.bool_]:
    """(n, width) where samples of (n,) lengths have values."""
    places = np.arange(width)
    return (places if padding.side == "right" else places[::-1]) < lengths[:, None]


def _places_of(is_value: NDArray[np.bool_], device: torch.device) -> torch.Tensor:
    places = torch.from_numpy(np.flatnonzero(is_value))
    # from other memory the host would wait for what the device is doing
    return places.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else places


def _bytes_if_small(tensor: torch.Tensor) -> torch.Tensor:
    """As bytes if its values are single bytes: indexing is not implemented for floating-point numbers of 8 bits."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def take_rows(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Those at some places, in their order."""
    return _bytes_if_small(rows).index_select(0, places).view(rows.dtype)
