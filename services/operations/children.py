"""What child processes of a service have in common: they end with it, and take no more memory than they may."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_OUT_OF_MEMORY_FIRST = 900  # of 1000: the kernel ends workers before their service


def ends_with_parent(parent: int, name: str) -> None:
    """Has the kernel kill this process when its parent ends; names it for `ps` and `top`."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()), 0, 0, 0)
    libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it had ended before
        os._exit(0)


def ignore_stop_signals() -> None:
    """Those of a terminal or a service manager reach all processes; the service's own decides when its children end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def limit_memory(more_bytes: int) -> None:
    """Bounds what this process may take in addition to what it has now."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(_OUT_OF_MEMORY_FIRST))
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + more_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is no reason to fill a disk
