"""Notices loaders that write the next batch into the memory of one whose samples have not moved yet."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import string_at

import torch

from trainer_client.balancing.batches.spec import BatchError

_BYTES = 64
_LOOKED_INTO = 4


class Watch:
    """What tensors are like at one time: how often torch wrote to them, and some bytes of the largest on the host.

    Others are not looked into: this is done for every batch, on the thread that launches the step.
    """

    __slots__ = ("_largest", "_seen", "_versions")

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        on_host = [index for index, tensor in enumerate(tensors) if tensor.is_cpu]
        self._largest = sorted(on_host, key=lambda index: tensors[index].numel())[-_LOOKED_INTO:]
        self._versions = [_version(tensor) for tensor in tensors]
        self._seen = [_bytes(tensors[index]) for index in self._largest]

    def check(self, tensors: Sequence[torch.Tensor], paths: Sequence[str], function: str = "") -> None:
        """Compares the tensors with what they were.

        Args:
            tensors: As they are now.
            paths: Of each.
            function: Who alone may have written; see `FlatBatch.check_unchanged`.

        Raises:
            BatchError: If one is not as it was.
        """
        written = [index for index, tensor in enumerate(tensors) if _version(tensor) != self._versions[index]]
        looked = zip(self._largest, self._seen, strict=True)
        written += [index for index, seen in looked if _bytes(tensors[index]) != seen]
        if written and function:
            raise BatchError(
                f"the {function} function writes to {paths[written[0]]!r} of the batch, whose samples would be trained "
                "changed; let it compute on a copy, for example without operations in place"
            )
        if written:
            raise BatchError(
                f"{paths[written[0]]!r} of a batch was written to before its samples moved: the loader uses the memory "
                "of a batch again for a later one; set BatchSpec(copy=True), or let the loader give clones"
            )


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _bytes(tensor: torch.Tensor) -> bytes:
    if not tensor.numel():
        return b""
    if not tensor.is_contiguous():
        return string_at(tensor.data_ptr(), tensor.dtype.itemsize)
    # the middle: what is at the ends of a batch may well be padding, or the same in all
    size = tensor.nbytes
    length = min(_BYTES, size)
    return string_at(tensor.data_ptr() + (size - length) // 2, length)
