"""How kernels are compiled: cached on disk where it can be written, without the GIL, with exact arithmetic."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numpy.typing import DTypeLike, NDArray

from evenkeel.partitioning.kernel_cache import KernelCache

F = TypeVar("F", bound=Callable[..., object])

# Of one type with all counts and places, where a literal would have functions compiled once more.
ZERO, NONE = cast(int, np.int64(0)), cast(int, np.int64(-1))


def kernel(function: F) -> F:
    """Compile `function` with numba: no fastmath and no threads, so that every machine computes the same result.

    The machine code is kept where `kernel_cache` says. Without a folder to write, each process compiles it anew.
    """
    return _compiled(function)


def step(function: F) -> F:
    """As `kernel`, for what other kernels call often and what allocates nothing: references are not counted.

    Numba counts those of each array that a function is given, two atomic additions each: for the few dozen arrays of
    the searches that takes longer than a short function's work.
    """
    return _compiled(function, _nrt=False)


def _compiled(function: F, **options: bool) -> F:
    njit: Any = numba.njit
    compiled = njit(nogil=True, error_model="numpy", **options)(function)
    try:
        compiled._cache = KernelCache(function)  # type: ignore[no-untyped-call]
    except RuntimeError:  # there is no folder to keep code in
        compiled._cache = type(compiled._cache)()
    return cast(F, compiled)


def plain_array(array: NDArray[Any], dtype: DTypeLike) -> NDArray[Any]:
    """The array as kernels are compiled for: of `dtype`, contiguous, aligned and writable; copied unless it is."""
    if array.dtype == dtype and array.flags.carray:
        return array
    return np.array(array, dtype, order="C")
