"""How kernels are compiled: cached on disk where it can be written, without the GIL, with exact arithmetic."""

import hashlib
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numpy.typing import DTypeLike, NDArray

F = TypeVar("F", bound=Callable[..., object])


_HERE = Path(__file__).parent


@cache
def digest_of_kernels(folder: Path) -> str:
    """Of the source of all kernels in a folder, and of those here, which they may call."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(folder.glob("*.py")):
        source = path.read_bytes()
        if b"@kernel" in source or b"@step" in source:
            digest.update(path.name.encode() + b"\0" + source + b"\0")
    if folder != _HERE:
        digest.update(SOURCES.encode())
    return digest.hexdigest()


SOURCES = digest_of_kernels(_HERE)


def kernel(function: F) -> F:
    """Compile `function` with numba: no fastmath and no threads, so that every machine computes the same result.

    The machine code is cached under `NUMBA_CACHE_DIR`, else beside the source, else in the user's cache folder. Where
    none of them can be written (a read-only image without a home), it is compiled anew in each process.
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
    try:
        compiled = njit(nogil=True, cache=True, error_model="numpy", **options)(function)
    except RuntimeError:  # numba found no folder to cache in
        return cast(F, njit(nogil=True, error_model="numpy", **options)(function))
    # numba renews a cached kernel when its own file changes, but not when a kernel that it calls does, in another file:
    # stamp it with the content of all such files instead.
    with suppress(AttributeError):
        compiled._cache._cache_file._source_stamp = digest_of_kernels(Path(function.__code__.co_filename).parent)
    return cast(F, compiled)


def plain_array(array: NDArray[Any], dtype: DTypeLike) -> NDArray[Any]:
    """The array as kernels are compiled for: of `dtype`, contiguous, aligned and writable; copied unless it is."""
    if array.dtype == dtype and array.flags.carray:
        return array
    return np.array(array, dtype, order="C")
