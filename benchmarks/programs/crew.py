"""Ranks that stay up for many programs; those that fail are replaced."""

from __future__ import annotations

import multiprocessing.connection
import random
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import grpc
from torch._C._distributed_c10d import TCPStore

from benchmarks.harness import zygote
from benchmarks.harness.balancer_process import ServiceProcess, running_balancer
from benchmarks.harness.relay import Ask, Hook, Refused, Relay
from benchmarks.programs import rank as ranks
from benchmarks.programs.language import Kind, Program

START_SECONDS = 300.0  # compiles the kernels first, if nothing has yet
GRACE_SECONDS = 8.0  # in which every rank must raise what one has raised


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What the ranks of a program told.

    Attributes:
        answers: By rank; None: it never answered.
        troubles: Ranks that hung or died, services that died.
        logs: The end of what each rank wrote.
    """

    answers: list[dict[str, Any] | None]
    troubles: list[str] = field(default_factory=list)
    logs: str = ""


class Crew:
    """Processes for the ranks of programs, and the services that they ask."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        if not zygote.is_warm():
            zygote.context.set_forkserver_preload(["benchmarks.programs.preloaded"])
        self._stack = ExitStack()
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._ends: dict[int, Connection] = {}
        self._processes: dict[int, ForkServerProcess] = {}
        self._services = Services(self._stack)
        self._number = 0

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        for end in self._ends.values():
            end.close()
        for process in self._processes.values():
            process.join(2)
            zygote.end(process)
        self._stack.close()

    def run(self, program: Program) -> Outcome:
        """Runs a program to its end, within a bounded time."""
        self._number += 1
        kinds = {plan.kind for plan in program.balancers}
        addresses = self._services.start(kinds, program.seed)
        for rank in range(program.ranks):
            self._start(rank)
        for rank in range(program.ranks):
            if not self._ends[rank].poll(START_SECONDS):
                raise RuntimeError(f"rank {rank} did not start")
            assert self._ends[rank].recv() == "ready"
        logs = {rank: self._log(rank).stat().st_size for rank in range(program.ranks)}
        folder = self._folder / f"program{self._number}"
        folder.mkdir()
        for rank in range(program.ranks):
            setting = ranks.Setting(
                job=f"programs-{self._folder.name}-{self._number}",
                addresses=addresses,
                folder=folder,
                device=f"cuda:{rank}" if self.backend == "nccl" else "cpu",
            )
            self._ends[rank].send((self._number, program, setting))
        outcome = self._collect(program)
        outcome.troubles += self._services.check(kinds)
        failed = any(answer is None or "error" in answer or answer["leaked"] for answer in outcome.answers)
        if outcome.troubles or failed:
            outcome.logs = "\n".join(self._written(rank, begin) for rank, begin in logs.items())
            for rank in range(program.ranks):
                self._end(rank)
        else:
            for rank in range(program.ranks):
                self._ends[rank].send("next")
        return outcome

    def _collect(self, program: Program) -> Outcome:
        """Waits for the ranks: all the same while all run, and for a grace once one has raised."""
        answers: list[dict[str, Any] | None] = [None] * program.ranks
        troubles: list[str] = []
        waiting = set(range(program.ranks))
        deadline = time.monotonic() + 2 * ranks.GROUP_SECONDS + 10.0
        raised_at: float | None = None
        late: set[int] = set()
        while waiting:
            now = time.monotonic()
            until = deadline if raised_at is None or late else min(deadline, raised_at + GRACE_SECONDS)
            if now >= until:
                if raised_at is None or late or now >= deadline:
                    break
                # The others wait for a rank that has ended with an error: now it goes, as its process would.
                late = set(waiting)
                for rank, answer in enumerate(answers):
                    if answer is not None and "error" in answer:
                        self._processes[rank].kill()
                continue
            ready = multiprocessing.connection.wait([self._ends[rank] for rank in waiting], until - now)
            for rank in sorted(waiting):
                if self._ends[rank] not in ready:
                    continue
                waiting.remove(rank)
                try:
                    answers[rank] = self._ends[rank].recv()
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join(5)
                    troubles.append(f"died: rank {rank} with exit code {self._processes[rank].exitcode}")
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
                    continue
                if "error" in (answers[rank] or {}) and raised_at is None:
                    raised_at = time.monotonic()
        if waiting:
            places = [f"  rank {rank} in {where(self._stacks(rank).read_text())}" for rank in sorted(waiting)]
            troubles.append("\n".join([f"hang: {len(waiting)} ranks of {program.ranks}", *places]))
        elif late and not troubles:
            for rank in late:
                answer = answers[rank]
                if answer is not None and "error" in answer:
                    answer["message"] = "(only when another rank had ended) " + answer["message"]
        return Outcome(answers=answers, troubles=troubles)

    # ------------------------------------------------------------------ processes

    def _start(self, rank: int) -> None:
        if rank in self._processes and self._processes[rank].exitcode is None:
            return
        ours, theirs = zygote.context.Pipe()
        self._processes[rank] = zygote.process(
            ranks.serve, rank, theirs, self._store.port, self.backend, self._log(rank), self._stacks(rank)
        )
        theirs.close()
        self._ends[rank] = ours

    def _end(self, rank: int) -> None:
        self._ends[rank].close()
        zygote.end(self._processes[rank])

    def _log(self, rank: int) -> Path:
        return self._folder / f"rank{rank}.log"

    def _stacks(self, rank: int) -> Path:
        return self._folder / f"rank{rank}.stacks"

    def _written(self, rank: int, begin: int) -> str:
        with self._log(rank).open("rb") as file:
            file.seek(begin)
            return f"rank {rank}: " + file.read().decode(errors="replace")[-12000:]


