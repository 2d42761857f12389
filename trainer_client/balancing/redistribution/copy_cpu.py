"""Copies pieces of fields in the host's memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from evenkeel.partitioning.compile import kernel
from trainer_client.balancing.redistribution.copies import Job


@intrinsic
def _copy_bytes(_context: Any, target: Any, source: Any, size: Any) -> Any:  # noqa: ARG001 - read by the signature
    """`memcpy` on plain addresses: index operations of torch cost an order of magnitude more for short rows."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        byte_pointer = ir.IntType(8).as_pointer()
        to, since = (builder.inttoptr(address, byte_pointer) for address in args[:2])
        cgutils.raw_memcpy(builder, to, since, args[2], 1)  # type: ignore[no-untyped-call]
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@kernel
def _copy(words: NDArray[np.int64], halves: NDArray[np.int32], job: NDArray[np.int64]) -> None:
    _, num_fields, item_begin, piece_begin, unit_bytes, source, source_stride, target, target_stride, pieces = job
    for field in range(num_fields):
        unit = words[unit_bytes + field]
        place = 2 * pieces + 4 * words[piece_begin + field]
        for _ in range(words[item_begin + field + 1] - words[item_begin + field]):
            since, to, units, group = halves[place], halves[place + 1], halves[place + 2], halves[place + 3]
            place += 4
            _copy_bytes(  # type: ignore[call-arg]
                words[target + group * target_stride + field] + to * unit,
                words[source + group * source_stride + field] + since * unit,
                units * unit,
            )


def copy_on_host(words: NDArray[np.int64], job: Job) -> None:
    """Copies; the GIL is released meanwhile. The caller keeps the memory of all addresses alive."""
    _copy(words, words.view(np.int32), np.array(job, dtype=np.int64))
