"""Programs run one after the other, and those that go wrong made short."""

from __future__ import annotations

from collections import Counter
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