def where(stacks: str) -> str:
    """The innermost of this library's places in a thread's stack, the last thread being the main one."""
    lines = stacks.rpartition("Thread ")[2].splitlines()
    own = [line for line in lines if "/trainer_client/" in line or "/benchmarks/" in line]
    return " < ".join(line.strip().removeprefix("File ") for line in own[:3]) or "no known place"


class Services:
    """A balancer, and a relay in front of it that harms what passes; started when first needed."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._balancer: ServiceProcess | None = None
        self._relay: Relay | None = None

    def start(self, kinds: set[Kind], seed: int) -> dict[str, str]:
        """Addresses by kind of balancer, for those that a program asks."""
        addresses = {"gone": "127.0.0.1:9"}  # discard: nothing listens there
        if not kinds & {"service", "faulty"}:
            return addresses
        if self._balancer is None:
            self._balancer = self._stack.enter_context(running_balancer())
            self._relay = self._stack.enter_context(Relay(self._balancer.port))
        assert self._relay is not None
        self._relay.hook = _harm(random.Random(seed))
        return addresses | {"service": self._balancer.address, "faulty": self._relay.address}

    def check(self, kinds: set[Kind]) -> list[str]:
        """Whether the balancer lives; another is started in its place."""
        if self._balancer is None or self._relay is None or not kinds & {"service", "faulty"}:
            return []
        self._relay.heal()
        code = self._balancer.running.poll()
        if code is None:
            return []
        self._balancer.start()
        return [f"died: the balancer with exit code {code}"]


def _harm(rng: random.Random) -> Hook:
    """Loses, holds, garbles and cuts answers."""

    def harm(request: bytes, ask: Ask) -> bytes:
        chosen = rng.random()
        if chosen < 0.10:
            raise Refused(grpc.StatusCode.UNAVAILABLE)
        answer = ask(request)
        if chosen < 0.20:
            time.sleep(2 * ranks.FAULTY_SECONDS)
        elif chosen < 0.30:
            at = rng.randrange(len(answer))
            answer = answer[:at] + bytes([answer[at] ^ rng.randint(1, 255)]) + answer[at + 1 :]
        elif chosen < 0.35:
            answer = answer[: rng.randrange(len(answer))]
        return answer

    return harm
