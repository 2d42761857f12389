"""Programs run one after the other or several at a time, and those that go wrong made short."""

from __future__ import annotations

import argparse
import multiprocessing
import multiprocessing.util
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.programs.crew import Crew, Outcome
from benchmarks.programs.judge import Verdict, judge
from benchmarks.programs.language import Program, listing
from benchmarks.programs.shrink import shrink


class Search:
    """Runs programs on ranks of its own and shortens those that go wrong."""

    def __init__(self, crew: Crew, *, tries: int, folder: Path) -> None:
        self.crew, self.tries, self.folder = crew, tries, folder
        self._known: Counter[str] = Counter()

    def take(self, program: Program) -> tuple[Verdict, dict[str, Any] | None]:
        """Runs one program; returns what it came to, and what it found, if anything."""
        outcome = self.crew.run(program)
        verdict = judge(program, outcome)
        if not verdict.findings:
            return verdict, None
        self._known[verdict.signature] += 1
        first = self._known[verdict.signature] == 1
        smallest = program
        if first and self.tries:
            smallest = shrink(program, lambda smaller: self._fails(smaller, verdict.signature), tries=self.tries)
        found = {
            "seed": program.seed,
            "signature": verdict.signature,
            "findings": verdict.findings[:4],
            "listing": listing(smallest),
        }
        self._write(program, outcome, verdict, found)
        return verdict, found

    def _fails(self, program: Program, signature: str) -> bool:
        return judge(program, self.crew.run(program)).signature == signature

    def _write(self, program: Program, outcome: Outcome, verdict: Verdict, found: dict[str, Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        traces = [answer["trace"] for answer in outcome.answers if answer is not None and "trace" in answer]
        parts = [found["listing"], "", *verdict.findings, "", "as drawn:", listing(program), "", *traces, outcome.logs]
        (self.folder / f"seed{program.seed}.txt").write_text("\n".join(parts) + "\n")


_search: list[Search] = []  # one in a process that searches


def _begin_search(options: argparse.Namespace) -> None:
    crew = Crew(backend=options.backend, group_seconds=options.group_seconds)
    multiprocessing.util.Finalize(None, crew.__exit__, exitpriority=10)  # with the process
    _search.append(Search(crew, tries=options.tries, folder=options.findings))


def _take(program: Program) -> tuple[Verdict, dict[str, Any] | None]:
    return _search[0].take(program)


def search(
    programs: Iterator[Program], options: argparse.Namespace, jobs: int, minutes: float | None
) -> Iterator[tuple[Program, Verdict, dict[str, Any] | None]]:
    """What programs come to, in their order.

    Args:
        programs: In any number.
        options: How each of the jobs runs them: `backend`, `group_seconds`, `tries`, `findings`.
        jobs: Programs at the same time.
        minutes: After which none begins.
    """
    until = time.monotonic() + 60 * (minutes or 1e9)
    pool = ProcessPoolExecutor(
        jobs, multiprocessing.get_context("spawn"), initializer=_begin_search, initargs=(options,)
    )
    with pool:
        running: deque[tuple[Program, Future[Any]]] = deque()
        while True:
            while len(running) < 2 * jobs and time.monotonic() < until:
                program = next(programs, None)
                if program is None:
                    break
                running.append((program, pool.submit(_take, program)))
            if not running:
                return
            program, future = running.popleft()
            yield program, *future.result()
