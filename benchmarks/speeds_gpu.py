"""Two real GPUs, of which another process takes a part: how soon the slow rank gets less to do, and all of it back.

    python -m benchmarks.speeds_gpu --seconds 240 --json benchmarks/results/speeds_2xh200.json
    python -m benchmarks.speeds_gpu --replayed-ranks 3 --seconds 240 --json benchmarks/results/speeds_h200.json

A rank's step is a chain of matrix products as long as its load, then an all-reduce. Another process runs products of
its own on the last rank's GPU, for a part of the time, from one step on and up to another; no clock is touched. What
the speeds allow follows from the ranks' measured rates (load over time) in each phase: `least`, the time of a step if
loads stood in their proportion, and `equal`, that with equal loads. A step's time is taken from its loads and these
rates, so that it tells of the plan and not of the noise; the measured times of steps stand beside it. The same is done
without learning. What time is left goes to even GPUs, in blocks with and without learning: false alarms, and what the
steps take. Without GPUs ranks sleep for their load, and the last one longer (to try the program).

With `--replayed-ranks` one GPU is enough: rank 0 is on it and is the one that is disturbed; each other rank is a
process on the CPU, which waits as long for a load as the same GPU took for it undisturbed, when the run began and
again before the even ranks. How much longer or shorter a step takes than its load says is drawn from the measured
steps, too. Collectives are Gloo's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from benchmarks.harness.balancer_process import running_balancer
from benchmarks.speeds_gpu_work import MEAN_LOAD, Other, Work
from evenkeel import partitioning
from evenkeel.partitioning.speeds import Straggler
from trainer_client import BalancedLoader, BalanceOptions, Balancer
from trainer_client.balancing import redistribution
from trainer_client.observing.measurement import StepTimer

SAMPLES, MEAN_COST = 128, MEAN_LOAD / 128
BUSY = (0.25, 1.0)  # shares of the time in which the other process has work for the GPU
BEFORE, DURING, AFTER = 50, 80, 80  # steps
AHEAD = 2  # steps that the host may be ahead of the device
RATES = 150  # steps by which the time of a load is measured, to be replayed


class Source:
    """Batches without end, the same at every run."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for step in count():
            rng = np.random.default_rng([self._rank, step])
            costs = rng.lognormal(-0.18, 0.6, SAMPLES) * MEAN_COST * np.random.default_rng(step).lognormal(0, 0.1)
            yield {"cost": torch.from_numpy(costs), "value": torch.arange(SAMPLES)}


class Loop:
    """Steps with one loader."""

    def __init__(self, name: str, balancer: Balancer, rank: int, device: torch.device, work: Work) -> None:
        place = torch.device("cpu") if work.alone else device
        self.loader: BalancedLoader[Any] = BalancedLoader(
            Source(rank), balancer, cost=lambda batch: batch["cost"], device=place, name=name
        )
        self.timer = StepTimer(device, loader=self.loader)
        self._batches = iter(self.loader)
        self._work, self._device = work, device
        self.alarms = 0

    def run(self, steps: int) -> NDArray[np.float64]:
        """(steps, 3): load, seconds of this rank's computation, seconds of the step."""
        loads, marks = [], []
        held: tuple[Straggler, ...] = ()
        for _ in islice(self._batches, steps):
            loads.append(self.loader.report.own_load)
            self.alarms += held != self.loader.report.stragglers and bool(self.loader.report.stragglers)
            held = self.loader.report.stragglers
            self._work.step(loads[-1], self.timer)
            if self._device.type == "cuda":
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record()
                marks.append(event)
                if len(marks) > AHEAD:
                    marks[-1 - AHEAD].synchronize()
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        times = self.timer.finished()[-steps:]
        return np.array([(load, t.compute / 1e3, t.total / 1e3) for load, t in zip(loads, times, strict=True)])


def gathered(own: NDArray[np.float64], group: dist.ProcessGroup) -> NDArray[np.float64]:
    """(ranks, steps, 3)."""
    tables: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(tables, own, group=group)
    return np.array(tables)


