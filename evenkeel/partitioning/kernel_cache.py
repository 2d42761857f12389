"""Where compiled kernels are kept: a folder for each version of sources, numba and Python, and for each processor.

Numba's own cache keeps the code of all processors in one folder, with an index that processes read and rewrite without
a lock: on a home that machines of different kinds share, one may find the code of the other. It also passes over a
folder that it may read but not write, such as that of an image. Here a folder is of one kind and says when it is
complete; a complete one is used wherever it lies, and a damaged file costs its kernel a compilation.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import llvmlite  # type: ignore[import-untyped]
import llvmlite.binding  # type: ignore[import-untyped]
import numba
from numba.core import caching

_HERE = Path(__file__).parent
_COMPLETE = "complete.json"
_STALE_DAYS = 30.0  # after which an unused folder of another version is removed


def roots() -> Iterator[Path]:
    """Where folders of kernels may lie, best first: as told, else beside the sources or the user's; then temporary."""
    if told := os.environ.get("EVENKEEL_CACHE_DIR") or numba.config.CACHE_DIR:  # type: ignore[attr-defined]
        yield Path(told)
    else:
        yield _HERE.parent / "__pycache__"
        with suppress(RuntimeError):  # no home
            base = os.environ.get("XDG_CACHE_HOME")
            yield (Path(base) if base else Path.home() / ".cache") / "evenkeel"
    temporary = Path(tempfile.gettempdir()) / f"evenkeel-{os.getuid()}"
    with suppress(OSError):
        temporary.mkdir(mode=0o700, exist_ok=True)
        known = temporary.lstat()
        if known.st_uid == os.getuid() and not known.st_mode & 0o077:  # nobody else's code is run
            yield temporary


@cache
def digest_of_kernels(folder: Path) -> str:
    """Of the source of all kernels in a folder, and of those here, which they may call."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(folder.glob("*.py")):
        source = path.read_bytes()
        if b"@kernel" in source or b"@step" in source:
            digest.update(path.name.encode() + b"\0" + source + b"\0")
    if folder != _HERE:
        digest.update(digest_of_kernels(_HERE).encode())
    return digest.hexdigest()


def _machine() -> list[str]:
    """What compiled code is for."""
    config: Any = numba.config
    binding: Any = llvmlite.binding
    features = config.CPU_FEATURES
    return [
        numba.__version__,
        llvmlite.__version__,
        platform.python_implementation(),
        str(sys.implementation.cache_tag),
        binding.get_process_triple(),
        config.CPU_NAME or binding.get_host_cpu_name(),
        binding.get_host_cpu_features().flatten() if features is None else features,
        f"{config.BOUNDSCHECK} {config.OPT} {config.DEBUG_DEFAULT if hasattr(config, 'DEBUG_DEFAULT') else ''}",
    ]


class KernelFolder:
    """The compiled kernels of one folder of sources.

    Attributes:
        sources: Where their sources are.
        stamp: The digest of these.
        name: The folder's name: that of the sources, and a digest of all that the code depends on.
    """

    def __init__(self, sources: Path) -> None:
        self.sources = sources
        self.stamp = digest_of_kernels(sources)
        digest = hashlib.blake2b("\0".join([self.stamp, *_machine()]).encode(), digest_size=8).hexdigest()
        self.name = f"kernels-{sources.name}-{digest}"

    @cached_property
    def path(self) -> Path | None:
        """The folder: a complete one if there is any, else the first that can be written, else none."""
        candidates = [root / self.name for root in roots()]
        for path in candidates:
            if (path / _COMPLETE).is_file():
                return path
        return next((path for path in candidates if _can_write(path)), None)

    @property
    def complete(self) -> bool:
        """Whether all kernels are there."""
        return self.path is not None and (self.path / _COMPLETE).is_file()

    def mark_complete(self) -> None:
        """Says that all kernels are there; what other versions left behind long ago is removed."""
        if self.path is None:
            return
        with suppress(OSError):
            if self.complete:
                os.utime(self.path / _COMPLETE)  # in use
                return
            fresh = self.path / f"{_COMPLETE}.{os.getpid()}"
            fresh.write_text(json.dumps({"stamp": self.stamp, "machine": _machine()}))
            fresh.replace(self.path / _COMPLETE)
            prefix = self.name.rpartition("-")[0]
            for other in self.path.parent.glob(f"{prefix}-*"):
                mark = other / _COMPLETE
                used = (mark if mark.exists() else other).stat().st_mtime
                if other != self.path and time.time() - used > _STALE_DAYS * 86400:
                    shutil.rmtree(other, ignore_errors=True)


def _can_write(path: Path) -> bool:
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError:
        return False
    return True


@cache
def kernel_folder(sources: Path) -> KernelFolder:
    """The folder for the kernels whose sources are there."""
    return KernelFolder(sources)


class _Locator(caching._CacheLocator):
    """Tells numba where."""

    def __init__(self, py_func: Any, py_file: str, folder: KernelFolder) -> None:
        self._py_file = py_file
        self._folder = folder
        self._disambiguator = py_func.__module__.rpartition(".")[0].replace(".", "_") or "main"

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> _Locator | None:
        folder = kernel_folder(Path(py_file).parent)
        return None if folder.path is None else cls(py_func, py_file, folder)

    def get_cache_path(self) -> str:
        return str(self._folder.path)

    def get_source_stamp(self) -> str:
        return self._folder.stamp

    def get_disambiguator(self) -> str:
        return self._disambiguator


class _Reading(caching.CompileResultCacheImpl):
    _locator_classes = [_Locator]  # type: ignore[list-item] # noqa: RUF012 - numba's


class KernelCache(caching.FunctionCache):
    """Numba's cache of a function, in the folder above. What cannot be read or written is compiled, not raised."""

    _impl_class = _Reading

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The compiled function for a signature, or None."""
        try:
            return super().load_overload(sig, target_context)  # type: ignore[no-untyped-call]
        except Exception:
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keeps a compiled function, if that is possible."""
        with suppress(Exception):
            super().save_overload(sig, data)  # type: ignore[no-untyped-call]
