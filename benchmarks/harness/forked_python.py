"""A command like `python` for launchers: what it runs is forked from a process that has imported everything."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import runpy
import selectors
import signal
import socket
import struct
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.harness import zygote

_STATUS = struct.Struct("<i")

# Asks for the process, forwards signals to it, and ends as it has ended; if this one is killed, that one is too.
_COMMAND = """#!{python} -IS
import json, os, signal, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
asked = json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]).encode()
socket.send_fds(server, [len(asked).to_bytes(4, "little")], [0, 1, 2])
server.sendall(asked)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, lambda number, _: server.send(bytes([number])))
answer = server.recv(4)
status = int.from_bytes(answer, "little", signed=True) if answer else 1
if status < 0:
    signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
    os.kill(os.getpid(), -status)
sys.exit(status)
"""


@contextlib.contextmanager
def forked_python() -> Iterator[Path]:
    """The command, which takes `[-u] -m MODULE ARGUMENTS`.

    torchrun starts its ranks by it if PYTHON_EXEC names it, and a `zygote.Program` whatever it starts with Python.
    """
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        address, command = Path(folder, "socket"), Path(folder, "python")
        listener.bind(str(address))
        listener.listen(64)
        command.write_text(_COMMAND.format(python=sys.executable, address=str(address)))
        command.chmod(0o700)
        theirs, ours = zygote.context.Pipe(duplex=False)
        server = zygote.process(_serve, listener, theirs)
        theirs.close()
        try:
            yield command
        finally:
            ours.close()
            server.join(60)


def _serve(listener: socket.socket, asker: Connection) -> None:
    """Runs what is asked for until the asker has ended, and then ends all of it."""
    fork = multiprocessing.get_context("fork")
    running: dict[socket.socket, multiprocessing.process.BaseProcess] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        selector.register(asker, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                stub = key.fileobj
                if stub is asker:
                    for process in running.values():
                        process.kill()
                    return
                if stub is listener:
                    stub = listener.accept()[0]
                    request, fds = _receive(stub)
                    running[stub] = process = fork.Process(target=_run, args=(*request, fds))
                    process.start()
                    for fd in fds:
                        os.close(fd)
                    selector.register(stub, selectors.EVENT_READ)
                    selector.register(process.sentinel, selectors.EVENT_READ, stub)
                elif key.data is not None:
                    selector.unregister(key.fileobj)
                    process = running.pop(key.data)
                    process.join()
                    with contextlib.suppress(OSError):  # it was killed
                        key.data.send(_STATUS.pack(process.exitcode))
                    with contextlib.suppress(KeyError):
                        selector.unregister(key.data)
                    key.data.close()
                elif isinstance(stub, socket.socket) and stub in running:
                    numbers = stub.recv(64)
                    if not numbers:
                        selector.unregister(stub)
                    for number in numbers or [signal.SIGKILL]:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(running[stub].pid or 0, number)


def _receive(stub: socket.socket) -> tuple[tuple[list[str], dict[str, str], str], list[int]]:
    size, fds, _, _ = socket.recv_fds(stub, 4, 3)
    with stub.makefile("rb") as stream:
        arguments, environment, folder = json.loads(stream.read(int.from_bytes(size, "little")))
    return (arguments, environment, folder), fds


def _run(arguments: list[str], environment: dict[str, str], folder: str, fds: list[int]) -> None:
    os.setsid()
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    given = [argument for argument in arguments[:2] if argument != "-u"] + arguments[2:]
    assert given[0] == "-m", f"python {' '.join(arguments)}: only modules are run"
    sys.argv = given[1:]
    sys.modules.pop(f"{given[1]}.__main__", None)
    runpy.run_module(given[1], run_name="__main__", alter_sys=True)