def measured_rates(doing: Work, device: torch.device) -> NDArray[np.float64]:
    """Seconds of a unit of load in steps of rank 0 with nobody beside it; all ranks take these steps."""
    timer = StepTimer(device)
    loads = MEAN_LOAD * np.random.default_rng(5).uniform(0.6, 1.4, RATES + 30)
    for load in loads:
        doing.step(float(load), timer)
    if device.type == "cuda":
        torch.cuda.synchronize()
    own = np.array([t.compute / 1e3 for t in timer.finished()[-RATES:]]) / loads[-RATES:]
    told = torch.from_numpy(own)
    dist.broadcast(told, 0)
    return told.numpy()


def figures(tables: list[NDArray[np.float64]]) -> dict[str, Any]:
    """What a phase before, one during and one after a disturbance tell."""
    result: dict[str, Any] = {}
    for name, table in zip(("before", "during", "after"), tables, strict=True):
        loads, seconds = table[:, :, 0], table[:, :, 1]
        rates = np.median(loads / seconds, axis=1)
        taken = (loads / rates[:, None]).max(axis=0)
        least = loads.sum(axis=0) / rates.sum()
        equal = loads.mean(axis=0) / rates.min()
        # what could be gained from the first step's plan on: of equal loads, or of those of the phase before
        first = loads[:, :3].sum(axis=1)
        worst = least * float((first / rates).max() / (first.sum() / rates.sum()))
        share = (worst - taken) / (worst - least)
        lasting = [k for k in range(len(taken) - 10) if share[k] >= 0.9 and np.median(share[k : k + 10]) >= 0.9]
        step = 1e3 * table[:, :, 2].max(axis=0)
        result[name] = {
            "slowest_speed": float(rates.min() / np.median(np.sort(rates)[-1])),
            "steps_to_90_percent": lasting[0] if name != "before" and lasting else None,
            "share_gained_after_20_steps": float(np.median(share[20:])) if name != "before" else None,
            "over_least_after_20_steps": float((taken / least)[20:].mean() - 1),
            "equal_over_least": float((equal / least).mean() - 1),
            "step_ms_first_5": float(np.median(step[:5])),
            "step_ms_after_20": float(np.median(step[20:])),
            "loads_of_slowest": [round(float(x), 4) for x in (loads[-1] / loads.mean(axis=0))],
        }
    return result


