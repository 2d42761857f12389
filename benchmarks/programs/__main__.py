"""Random programs of users on real ranks: nothing lost, nothing doubled, gradients right, errors clear, no hang.

    python -m benchmarks.programs --count 2000 --ranks 2-4 --json benchmarks/results/programs.json
    python -m benchmarks.programs --seed 17 --count 1 --show          # one program again, printed
    python -m benchmarks.programs --backend nccl --ranks 2 --minutes 4

A program has several balancers and loaders, loops that end early and on some ranks earlier, errors, nested and zipped
loops, uneven and empty data, rows that change their shape, models with routed tables under DDP or FSDP2, and resumes.
It runs on 2 to 4 ranks that stay up from one program to the next. Every sample is followed, and losses, gradients and
tables are compared with a dense model in one process. A program is right, or it ends with one documented error that is
the same on all ranks. What is neither is printed, and written into `out/programs` with what the ranks wrote; the exit
status is 1 then.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from benchmarks.harness.results import write
from benchmarks.programs.crew import Crew, Outcome
from benchmarks.programs.draw import draw
from benchmarks.programs.judge import Verdict, judge
from benchmarks.programs.language import Program, listing

FINDINGS = Path("out/programs")


@dataclass(slots=True)
class Tally:
    """What was run and what became of it."""

    programs: int = 0
    right: int = 0
    refused: int = 0
    samples: int = 0
    parts: int = 0
    training_steps_compared: int = 0
    balancers: Counter[str] = field(default_factory=Counter)
    rounds: Counter[str] = field(default_factory=Counter)
    findings: list[dict[str, Any]] = field(default_factory=list)

    def add(self, program: Program, verdict: Verdict) -> None:
        """Counts a program."""
        self.programs += 1
        self.right += not verdict.findings and not verdict.refused
        self.refused += verdict.refused
        self.samples += verdict.samples
        self.parts += verdict.parts
        self.training_steps_compared += verdict.compared
        self.rounds += verdict.rounds
        self.balancers.update(plan.kind for plan in program.balancers)
        if verdict.findings:
            self.findings.append({"seed": program.seed, "findings": verdict.findings[:4], "listing": listing(program)})


def main() -> int:
    options = parse_arguments()
    least, _, most = options.ranks.partition("-")
    ranks = int(least), int(most or least)
    tally, started, console = Tally(), time.monotonic(), Console(stderr=True)
    with Crew(options.backend) as crew:
        for seed in track(range(options.seed, options.seed + options.count), "programs", console=console):
            program = draw(seed, ranks)
            if options.show:
                print(listing(program), flush=True)
            outcome = crew.run(program)
            verdict = judge(program, outcome)
            tally.add(program, verdict)
            if verdict.findings:
                print(f"\n{listing(program)}\n-> " + "\n-> ".join(verdict.findings) + "\n", flush=True)
                keep(program, outcome, verdict)
            if time.monotonic() - started > 60 * options.minutes:
                break
    result = {name: getattr(tally, name) for name in Tally.__dataclass_fields__}
    wrong = len(tally.findings)
    print(f"{tally.programs} programs: {tally.right} right, {tally.refused} refused, {wrong} wrong")
    seconds = round(time.monotonic() - started, 1)
    write(options.json, {"backend": options.backend, "seed": options.seed, "seconds": seconds, "wrong": wrong} | result)
    return int(bool(wrong))


def keep(program: Program, outcome: Outcome, verdict: Verdict) -> None:
    """Writes down a program that went wrong, with what its ranks wrote."""
    FINDINGS.mkdir(parents=True, exist_ok=True)
    traces = [answer["trace"] for answer in outcome.answers if answer is not None and "trace" in answer]
    parts = [listing(program), "", *verdict.findings, "", *traces, outcome.logs]
    (FINDINGS / f"seed{program.seed}.txt").write_text("\n".join(parts) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.programs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=200, help="programs, of the seeds from --seed on")
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--ranks", default="2-4", help="processes, or a range of them")
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--minutes", type=float, default=1e9, help="after which no further program begins")
    parser.add_argument("--show", action="store_true", help="print every program")
    parser.add_argument("--json", type=Path, help="where the result goes")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
