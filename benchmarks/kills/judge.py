"""One job from its first run to its end, and whether each sample of each epoch was trained once."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import zygote
from benchmarks.harness.ranks import run_rank
from benchmarks.kills.jobs import KilledJob, Stop
from benchmarks.kills.rank import train

RUN_SECONDS = 120.0
GRACE_SECONDS = 1.0  # for the ranks whose peer has died
_starting = threading.Lock()


@dataclass(slots=True, kw_only=True)
class Verdict:
    """What became of a job.

    Attributes:
        stops: That happened, by kind.
        resizes: Runs that went on with another number of ranks.
        samples: Trained, over all epochs.
        lost: Samples that were not trained in some epoch.
        doubled: Samples that were trained again.
        findings: What is wrong; empty if nothing is.
        compared: Whether the weights were compared with those of a run that was never stopped.
    """

    stops: Counter[str] = field(default_factory=Counter)
    resizes: int = 0
    samples: int = 0
    lost: int = 0
    doubled: int = 0
    findings: list[str] = field(default_factory=list)
    compared: bool = False


def judge(job: KilledJob) -> Verdict:
    """Runs a job with all its stops, looks at its ledgers, and compares it with the same job left alone."""
    verdict = Verdict()
    with tempfile.TemporaryDirectory() as folder:
        last: dict[str, Any] | None = None
        run = 0
        while last is None and not verdict.findings:
            stop = job.stops[run] if run < len(job.stops) else None
            verdict.resizes += run > 0 and job.world_size(run) != job.world_size(run - 1)
            last = _one_run(job, folder, run, stop, verdict)
            run += 1
        if last is not None:
            _read_ledgers(job, Path(folder), run, verdict)
    if last is not None and not job.elastic and not verdict.findings:
        with tempfile.TemporaryDirectory() as folder:
            alone = _one_run(job, folder, 0, None, verdict)
        if alone is not None:
            verdict.compared = True
            if alone["steps"] != last["steps"] or not torch.equal(alone["weights"], last["weights"]):
                verdict.findings.append(
                    f"weights after {last['steps']} steps {last['weights'].tolist()} are not those of the run that was "
                    f"not stopped, after {alone['steps']} steps {alone['weights'].tolist()}"
                )
    return verdict


def _one_run(job: KilledJob, folder: str, run: int, stop: Stop | None, verdict: Verdict) -> dict[str, Any] | None:
    """One run; what rank 0 gave at the end of the job, None if it did not come to that."""
    world_size = job.world_size(run)
    with tempfile.TemporaryDirectory() as meeting:
        ends, processes = [], []
        with _starting:
            for rank in range(world_size):
                ours, theirs = zygote.context.Pipe(duplex=False)
                arguments = (rank, world_size, f"{meeting}/store", theirs, train, (job, folder, run, stop))
                processes.append(zygote.process(run_rank, *arguments))
                theirs.close()
                ends.append(ours)
        answers = _wait(ends, processes)
    results = [answer[0] for answer in answers if answer is not None and answer[0] is not None]
    traces = [answer[2] for answer in answers if answer is not None and answer[2]]
    if len(results) == world_size:
        if all(one["ended"] for one in results):
            return results[0]  # type: ignore[no-any-return]
        verdict.stops["terminate"] += 1
        return None
    told = [trace for trace in traces if "as it was told" in trace]
    wrong = [trace for trace in traces if "ResumeError" in trace or "AssertionError" in trace]
    if stop is None or wrong:
        verdict.findings.append(f"run {run} with {stop}: " + "\n".join(wrong or traces or ["a rank gave no answer"]))
    elif stop == "raise" and told:
        verdict.stops["raise"] += 1
    elif stop in ("kill_one", "kill_all") and None in answers:
        verdict.stops[stop] += 1
    else:
        verdict.findings.append(f"run {run} with {stop}: " + "\n".join(traces or ["a rank gave no answer"]))
    return None


def _wait(ends: list[Any], processes: list[Any]) -> list[Any]:
    """Each rank's answer; None of one that was killed."""
    answers: list[Any] = [None] * len(ends)
    late = until = time.monotonic() + RUN_SECONDS
    open_ends = dict(enumerate(ends))
    while open_ends and time.monotonic() < until:
        for rank, end in list(open_ends.items()):
            if not end.poll(0.005):
                continue
            try:
                answers[rank] = pickle.loads(end.recv_bytes())
            except EOFError:
                answers[rank] = None
            del open_ends[rank]
            if answers[rank] is None or answers[rank][2]:
                until = min(until, time.monotonic() + GRACE_SECONDS)
    hangs = time.monotonic() >= late
    for rank, process in enumerate(processes):
        if hangs and rank in open_ends and process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGUSR1)
            time.sleep(0.2)
        if not open_ends and None not in answers:
            process.join(10)
        zygote.end(process)
    return answers


def _read_ledgers(job: KilledJob, folder: Path, runs: int, verdict: Verdict) -> None:
    """Counts what was trained and not rolled back with the weights by a later run."""
    trained: list[Counter[int]] = [Counter() for _ in range(job.epochs)]
    begun = [_begin(folder, run) for run in range(runs)]
    for path in folder.glob("ledger-*"):
        run = int(path.name.split("-")[1])
        later = [step for step in begun[run + 1 :] if step is not None]
        for line in path.read_text().splitlines(keepends=True)[1:]:
            step, epoch, *samples = map(int, line.split()) if line.endswith("\n") else (1 << 62, 0)
            if step < min(later, default=1 << 61):
                trained[epoch].update(samples)
    for epoch, counts in enumerate(trained):
        lost = [sample for sample in range(job.samples) if not counts[sample]]
        again = sum(counts.values()) - len(counts)
        verdict.samples += sum(counts.values())
        verdict.lost += len(lost)
        verdict.doubled += again
        if lost or again:
            verdict.findings.append(f"epoch {epoch}: {len(lost)} samples lost {lost[:8]}, {again} trained again")


def _begin(folder: Path, run: int) -> int | None:
    """The step at which a run began; None if no rank of it came so far."""
    for path in folder.glob(f"ledger-{run}-*"):
        first = path.read_text().partition("\n")[0].split()
        if len(first) == 2:
            return int(first[1])
    return None