def work(options: argparse.Namespace) -> None:
    """One rank."""
    started = time.monotonic()
    local = int(os.environ["LOCAL_RANK"])
    replays = options.replayed_ranks > 0
    has_gpus = torch.cuda.is_available()
    on_gpu = has_gpus and (local == 0 or not replays)
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    nccl = has_gpus and not replays
    dist.init_process_group("cpu:gloo,cuda:nccl" if nccl else "gloo", device_id=device if nccl else None)
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    gloo = dist.new_group(backend="gloo")
    doing = Work(device, options.step_ms, alone=replays)
    result: dict[str, Any] = {"disturbances": [], "even": {}}

    def replay() -> None:
        """Measures rank 0, and has the others replay it from now on."""
        rates = measured_rates(doing, device)
        doing.replayed = rates if rank else None
        spread = float(np.std(rates) / np.median(rates))
        result.setdefault("replayed", []).append({"s_of_mean_load": MEAN_LOAD * float(np.median(rates)), "cv": spread})

    if replays:
        replay()
    other = Other(device, doing) if rank == (0 if replays else last) else None
    with contextlib.ExitStack() as stack:
        loops: dict[str, Loop] = {}
        for way, learn in (("embedded", True), ("service", True), ("not learning", False)):
            if way == "service" and not options.address:
                continue
            settings = BalanceOptions(timeout=timedelta(seconds=5), learn_speeds=learn)
            if way == "service":
                balancer = Balancer.connect(options.address, job="speeds", options=settings)
            else:
                balancer = Balancer.embedded(options=settings)
            stack.enter_context(balancer)
            loops[way] = Loop(way.replace(" ", "-"), balancer, rank, device, doing)
        for loop in loops.values():
            loop.run(30)
        for way, loop in loops.items():
            for busy in BUSY:
                for _ in range(1 if way == "not learning" else options.repeats):
                    tables = []
                    for share, steps in ((0.0, BEFORE), (busy, DURING), (0.0, AFTER)):
                        if other is not None:
                            other.take(share)
                        tables.append(gathered(loop.run(steps), gloo))
                    if rank == 0:
                        found = {"way": way, "busy": busy, **figures(tables)}
                        result["disturbances"].append(found)
                        said = {key: value for key, value in found["during"].items() if key != "loads_of_slowest"}
                        print(way, busy, said, "back:", found["after"]["steps_to_90_percent"], flush=True)
                        options.result.write_text(json.dumps(result))
        # Even GPUs, as long as there is time: the two take turns, so that both see the same clocks.
        if replays:
            replay()
        alarms = {way: loop.alarms for way, loop in loops.items()}
        blocks: dict[str, list[float]] = {"embedded": [], "not learning": []}
        lost: list[float] = []
        while sum(map(len, blocks.values())) * options.block // 2 < options.even_steps:
            enough = torch.tensor([time.monotonic() - started > options.seconds])
            dist.broadcast(enough, 0, group=gloo)
            if bool(enough.item()):
                break
            for way, times in blocks.items():
                table = gathered(loops[way].run(options.block), gloo)
                # the first step of a block began when the last one of the loop's block before had ended
                times.append(1e3 * float(table[:, 1:, 2].max(axis=0).mean()))
                if way == "embedded":
                    lost.append(float((table[:, :, 0].max(axis=0) / table[:, :, 0].mean(axis=0)).mean() - 1))
        if rank == 0 and lost:
            pairs = zip(blocks["embedded"], blocks["not learning"], strict=True)
            result["even"] = {
                "steps": len(lost) * options.block,
                "false_alarms": loops["embedded"].alarms - alarms["embedded"],
                "max_over_mean_load": statistics.fmean(lost),
                "ms_per_step": statistics.median(blocks["embedded"]),
                "ms_per_step_not_learning": statistics.median(blocks["not learning"]),
                "more": statistics.median(own / base - 1 for own, base in pairs),
            }
            print("even:", result["even"], flush=True)
        if other is not None:
            other.close()
        for loop in loops.values():
            loop._batches.close()  # type: ignore[attr-defined]
    if rank == 0:
        result["machine"] = {
            "device": torch.cuda.get_device_name(0) if has_gpus else platform.machine(), "torch": torch.__version__,
            "python": platform.python_version(), "cores": os.cpu_count(),
        }  # fmt: skip
        options.result.write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=2, help="processes, one per GPU if there are GPUs")
    parser.add_argument(
        "--replayed-ranks", type=int, default=0, help="processes on the CPU that replay rank 0, the only one on a GPU"
    )
    parser.add_argument("--seconds", type=float, default=240, help="after which no further block begins")
    parser.add_argument("--step-ms", type=float, default=20.0, help="a step's own work")
    parser.add_argument("--repeats", type=int, default=3, help="of each disturbance")
    parser.add_argument("--even-steps", type=int, default=10_000, help="of even GPUs, at most")
    parser.add_argument("--block", type=int, default=250, help="steps of a block of even GPUs")
    parser.add_argument("--json", type=Path, help="where the result goes")
    parser.add_argument("--without-service", action="store_true", help="leave the balancer out")
    parser.add_argument("--address", default="", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.replayed_ranks < 0 or options.ranks < 1:
        parser.error(
            f"--replayed-ranks {options.replayed_ranks}, --ranks {options.ranks}: give 0 or more, and 1 or more"
        )
    if options.replayed_ranks:
        options.ranks = 1 + options.replayed_ranks
    if options.result is not None:
        work(options)
        return
    partitioning.warm_up()  # once, for all ranks
    redistribution.warm_up()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        address = "" if options.without_service else stack.enter_context(running_balancer()).address
        path = options.json.with_suffix(".part") if options.json is not None else Path(folder) / "result.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}",
            "-m", "benchmarks.speeds_gpu", "--result", str(path), "--address", address, "--ranks", str(options.ranks),
            "--seconds", str(options.seconds), "--step-ms", str(options.step_ms), "--repeats", str(options.repeats),
            "--even-steps", str(options.even_steps), "--block", str(options.block),
            "--replayed-ranks", str(options.replayed_ranks),
        ]  # fmt: skip
        subprocess.run(command, check=True, timeout=options.seconds + 300, env={**os.environ, "OMP_NUM_THREADS": "1"})
        result = json.loads(path.read_text())
    result = {
        "command": " ".join(["python -m benchmarks.speeds_gpu", *sys.argv[1:]]), "ranks": options.ranks,
        "replayed_ranks": options.replayed_ranks,
        "step_ms": options.step_ms, "before": BEFORE, "during": DURING, "after": AFTER, **result,
    }  # fmt: skip
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
        path.unlink()


if __name__ == "__main__":
    main()
