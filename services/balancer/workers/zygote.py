"""The process that workers are forked from: it has imported and compiled everything, and has one thread.

Forked from the balancer's own process before that has threads; where it has some already, as where BLAS starts its own
or when a zygote has died, it is a Python of its own: `python -m services.balancer.workers.zygote FD`.
"""

from __future__ import annotations

import array
import contextlib
import gc
import json
import os
import selectors
import signal
import socket
import struct
import sys
import time
import traceback
from typing import NoReturn

from evenkeel import partitioning
from evenkeel.partitioning.registry import BUILT_IN, strategy_named
from services.balancer.workers.arena import Arena
from services.balancer.workers.worker import ends_with_parent, ignore_stop_signals, run_worker

COMMAND = struct.Struct("<cqq")
"""To the zygote: `F`, fork the worker of this number, memory limit, socket and arenas; `K`, kill it."""
REPORT = struct.Struct("<cqqd")
"""From it: `R`, ready, with the speed of this machine; `F`, forked, number and process id; `X`, ended, wait status."""
MAX_REPORT = 1 << 16

_FDS = 3
REFERENCE_SECONDS = 5.0e-4
"""What `reference_seconds` is on the machine that estimates were fitted on."""


def serve(control: socket.socket) -> None:
    """Forks workers as asked and tells of those that have ended, until the other end is closed; kills the rest then."""
    ignore_stop_signals()
    partitioning.warm_up()
    broken = _load_strategies()
    speed = REFERENCE_SECONDS / reference_seconds()
    gc.collect()
    gc.freeze()  # what workers share with this process, no collection of theirs writes to
    woken, wakes = socket.socketpair()
    wakes.setblocking(False)
    signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    workers: dict[int, int] = {}  # number by process id
    control.send(REPORT.pack(b"R", 0, 0, speed) + json.dumps(broken).encode())
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        selector.register(woken, selectors.EVENT_READ)
        while True:
            ready = {key.fileobj for key, _ in selector.select()}
            if woken in ready:
                woken.recv(4096)
            for number, status in _reap(workers):
                control.send(REPORT.pack(b"X", number, status, 0.0))
            if control in ready:
                data, fds = _receive(control)
                if not data:
                    break
                kind, number, memory_bytes = COMMAND.unpack(data)
                if kind == b"F":
                    pid = _fork(fds, memory_bytes, closing=(control, woken, wakes), selector=selector)
                    for fd in fds:
                        os.close(fd)
                    workers[pid] = number
                    control.send(REPORT.pack(b"F", number, pid, 0.0))
                else:
                    for pid in [pid for pid, known in workers.items() if known == number]:
                        os.kill(pid, signal.SIGKILL)
    for pid in workers:
        os.kill(pid, signal.SIGKILL)


def run(control: socket.socket) -> NoReturn:
    """`serve` as all that a process does, which ends with its parent."""
    status = 1
    try:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            serve(control)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _fork(
    fds: list[int], memory_bytes: int, *, closing: tuple[socket.socket, ...], selector: selectors.BaseSelector
) -> int:
    zygote = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        ends_with_parent(zygote, "evenkeel-worker")
        selector.close()
        for each in closing:
            each.close()
        end, rounds, plans = fds
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            run_worker(socket.socket(fileno=end), Arena(rounds), Arena(plans), memory_bytes=memory_bytes)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _reap(workers: dict[int, int]) -> list[tuple[int, int]]:
    ended = []
    while workers:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            break
        if pid in workers:
            ended.append((workers.pop(pid), status))
    return ended


def _receive(control: socket.socket) -> tuple[bytes, list[int]]:
    fds = array.array("i")
    data, ancillary, _, _ = control.recvmsg(COMMAND.size, socket.CMSG_SPACE(_FDS * fds.itemsize))
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return data, list(fds)


def _load_strategies() -> dict[str, str]:
    """Imports what installed packages add, which would take a worker's time later; returns what failed, and why."""
    broken = {}
    for name in partitioning.strategies():
        if name not in BUILT_IN:
            try:
                strategy_named(name)
            except Exception as error:
                broken[name] = f"{type(error).__name__}: {error}"
    return broken


def reference_seconds() -> float:
    """Processor time of a small plan, which tells how fast a machine is."""
    costs = [(7 * i * i + 13 * i) % 8191 + 1 for i in range(4096)]
    homes = [i // 64 for i in range(4096)]

    def once() -> float:
        began = time.thread_time()
        partitioning.partition(costs, homes, 64)
        return time.thread_time() - began

    return min(once() for _ in range(5))


if __name__ == "__main__":
    ends_with_parent(int(sys.argv[2]), "evenkeel-zygote")
    run(socket.socket(fileno=int(sys.argv[1])))
