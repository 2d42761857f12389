"""What checks of messages have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.balancer.refusals import Code, Refusal, RefusedError, shorten

F8, I8, U4 = np.dtype("<f8"), np.dtype("<i8"), np.dtype("<u4")


def read_array(
    data: bytes, count: int, name: str, dtypes: Sequence[np.dtype[Any]], *, fatal: bool = False
) -> NDArray[Any]:
    """The elements of an array, in that of the types whose width its length tells.

    Args:
        data: Of the message.
        count: How many there must be.
        name: Of the field.
        dtypes: From the narrowest to the widest.
        fatal: The stream ends where it does not fit.

    Raises:
        RefusedError: If there are more or fewer.
    """
    for dtype in dtypes:
        if len(data) == count * dtype.itemsize:
            return np.frombuffer(data, dtype)
    widths = " or ".join(str(dtype.itemsize) for dtype in dtypes)
    remedy = f"pack {count} little-endian elements of {widths} bytes, {count * dtypes[-1].itemsize} in all"
    raise refused(name, f"{len(data)} bytes", remedy, fatal=fatal)


def refused(
    field: str, value: object, remedy: str, *, code: Code = Code.INVALID_ARGUMENT, fatal: bool = True
) -> RefusedError:
    """What to raise where a field is wrong."""
    return RefusedError(Refusal(code=code, field=field, value=shorten(value), remedy=remedy, fatal=fatal))
