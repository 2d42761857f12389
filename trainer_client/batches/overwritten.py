"""Notices loaders that write the next batch into the memory of one whose samples have not moved yet."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import string_at

import torch

from trainer_client.batches.spec import BatchError

_BYTES = 64


class Watch:
    """What tensors are like at one time: how often torch has written to them, and a few bytes of those on the host."""

    __slots__ = ("_seen",)

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._seen = [_look(tensor) for tensor in tensors]

    def check(self, tensors: Sequence[torch.Tensor], paths: Sequence[str]) -> None:
        """Compares.

        Raises:
            BatchError: If one is not as it was.
        """
        for tensor, seen, path in zip(tensors, self._seen, paths, strict=True):
            if _look(tensor) != seen:
                raise BatchError(
                    f"{path!r} of a batch was written to before its samples moved: the loader uses the memory of a "
                    "batch again for a later one; set BatchSpec(copy=True), or let the loader give clones"
                )


def _look(tensor: torch.Tensor) -> tuple[int, bytes]:
    version = 0 if tensor.is_inference() else tensor._version
    if not tensor.is_cpu or not tensor.numel():
        return version, b""
    if not tensor.is_contiguous():
        return version, string_at(tensor.data_ptr(), tensor.dtype.itemsize)
    # the middle: what is at the ends of a batch may well be padding, or the same in all
    size = tensor.nbytes
    length = min(_BYTES, size)
    return version, string_at(tensor.data_ptr() + (size - length) // 2, length)
