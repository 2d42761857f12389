"""How kernels are compiled: into Numba's cache, without the GIL, with exact arithmetic."""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numba.core import caching, registry

logger = logging.getLogger(__name__)
F = TypeVar("F", bound=Callable[..., object])

# Of one type with all counts and places, where a literal would have functions compiled once more.
ZERO, NONE = cast(int, np.int64(0)), cast(int, np.int64(-1))
SECONDS = 600.0
"""Within which kernels are compiled, also on a busy machine."""
_LOOK = 0.1  # seconds from one look at the process that compiles to the next
_EXIT_SECONDS = 5.0  # that a process which ends gives what it loads
_HERE = Path(__file__).parent
_kernels: list[Any] = []  # of this process, with their caches


def kernel(function: F) -> F:
    """Compile `function` with numba: no fastmath and no threads, so that every machine computes the same result."""
    return _compiled(function, counts=True)


def step(function: F) -> F:
    """As `kernel`, for what other kernels call often and what allocates nothing: references are not counted.

    Numba counts those of each array that a function is given, two atomic additions each: for the few dozen arrays of
    the searches that takes longer than a short function's work.
    """
    return _compiled(function, counts=False)


def _compiled(function: F, *, counts: bool) -> F:
    compiled: Any = numba.njit(nogil=True, error_model="numpy", _nrt=counts)(function)  # type: ignore[call-overload]
    with suppress(RuntimeError):  # there is no folder to keep code in
        compiled._cache = _Cache(function)
        if counts:  # the code of steps is part of theirs
            _kernels.append(compiled)
    return cast(F, compiled)


@cache
def _digest(folder: Path) -> str:
    """Of all kernels in a folder, and of those here, which they may call: Numba looks at a kernel's own file only."""
    digest = hashlib.sha256((_digest(_HERE) if folder != _HERE else str(numba.config.BOUNDSCHECK)).encode())  # type: ignore[attr-defined]
    for path in sorted(folder.rglob("*.py")):
        source = path.read_bytes()
        if re.search(rb"^(@|\w+ = )(kernel|step)\b", source, re.MULTILINE):
            digest.update(path.name.encode() + source)
    return digest.hexdigest()


class _Locator(caching.UserProvidedCacheLocator):
    """The folder that EVENKEEL_CACHE_DIR names, which may be read-only once it is complete, as that of an image."""

    def __init__(self, py_func: Any, py_file: str) -> None:
        super().__init__(py_func, py_file)  # type: ignore[no-untyped-call]
        self._cache_path = os.path.join(os.environ["EVENKEEL_CACHE_DIR"], Path(self._cache_path).name)

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> Any:
        if not os.environ.get("EVENKEEL_CACHE_DIR"):
            return None
        locator = cls(py_func, py_file)
        with suppress(OSError):
            locator.ensure_cache_path()  # type: ignore[no-untyped-call]
        return locator if Path(locator._cache_path).is_dir() else None


class _Files(caching.CompileResultCacheImpl):
    _locator_classes = [_Locator, *caching.CompileResultCacheImpl._locator_classes]  # noqa: RUF012 - numba's


class _Index(caching.IndexDataCacheFile):
    """What is compiled; written anew where it cannot be read, as it is damaged or names types that have moved."""

    def _load_index(self) -> dict[Any, str]:
        try:
            return cast(dict[Any, str], super()._load_index())  # type: ignore[no-untyped-call]
        except Exception:
            return {}


class _Cache(caching.FunctionCache):
    """Numba's cache of a function. What cannot be read or written is compiled, not raised."""

    _impl_class = _Files

    def __init__(self, py_func: Any) -> None:
        super().__init__(py_func)  # type: ignore[no-untyped-call]
        digest = _digest(Path(py_func.__code__.co_filename).parent)
        self._cache_file = _Index(self._cache_path, self._impl.filename_base, digest)  # type: ignore[no-untyped-call]

    def has_any(self) -> bool:
        """Whether the function is compiled for this processor, for some types."""
        codegen: Any = registry.cpu_target.target_context.codegen()
        index: dict[Any, str] = self._cache_file._load_index()  # type: ignore[no-untyped-call]
        return any(key[1] == codegen.magic_tuple() for key in index)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)  # type: ignore[no-untyped-call]
        except Exception:
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        with suppress(Exception):
            super().save_overload(sig, data)  # type: ignore[no-untyped-call]


class Preparation:
    """Kernels that get ready: loaded before this returns if they are compiled, else in the background.

    In the background another process compiles: one that ended within the compiler's own code would abort.
    """

    def __init__(self, load: Callable[[], None]) -> None:
        """Begins.

        Args:
            load: A function of a module, which calls all kernels that are needed.
        """
        self._load, self._done, self._ending = load, threading.Event(), threading.Event()
        if _are_compiled(load.__module__.rpartition(".")[0]):
            self._run()
        else:
            thread = threading.Thread(target=self._run, args=(True,), name="evenkeel-kernels", daemon=True)
            thread.start()
            atexit.register(self._end, thread)

    @property
    def ready(self) -> bool:
        """Whether calling them compiles nothing."""
        return self._done.is_set()

    def wait(self, seconds: float = SECONDS) -> bool:
        """Waits until they are; whether they are."""
        return self._done.wait(seconds)

    def _run(self, compile_first: bool = False) -> None:
        try:
            if compile_first:
                self._compile_beside()
            if not self._ending.is_set():
                self._load()
        except Exception:
            logger.warning("kernels could not be prepared; they are compiled when they are called", exc_info=True)
        finally:
            self._done.set()

    def _compile_beside(self) -> None:
        """Compiles in a process of low priority; one that outlives this one does it for the next."""
        module, name = self._load.__module__, self._load.__name__
        program = f"import os; os.nice(10); from importlib import import_module; import_module({module!r}).{name}()"
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [sys.executable, "-c", program], env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        while process.poll() is None and not self._ending.wait(_LOOK):
            pass

    def _end(self, thread: threading.Thread) -> None:
        self._ending.set()
        thread.join(_EXIT_SECONDS)


def _are_compiled(package: str) -> bool:
    """Whether all kernels of a package have been, for this processor."""
    return all(each._cache.has_any() for each in _kernels if each.__module__.startswith(package))
