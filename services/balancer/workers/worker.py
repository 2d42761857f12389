"""A worker: one process that computes one plan after another, until its balancer is gone."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import socket
import struct
import traceback
from pathlib import Path

from evenkeel.partitioning.rounds import RoundPlan
from services.balancer.decisions import PlanFailure, Reason
from services.balancer.planning import plan_or_failure
from services.balancer.workers.arena import Arena
from services.balancer.workers.exchange import read_round, write_result

MESSAGE = struct.Struct("<qq")
"""Both ways: the length of a message in the arena; to the worker also whether its search is to be the cheapest."""

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_OUT_OF_MEMORY_FIRST = 900  # of 1000: the kernel ends workers before their balancer
_MAX_TRACEBACK = 4000


def run_worker(end: socket.socket, rounds: Arena, plans: Arena, *, memory_bytes: int) -> None:
    """Computes plans until the other end is closed.

    Args:
        end: tells of a round, is told of its plan.
        rounds: where rounds are written.
        plans: where plans are to be written.
        memory_bytes: what the process may take in addition to what it has now.
    """
    _limit_memory(memory_bytes)
    while message := end.recv(MESSAGE.size):
        nbytes, is_cheap = MESSAGE.unpack(message)
        written = write_result(plans, _plan(rounds, nbytes, is_cheap=bool(is_cheap), memory_bytes=memory_bytes))
        end.send(MESSAGE.pack(written, 0))


def _plan(rounds: Arena, nbytes: int, *, is_cheap: bool, memory_bytes: int) -> RoundPlan | PlanFailure:
    try:
        samples, options = read_round(*rounds.read(nbytes))
        return plan_or_failure(samples, options.cheapest() if is_cheap else options)
    except MemoryError as error:
        detail = f"a partition may take {memory_bytes} bytes of memory (worker_memory_bytes): {error}"
        return PlanFailure(reason=Reason.PARTITION_FAILED, detail=detail)
    except Exception as error:
        detail = f"{type(error).__name__}: {error}"
        return PlanFailure(
            reason=Reason.PARTITION_FAILED, detail=detail, trace=traceback.format_exc()[-_MAX_TRACEBACK:]
        )


def ends_with_parent(parent: int, name: str) -> None:
    """Has the kernel kill this process when its parent ends; names it for `ps` and `top`."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()), 0, 0, 0)
    libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it had ended before
        os._exit(0)


def ignore_stop_signals() -> None:
    """Those of a terminal or a service manager reach all processes; the balancer's own decides when its workers end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _limit_memory(more_bytes: int) -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(_OUT_OF_MEMORY_FIRST))
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + more_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is no reason to fill a disk
