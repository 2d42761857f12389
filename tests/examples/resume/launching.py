"""Starts the programs of `examples.resume` as a launcher does, ends them as a scheduler or a fault does."""

import signal
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import zygote
from examples.resume.job import read_ledger
from tests.examples.launched import environments

SECONDS = 240.0  # for what takes ten on an idle machine


class Job:
    """The ranks of one run of a program."""

    def __init__(self, program: str, ranks: int, folder: Path, *arguments: str, **environment: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        run = len(list(folder.glob("*-0.out")))
        self._environment = environments(ranks, f"{folder}-{run}")
        self._outputs = [folder / f"{run}-{rank}.out" for rank in range(ranks)]

        def start(rank: int, output: Path) -> zygote.Program:
            return zygote.Program(
                f"examples.resume.{program}", "--folder", str(folder), *arguments, output=output,
                **self._environment(rank), **environment,
            )  # fmt: skip

        self._start = start
        self.ranks = [start(rank, output) for rank, output in enumerate(self._outputs)]

    def start(self, rank: int) -> None:
        """A rank that was killed, or one more, in a process of its own."""
        self._outputs.append(self.folder / f"late-{rank}.out")
        self.ranks[rank : rank + 1] = [self._start(rank, self._outputs[-1])]

    def output(self) -> str:
        """What all ranks have printed."""
        return "".join(path.read_text() for path in self._outputs)

    def until(self, step: int) -> None:
        """Waits until a rank has trained so many steps."""
        deadline = time.monotonic() + SECONDS
        while not any(line["step"] >= step for line in ledger(self.folder)):
            assert time.monotonic() < deadline, self.output()
            assert all(rank.poll() is None for rank in self.ranks), self.output()
            time.sleep(0.02)

    def send(self, number: signal.Signals) -> None:
        for rank in self.ranks:
            rank.send_signal(number)

    def codes(self) -> list[int]:
        """The exit codes, when all have ended by themselves."""
        try:
            return [rank.wait(SECONDS) for rank in self.ranks]
        finally:
            for rank in self.ranks:
                rank.kill()

    def ended(self) -> str:
        """What rank 0 has told of the training, when all have ended well."""
        codes = self.codes()
        assert codes == [0] * len(self.ranks), self.output()
        lines = self._outputs[0].read_text().splitlines()
        return "\n".join(line for line in lines if line.startswith(("epoch ", "weights ")))


def ledger(folder: Path) -> list[dict[str, Any]]:
    """What is trained, in the order of steps and ranks."""
    lines = read_ledger(folder / "ledger") if (folder / "ledger").exists() else []
    return sorted(lines, key=lambda line: (line["step"], line["rank"]))


def users(folder: Path, epoch: int) -> list[int]:
    """Who was trained in an epoch, sorted."""
    return sorted(user for line in ledger(folder) if line["epoch"] == epoch for user in line["users"])
