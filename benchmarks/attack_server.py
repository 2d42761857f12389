"""A balancer whose event loop is watched: `python -m benchmarks.attack_server ARGUMENTS…`.

The file that the variable `PROBE` names holds one double: the longest time, in seconds of the loop's own thread, that
the loop took to come round. Time that other processes took from it does not count; whoever reads may set it to zero.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import struct
import sys
import time
from pathlib import Path

from services.balancer.__main__ import serve
from services.balancer.settings import load_settings
from services.operations.program import run_service

PROBE = "ATTACK_PROBE"
_DOUBLE = struct.Struct("d")


def watch_loop(path: Path) -> None:
    """Measures every turn of event loops from now on."""
    with path.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), _DOUBLE.size)
    run_once = asyncio.base_events.BaseEventLoop._run_once  # type: ignore[attr-defined]

    def watched(loop: asyncio.BaseEventLoop) -> None:
        began = time.thread_time()
        run_once(loop)
        took = time.thread_time() - began
        if took > _DOUBLE.unpack_from(memory)[0]:
            _DOUBLE.pack_into(memory, 0, took)

    asyncio.base_events.BaseEventLoop._run_once = watched  # type: ignore[attr-defined]


class Probe:
    """The other side of the file."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(_DOUBLE.pack(0.0))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _DOUBLE.size)

    def take(self) -> float:
        """The longest turn since the last time, in seconds."""
        longest: float = _DOUBLE.unpack_from(self._memory)[0]
        _DOUBLE.pack_into(self._memory, 0, 0.0)
        return longest


if __name__ == "__main__":
    watch_loop(Path(os.environ.pop(PROBE)))
    sys.exit(run_service(load_settings, serve, sys.argv[1:]))
