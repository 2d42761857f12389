"""Random programs of users on real ranks: nothing lost, nothing doubled, gradients right, errors clear, no hang.

    python -m benchmarks.programs --count 2000 --ranks 2-4 --json benchmarks/results/programs.json
    python -m benchmarks.programs --seed 17 --count 1 --show          # one program again, printed
    python -m benchmarks.programs --backend nccl --ranks 2 --minutes 4

A program has several balancers and loaders, loops that end early and on some ranks earlier, errors, nested and zipped
loops, uneven and empty data, rows that change their shape, models with routed tables under DDP or FSDP2, and resumes.
It runs on 2 to 4 ranks that stay up from one program to the next. Every sample is followed, and losses, gradients and
tables are compared with a dense model in one process. A program is right, or it ends with one documented error that is
the same on all ranks. What is neither is shortened, printed, and written into a folder; the exit status is 1 then.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness.results import write
from benchmarks.programs.crew import Crew
from benchmarks.programs.draw import Means, draw
from benchmarks.programs.features import features
from benchmarks.programs.judge import Verdict
from benchmarks.programs.language import Kind, Program, listing
from benchmarks.programs.searching import Search
from trainer_client import Balancer


@dataclass(slots=True)
class Tally:
    """What was run and what became of it."""

    programs: int = 0
    right: int = 0
    refused: int = 0
    samples: int = 0
    parts: int = 0
    compared: int = 0
    features: Counter[str] = field(default_factory=Counter)
    rounds: Counter[str] = field(default_factory=Counter)
    findings: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0

    @classmethod
    def of(cls, result: dict[str, Any]) -> Tally:
        """That of an earlier run, from its result file."""
        return cls(
            programs=result["programs"], right=result["right"], refused=result["refused"], samples=result["samples"],
            parts=result["parts"],
            compared=result["training_steps_compared"], features=Counter(result["features"]),
            rounds=Counter(result["rounds"]), findings=result["findings"], seconds=result["seconds"],
        )  # fmt: skip

    def add(self, program: Program, verdict: Verdict) -> None:
        """Counts a program."""
        self.programs += 1
        self.right += not verdict.findings and not verdict.refused
        self.refused += verdict.refused
        self.samples += verdict.samples
        self.parts += verdict.parts
        self.compared += verdict.compared
        self.rounds += verdict.rounds
        self.features.update(features(program))


def main() -> int:
    options = parse_arguments()
    means = find_means(options)
    tally = Tally()
    if options.go_on and options.json is not None and options.json.exists():
        tally = Tally.of(json.loads(options.json.read_text()))
    before, started = tally.seconds, time.monotonic()
    seeds = range(options.seed + tally.programs, options.seed + options.count)
    programs = (draw(seed, means) for seed in seeds)
    if options.only:
        programs = (program for program in programs if set(options.only) <= features(program))
    crew = Crew(backend=options.backend, group_seconds=options.group_seconds)
    with crew, progress(options.count, tally.programs) as advance:
        search = Search(crew, tries=options.tries, folder=options.findings)
        for program in programs:
            verdict, found = search.take(program)
            tally.add(program, verdict)
            if options.show:
                print(listing(program), flush=True)
            if found is not None:
                tally.findings.append(found)
                print(f"\n{found['listing']}\n-> " + "\n-> ".join(found["findings"]) + "\n", flush=True)
            tally.seconds = before + time.monotonic() - started
            advance(len(tally.findings))
            if tally.programs % 50 == 0 or found is not None:
                write(options.json, report(tally, options, means))
            if tally.seconds > 60 * options.minutes:
                break
    print(
        f"{tally.programs} programs in {tally.seconds:.0f} s: {tally.right} right, {tally.refused} refused, "
        f"{len(tally.findings)} wrong; {tally.samples} samples followed, {tally.compared} training steps compared"
    )
    write(options.json, report(tally, options, means))
    return int(bool(tally.findings))


def find_means(options: argparse.Namespace) -> Means:
    """What this machine lets programs use."""
    least, _, most = options.ranks.partition("-")
    kinds: list[Kind] = ["embedded", "off"]
    if importlib.util.find_spec("grpc") is not None:
        kinds.append("gone")
        if all(
            importlib.util.find_spec(name) is not None for name in ("structlog", "pydantic_settings", "grpc_health")
        ):
            kinds += ["service", "faulty"]
    torchrec = importlib.util.find_spec("torchrec") is not None
    meshes = "peers" in inspect.signature(Balancer.embedded).parameters
    return Means(ranks=(int(least), int(most or least)), kinds=tuple(kinds), torchrec=torchrec, meshes=meshes)


def report(tally: Tally, options: argparse.Namespace, means: Means) -> dict[str, Any]:
    """The result file."""
    return {
        "backend": options.backend,
        "kinds_of_balancers": means.kinds,
        "seed": options.seed, "programs": tally.programs, "seconds": round(tally.seconds, 1),
        "right": tally.right, "refused": tally.refused, "wrong": len(tally.findings),
        "samples": tally.samples, "parts": tally.parts, "training_steps_compared": tally.compared,
        "features": dict(tally.features.most_common()), "rounds": dict(tally.rounds.most_common()),
        "findings": tally.findings,
    }  # fmt: skip


@contextmanager
def progress(count: int, done: int) -> Iterator[Any]:
    """A bar, where there is rich and a terminal."""
    if importlib.util.find_spec("rich") is None or not sys.stderr.isatty():

        def tell(wrong: int) -> None:
            nonlocal done
            done += 1
            if done % 50 == 0:
                print(f"{done} of {count} programs, {wrong} wrong", file=sys.stderr, flush=True)

        yield tell
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("programs", total=count, completed=done)
        yield lambda wrong: bar.update(task, advance=1, description=f"programs, {wrong} wrong")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.programs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=200, help="programs, of the seeds from --seed on")
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--ranks", default="2-4", help="processes, or a range of them")
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--minutes", type=float, default=1e9, help="after which no further program begins")
    parser.add_argument("--group-seconds", type=float, default=12.0, help="after which a collective fails")
    parser.add_argument("--tries", type=int, default=60, help="runs to shorten a program that goes wrong")
    parser.add_argument("--findings", type=Path, default=Path("out/programs"), help="where programs go that went wrong")
    parser.add_argument("--only", nargs="+", metavar="FEATURE", help="programs with these features, as in the results")
    parser.add_argument("--show", action="store_true", help="print every program")
    parser.add_argument("--json", type=Path, help="where the result goes, also in between")
    parser.add_argument("--go-on", action="store_true", help="go on after the programs in the result, up to --count")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
