"""Getting kernels ready: from a complete folder at once, else compiled by processes beside this one."""

from __future__ import annotations

import atexit
import errno
import fcntl
import importlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from evenkeel.partitioning.kernel_cache import KernelFolder, kernel_folder

logger = logging.getLogger(__name__)

PATIENCE = 300.0  # seconds that another process may take to compile what this one waits for
_LOOK = 0.1
_EXIT_SECONDS = 5.0  # that a process which ends gives what it loads


@dataclass(frozen=True, slots=True)
class KernelSet:
    """The kernels of one folder of sources.

    Attributes:
        sources: The folder.
        load: "module:function" that calls all of them, so that they are compiled or loaded here.
        parts: The same for parts that take about as long, to be compiled by a process each; the longest first.
    """

    sources: Path
    load: str
    parts: tuple[str, ...]

    @property
    def folder(self) -> KernelFolder:
        """Where they are kept."""
        return kernel_folder(self.sources)

    @property
    def complete(self) -> bool:
        """Whether all of them are compiled."""
        return self.folder.complete

    def load_here(self) -> None:
        """Loads them in this process; compiles what is not there."""
        _function(self.load)()
        self.folder.mark_complete()


def ready(sets: Sequence[KernelSet], ending: threading.Event | None = None) -> None:
    """Gets kernels ready in this process; those that no folder has are compiled side by side.

    Args:
        sets: What is needed.
        ending: Once it is set nothing more is compiled or loaded; None: the caller waits for it.
    """
    _compile(sets, ending)
    for each in sets:
        if ending is None or not ending.is_set():
            each.load_here()


class Preparation:
    """Kernels that get ready: loaded before this returns if they are compiled, else in the background.

    In the background other processes compile: a process that ended within the compiler's own code would abort.
    """

    def __init__(self, sets: Sequence[KernelSet]) -> None:
        self._sets = tuple(sets)
        self._done, self._ending = threading.Event(), threading.Event()
        if all(each.complete for each in self._sets):
            ready(self._sets)
            self._done.set()
        else:
            thread = threading.Thread(target=self._run, name="evenkeel-kernels", daemon=True)
            thread.start()
            atexit.register(self._end, thread)

    @property
    def ready(self) -> bool:
        """Whether calling them compiles nothing."""
        return self._done.is_set()

    def wait(self, seconds: float) -> bool:
        """Waits until they are; whether they are."""
        return self._done.wait(seconds)

    def _run(self) -> None:
        try:
            ready(self._sets, self._ending)
        except Exception:
            logger.warning("kernels could not be prepared; they are compiled when they are called", exc_info=True)
        finally:
            self._done.set()

    def _end(self, thread: threading.Thread) -> None:
        self._ending.set()
        thread.join(_EXIT_SECONDS)


def run_part(part: str) -> None:
    """In a process of its own: compiles a part, giving way to whatever else the machine does."""
    os.nice(10)
    _function(part)()


def _function(name: str) -> Callable[[], None]:
    module, _, function = name.partition(":")
    found: Callable[[], None] = getattr(importlib.import_module(module), function)
    return found


def _compile(sets: Sequence[KernelSet], ending: threading.Event | None) -> None:
    """Compiles what is missing into the folders; one process of all that share them does it, the others wait.

    A single part is left to a caller who waits.
    """
    missing = [each for each in sets if not each.complete and each.folder.path is not None]
    if not missing or not sys.executable:
        return
    with _first_of_all(missing[0].folder, ending) as lock:
        parts = [part for each in missing if not each.complete for part in each.parts]
        if len(parts) > (ending is None):
            _run_side_by_side(parts, lock, ending)


def _run_side_by_side(parts: Sequence[str], lock: IO[bytes] | None, ending: threading.Event | None) -> None:
    """Runs a process for each part, some at a time.

    They hold the lock as well: should this process end before them, as in a job that fails at its start, the next one
    waits for what they are compiling instead of compiling the same beside them.
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    command = "import sys; from evenkeel.partitioning.preparing import run_part; run_part(sys.argv[1])"
    waiting, running = list(parts), list[subprocess.Popen[bytes]]()
    deadline = time.monotonic() + PATIENCE
    try:
        while waiting or running:
            while waiting and len(running) < (os.cpu_count() or 1):
                running.append(
                    subprocess.Popen(
                        [sys.executable, "-c", command, waiting.pop(0)], env=environment, stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                        pass_fds=[] if lock is None else [lock.fileno()],
                    )
                )  # fmt: skip
            if time.monotonic() > deadline or _over(ending):
                return
            running = [process for process in running if process.poll() is None]
    except OSError:
        return  # no process can be started: what is missing is compiled here
    finally:
        for process in running:
            process.kill()
            process.wait()


def _over(ending: threading.Event | None) -> bool:
    """Waits a moment; whether the process ends."""
    if ending is not None:
        return ending.wait(_LOOK)
    time.sleep(_LOOK)
    return False


@contextmanager
def _first_of_all(folder: KernelFolder, ending: threading.Event | None) -> Iterator[IO[bytes] | None]:
    """Holds the folder's lock; goes on without it where there are no locks, or its holder takes too long."""
    assert folder.path is not None
    deadline = time.monotonic() + PATIENCE
    file = None
    with suppress(OSError):
        file = (folder.path / "lock").open("wb")
    held = False
    try:
        while file is not None and time.monotonic() < deadline and not folder.complete:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held = True
                break
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    break
            if _over(ending):
                break
        yield file if held else None
    finally:
        if file is not None:
            if held:
                fcntl.flock(file, fcntl.LOCK_UN)  # a process that was forked meanwhile has the file open as well
            file.close()
