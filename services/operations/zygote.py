"""The process that a service's workers are forked from: it has imported and compiled everything, and has one thread."""

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
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from services.operations.children import ends_with_parent, ignore_stop_signals

COMMAND = struct.Struct("<cqq")
"""To the zygote: `F`, fork the worker of this number, with this memory limit and the descriptors; `K`, kill it."""
REPORT = struct.Struct("<cqqd")
"""From it: `R`, ready, with the speed of this machine; `F`, forked, number and process id; `X`, ended, wait status."""
MAX_REPORT = 1 << 16

_MOST_FDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Trade:
    """What the workers of a zygote do.

    Attributes:
        prepare: Imports and compiles what they need; returns the speed of this machine beside one that estimates were
            fitted on, and what cannot be used, with the reason.
        work: Is all that a worker does, given its descriptors and the memory that it may take.
    """

    prepare: Callable[[], tuple[float, dict[str, str]]]
    work: Callable[[list[int], int], None]


def serve(control: socket.socket, trade: Trade) -> None:
    """Forks workers as asked and tells of those that have ended, until the other end is closed; kills the rest then."""
    ignore_stop_signals()
    speed, broken = trade.prepare()
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
                    pid = _fork(fds, memory_bytes, trade, closing=(control, woken, wakes), selector=selector)
                    for fd in fds:
                        os.close(fd)
                    workers[pid] = number
                    control.send(REPORT.pack(b"F", number, pid, 0.0))
                else:
                    for pid in [pid for pid, known in workers.items() if known == number]:
                        os.kill(pid, signal.SIGKILL)
    signal.set_wakeup_fd(-1)  # or Python complains of it, as workers end after its socket
    for pid in workers:
        os.kill(pid, signal.SIGKILL)


def run(control: socket.socket, trade: Trade) -> NoReturn:
    """`serve` as all that a process does, which ends with its parent."""
    status = 1
    try:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            serve(control, trade)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _fork(
    fds: list[int],
    memory_bytes: int,
    trade: Trade,
    *,
    closing: tuple[socket.socket, ...],
    selector: selectors.BaseSelector,
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
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            trade.work(fds, memory_bytes)
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
    data, ancillary, _, _ = control.recvmsg(COMMAND.size, socket.CMSG_SPACE(_MOST_FDS * fds.itemsize))
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return data, list(fds)
