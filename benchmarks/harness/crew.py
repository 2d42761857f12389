"""Ranks that stay up for many jobs: real processes with a Gloo group."""

from __future__ import annotations

import logging
import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.harness import zygote
from benchmarks.harness.ranks import run_rank
from benchmarks.harness.steps import Steps, take_steps
from evenkeel import partitioning
from trainer_client.balancing import redistribution

START_SECONDS = 110.0
SECONDS = 60.0  # of patience with a rank
SLACK = 1.0  # seconds past a deadline in which a busy machine may wake a thread
STARVED_SLACK = 8.0  # and one that runs much else besides


class Crew:
    """A world of ranks that take one job after another."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._folder = tempfile.TemporaryDirectory()
        self._ends: list[Connection] = []
        self._results: list[Connection] = []
        self.processes: list[multiprocessing.process.BaseProcess] = []
        self.is_idle = True
        store = str(Path(self._folder.name) / "store")
        for rank in range(self.world_size):
            ours, theirs = zygote.context.Pipe()
            results, unused = zygote.context.Pipe(duplex=False)
            process = zygote.process(run_rank, rank, self.world_size, store, unused, _obey, (theirs,))
            theirs.close()
            unused.close()
            self._ends.append(ours)
            self._results.append(results)  # open until the ranks have ended
            self.processes.append(process)
        for end in self._ends:
            assert end.poll(START_SECONDS), "a rank did not start"
            assert end.recv() == "ready"

    def close(self) -> None:
        """Ends the ranks."""
        for end in self._ends:
            end.close()
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
        self._folder.cleanup()

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def run(self, steps: Steps) -> Iterator[Run]:
        """Starts a job on all ranks; at the end of the block it is stopped and checked."""
        for end in self._ends:
            end.send(steps)
        run = Run(steps, self.world_size, self._ends)
        self.is_idle = False  # for good, should anything go wrong
        yield run
        run.stop()
        self.is_idle = True
        run.check()


class Run:
    """A job under way.

    Attributes:
        steps: What it does.
        told: (step, mode, reason) of every step so far.
        results: What each rank recorded, after `stop`.
    """

    def __init__(self, steps: Steps, world_size: int, ends: list[Connection]) -> None:
        self.steps = steps
        self.told: list[tuple[int, str, str]] = []
        self.results: list[dict[str, Any]] = []
        self._world_size = world_size
        self._ends = ends

    def until(
        self, *, mode: str | None = None, reason: str | None = None, times: int = 1, seconds: float = 60.0
    ) -> int:
        """Waits for so many further steps in a row, of this mode and reason if given; returns how many it took."""
        deadline = time.monotonic() + seconds
        begin, row = len(self.told), 0
        while row < times:
            if not self._ends[0].poll(max(0.0, deadline - time.monotonic())):
                raise AssertionError(f"no {times} steps of {mode}, {reason} within {seconds} s; last {self.told[-20:]}")
            said = self._ends[0].recv()
            assert said[0] == "step", said[1]
            self.told.append(said[1])
            matches = mode in (None, said[1][1]) and reason in (None, said[1][2])
            row = row + 1 if matches else 0
        return len(self.told) - begin

    def catch_up(self) -> None:
        """Takes up the steps that have ended unheard, so that `until` counts from now on."""
        while self._ends[0].poll():
            said = self._ends[0].recv()
            assert said[0] == "step", said[1]
            self.told.append(said[1])

    def stop(self) -> None:
        """Ends the job and takes the results."""
        self._ends[0].send("stop")
        answers = []
        for end in self._ends:
            deadline = time.monotonic() + SECONDS
            while True:
                assert end.poll(max(0.0, deadline - time.monotonic())), f"a rank hangs; last {self.told[-20:]}"
                kind, value = end.recv()
                if kind != "step":
                    break
                self.told.append(value)
            assert kind == "done", value
            answers.append(value)
        self.results = answers

    def check(self) -> None:
        """Asserts what holds whatever has happened."""
        records = [result["records"] for result in self.results]
        assert len({len(rank_records) for rank_records in records}) == 1
        for number, step in enumerate(zip(*records, strict=True)):
            assert {record["round"] for record in step} == {number}
            assert len({(record["mode"], record["reason"]) for record in step}) == 1, (number, step)
            trained = sorted(sample for record in step for sample in record["ids"])
            assert trained == self.steps.expected(self._world_size, number), f"step {number}: samples lost or doubled"
        for number, blocked in enumerate(self.blocked):
            assert blocked <= STARVED_SLACK + self.steps.slowness(number), (number, blocked)
        assert all(result["close_seconds"] <= 2.0 + STARVED_SLACK for result in self.results)
        assert not any(result["breaker_changes"] for result in self.results[1:]), "only the lead asks"

    @property
    def blocked(self) -> list[float]:
        """Of each step, the longest time for which a rank's loop stood still until its batch came."""
        steps = zip(*(result["records"] for result in self.results), strict=False)
        return [max(record["blocked"] for record in step) for step in steps]

    @property
    def modes(self) -> list[str]:
        """Of every step."""
        return [record["mode"] for record in self.results[0]["records"]]


def _obey(rank: int, end: Connection) -> None:
    logging.getLogger("trainer_client").addHandler(warnings := _Warnings())
    # Compiling, where nothing is cached, takes longer than a test waits for a step.
    for turn in range(dist.get_world_size()):
        if turn == rank:
            partitioning.warm_up()
            redistribution.warm_up()
        dist.barrier()
    end.send("ready")
    while True:
        try:
            steps = end.recv()
        except (EOFError, OSError):
            return
        if steps == "stop":  # of a job that had ended already
            continue
        warnings.messages.clear()
        stop = False

        def stopped() -> bool:
            nonlocal stop
            if not stop and end.poll():
                stop = end.recv() == "stop"
            return stop

        try:
            result = take_steps(rank, steps, stopped, lambda said: end.send(("step", said)))
            end.send(("done", {**result, "warnings": list(warnings.messages)}))
        except Exception as error:
            import traceback

            end.send(("failed", f"rank {rank}: {error}\n{traceback.format_exc()}"))


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
