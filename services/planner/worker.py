"""The planner's workers: each answers one request and ends, so that none leaves anything behind.

A worker is told of its request, and tells of its answer, in frames: a kind, a length, and as many bytes.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import struct
import sys
from dataclasses import asdict
from typing import NoReturn

from evenkeel.placement import PlanRequest, Table, Topology, plan
from services.operations import zygote
from services.operations.children import ends_with_parent, limit_memory
from services.planner.work import Job, answer

FRAME = struct.Struct("<cq")
"""To the worker: `J`, the job; `B`, the body. From it: `L`, the time limit; `F`, the facts; `A`, the answer."""
SECONDS = struct.Struct("<d")

_NICE = 10


def run_worker(end: socket.socket, memory_bytes: int) -> None:
    """Answers the one request that comes over a socket."""
    os.nice(_NICE)
    with end, end.makefile("rb") as source:
        head = FRAME.unpack(source.read(FRAME.size))
        job = Job(**json.loads(source.read(head[1])))
        body = source.read(FRAME.unpack(source.read(FRAME.size))[1])
        limit_memory(memory_bytes)
        gc.disable()  # it ends before garbage matters
        facts, document = answer(job, body, lambda limit: end.sendall(frame(b"L", SECONDS.pack(limit))))
        end.sendall(frame(b"F", json.dumps(asdict(facts)).encode()))
        end.sendall(frame(b"A", document))


def frame(kind: bytes, content: bytes) -> bytes:
    """A kind, a length, and the content."""
    return FRAME.pack(kind, len(content)) + content


def _prepare() -> tuple[float, dict[str, str]]:
    """One small plan loads and warms whatever plans need."""
    tables = tuple(Table(name=str(i), rows=1000 << i, dim=8, group=str(i % 2)) for i in range(5))
    plan(PlanRequest(tables=tables, topology=Topology(ranks=2, hbm_bytes=1_300 << 20, host_bytes=1 << 20)))
    return 1.0, {}


def _work(fds: list[int], memory_bytes: int) -> None:
    run_worker(socket.socket(fileno=fds[0]), memory_bytes)


TRADE = zygote.Trade(prepare=_prepare, work=_work)


def run(control: socket.socket) -> NoReturn:
    """The zygote as all that a process does."""
    zygote.run(control, TRADE)


if __name__ == "__main__":
    ends_with_parent(int(sys.argv[2]), "evenkeel-zygote")
    run(socket.socket(fileno=int(sys.argv[1])))
