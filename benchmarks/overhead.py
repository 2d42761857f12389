"""What balancing costs a loop that has nothing to gain from it.

    python -m benchmarks.overhead --ranks 2 --blocks 4 --json benchmarks/results/overhead_gloo.json
    python -m benchmarks.overhead --ranks 2 --json benchmarks/results/overhead_2xh200.json --trace out/overhead2
    python -m benchmarks.overhead --ranks 8 --json benchmarks/results/overhead_8xh200.json --trace out/overhead8

(the first on a machine without GPUs; the others want one GPU a rank and take about two minutes each).
Every rank's batches are alike, so that all difference to the plain loop is cost. "equal costs" leaves every sample at
home: submission and agreement only. "moving" predicts uneven costs for the same batches, so that samples move as well.
The loops take turns in blocks of steps within one run; with GPUs the step is a chain of matrix products, without it is
a sleep, which leaves the cores to what runs beside it. With --trace, a few more steps of each loop run under
PyTorch's profiler afterwards: the result then holds how often a step calls what makes the host wait for the device, and
the folder a timeline of each loop for chrome://tracing. Agreements are timed by themselves, over Gloo and over NCCL
with the host waiting for the device: while the devices are idle, and while they compute.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from trainer_client.balancing.votes import VOTE_BYTES

from benchmarks.harness.balancer_process import running_balancer
from trainer_client import BalancedLoader, BalanceOptions, Balancer, BatchSpec

NUM_SAMPLES, LENGTH, WIDTH = 64, 64, 32
SPEC = BatchSpec(rows_per_sample={"values": "count"})
TRACED_STEPS = 5
WAITING = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "aten::item",
    "aten::_local_scalar_dense",
)

Calls = dict[str, dict[str, float]]
"""Calls per step by name: how many, and how long the host was in them."""


def batch_of(rank: int, step: int) -> dict[str, torch.Tensor]:
    return {
        "id": torch.arange(NUM_SAMPLES) + NUM_SAMPLES * (1000 * step + rank),
        "count": torch.full((NUM_SAMPLES,), LENGTH),
        "values": torch.full((NUM_SAMPLES * LENGTH,), step),
        "dense": torch.full((NUM_SAMPLES, WIDTH), float(rank)),
    }


def endless(rank: int) -> Iterator[dict[str, torch.Tensor]]:
    return (batch_of(rank, step) for step in itertools.count())


def equal_cost(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return batch["count"]


def uneven_cost(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Heavy-tailed and the same at every run; the samples are alike all the same."""
    return 1 + 10_000 // (1 + (batch["id"] * 2_654_435_761 % 1009))


class Loop:
    """One way of getting batches, and the time that steps with it took."""

    def __init__(self, name: str, source: Iterator[Any], loader: BalancedLoader[Any] | None) -> None:
        self.name = name
        self.blocks: list[float] = []
        self._source = source
        self._loader = loader
        self._before = (0.0, 0.0, 0.0)

    def run(self, num_steps: int, step: Callable[[Any], None], finish: Callable[[], None]) -> float:
        """Takes steps; returns seconds per step."""
        dist.barrier()
        started = time.perf_counter()
        for batch in itertools.islice(self._source, num_steps):
            step(batch)
        finish()
        return (time.perf_counter() - started) / num_steps

    def counters(self) -> tuple[float, float, float]:
        """Seconds so far: waiting for agreements, starting and ending moves, and (hidden) waiting for answers."""
        if self._loader is None:
            return 0.0, 0.0, 0.0
        now = self._loader.counters
        return now.exposed_seconds, now.redistribution_seconds, now.wait_seconds

    @property
    def outcomes(self) -> dict[str, int]:
        """Rounds by outcome."""
        if self._loader is None:
            return {}
        return {f"{mode.value} ({reason.value})": n for (mode, reason), n in self._loader.counters.rounds.items()}


def make_step(seconds: float, device: torch.device) -> tuple[Callable[[Any], None], Callable[[], None]]:
    """A training step of about so many seconds with an all-reduce, and what waits for its end."""
    gradient = torch.zeros(100_000, device=device)
    if device.type != "cuda":

        def rest(_batch: Any) -> None:
            time.sleep(seconds)
            dist.all_reduce(gradient)

        return rest, lambda: None
    weights = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)

    def products(times: int) -> None:
        x = weights
        for _ in range(times):
            x = x @ weights
        gradient.add_(x[0, 0].float())

    products(20)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    products(200)
    torch.cuda.synchronize()
    times = max(1, round(200 * seconds / (time.perf_counter() - begin)))
    count = torch.tensor([times], device=device)
    dist.broadcast(count, 0)
    times = int(count.item())

    def compute(_batch: Any) -> None:
        products(times)
        dist.all_reduce(gradient)

    return compute, torch.cuda.synchronize


def time_agreements(device: torch.device, step: Callable[[Any], None], repeats: int) -> dict[str, float]:
    """Milliseconds of one all-gather of a vote: over Gloo, and over NCCL with the host waiting for the device.

    With GPUs also while they compute a step, on a stream of its own as an agreement would be.
    """
    ways: dict[str, Callable[[], None]] = {}
    gloo = dist.new_group(backend="gloo")
    ways["gloo"] = lambda: gather_votes(gloo, torch.device("cpu"))
    if device.type == "cuda":
        nccl = dist.new_group(backend="nccl")
        side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

        def on_side_stream() -> None:
            with torch.cuda.stream(side):
                gather_votes(nccl, device)

        ways["nccl, host waits"] = on_side_stream
    result = {}
    for name, gather in ways.items():
        for busy in (False, True) if device.type == "cuda" else (False,):
            times = []
            for repeat in range(repeats // 4 if busy else repeats):
                dist.barrier()
                if device.type == "cuda":
                    torch.cuda.synchronize()
                if busy:
                    step(None)
                    time.sleep(1e-3 * (repeat % 8))  # the step's products are under way, not only its first
                started = time.perf_counter()
                gather()
                times.append(1e3 * (time.perf_counter() - started))
            result[f"{name}, devices computing" if busy else name] = statistics.median(times)
    return result


def gather_votes(group: dist.ProcessGroup, where: torch.device) -> None:
    """All-gathers a vote; the host has all ranks' votes when it returns."""
    world_size = dist.get_world_size()
    vote = torch.zeros(VOTE_BYTES, dtype=torch.uint8).to(where)
    votes = torch.empty(world_size * VOTE_BYTES, dtype=torch.uint8, device=where)
    if where.type == "cuda":
        dist.all_gather_into_tensor(votes, vote, group=group)
    else:
        dist.all_gather(list(votes.view(world_size, -1).unbind(0)), vote, group=group)
    votes.cpu()


def trace(loop: Loop, num_steps: int, step: Callable[[Any], None], finish: Callable[[], None], path: Path) -> Calls:
    """Runs a loop under the profiler; writes its timeline and returns how often a step calls what may make it wait."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        loop.run(num_steps, step, finish)
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))
    calls: Calls = {}
    for row in profiler.key_averages():
        if row.key in WAITING or row.key.startswith(("cudaMemcpy", "Memcpy", "nccl:", "gloo:", "aten::all", "c10d::")):
            calls[row.key] = {"times": row.count / num_steps, "host_ms": row.self_cpu_time_total / 1e3 / num_steps}
    return calls


def work(options: argparse.Namespace) -> None:
    """One rank."""
    has_gpus = torch.cuda.is_available()
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local) if has_gpus else torch.device("cpu")
    if has_gpus:
        if local >= torch.cuda.device_count():
            raise SystemExit(f"--ranks is {options.ranks} with {torch.cuda.device_count()} GPUs; use one rank a GPU")
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo,cuda:nccl" if has_gpus else "gloo", device_id=device if has_gpus else None)
    rank = dist.get_rank()
    settings = BalanceOptions(timeout=timedelta(seconds=5))
    plain = (({key: value.to(device, non_blocking=True) for key, value in batch.items()}) for batch in endless(rank))
    loops = [Loop("plain loop", plain, None)]
    with contextlib.ExitStack() as stack:
        ways = {"off": Balancer.off(options=settings), "embedded": Balancer.embedded(options=settings)}
        if options.address:
            ways["service"] = Balancer.connect(options.address, job="overhead", options=settings)
        for way, balancer in ways.items():
            stack.enter_context(balancer)
            for what, cost in (("equal costs", equal_cost), ("moving", uneven_cost)):
                if way == "off" and what == "moving":
                    continue
                loader = BalancedLoader(
                    _Endless(rank), balancer, cost=cost, spec=SPEC, device=device, name=what.replace(" ", "-")
                )
                loops.append(Loop(f"{way}, {what}", iter(loader), loader))
        step, finish = make_step(options.step_ms / 1e3, device)
        for loop in loops:
            loop.run(8, step, finish)
        begin = [loop.counters() for loop in loops]
        for _ in range(options.blocks):
            for loop in loops:
                loop.blocks.append(loop.run(options.steps, step, finish))
        spent = [
            [
                (now - before) / (options.blocks * options.steps)
                for now, before in zip(loop.counters(), was, strict=True)
            ]
            for loop, was in zip(loops, begin, strict=True)
        ]
        agreements = time_agreements(device, step, 200)
        calls: list[Calls] = []
        if options.trace is not None:  # on all ranks: each pays for its own
            for loop in loops:
                name = f"{loop.name.replace(', ', '-').replace(' ', '-')}-rank{rank}.json"
                calls.append(trace(loop, TRACED_STEPS, step, finish, options.trace / name))
        outcomes = {loop.name: loop.outcomes for loop in loops}
        for loop in loops:
            close = getattr(loop._source, "close", None)
            if close is not None:
                close()
    if rank == 0:
        rows = [
            {
                "loop": loop.name, "ms_per_step": 1e3 * statistics.median(loop.blocks),
                "ms_more": 1e3 * statistics.median(
                    own - base for own, base in zip(loop.blocks, loops[0].blocks, strict=True)
                ),
                "ms_waiting_for_agreements": 1e3 * seconds[0], "ms_starting_and_ending_moves": 1e3 * seconds[1],
                "ms_hidden_wait_for_service": 1e3 * seconds[2], "rounds": outcomes[loop.name],
            }
            for loop, seconds in zip(loops, spent, strict=True)
        ]  # fmt: skip
        for row in rows:
            row["share_of_step"] = row["ms_more"] / rows[0]["ms_per_step"]
        for row, called in zip(rows, calls, strict=False):
            row["calls_per_step"] = called
        name = torch.cuda.get_device_name(0) if has_gpus else platform.machine()
        where = {"device": name, "torch": torch.__version__, "python": platform.python_version(),
                 "cores": os.cpu_count(), "load_average": os.getloadavg()[0]}  # fmt: skip
        options.result.write_text(json.dumps({"machine": where, "loops": rows, "agreement_ms": agreements}))
    dist.barrier()
    dist.destroy_process_group()


class _Endless:
    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return endless(self._rank)


def show(result: dict[str, Any], console: Console) -> None:
    table = Table(title=f"Price of balancing on {result['ranks']} ranks ({result['machine']['device']}), ms per step")
    headings = ("loop", "step", "more than plain", "share", "agreements", "moves", "hidden wait")
    for column in headings:
        table.add_column(column, justify="left" if column == "loop" else "right")
    for row in result["loops"]:
        table.add_row(
            row["loop"], f"{row['ms_per_step']:.3f}", f"{row['ms_more']:+.3f}", f"{row['share_of_step']:+.2%}",
            f"{row['ms_waiting_for_agreements']:.3f}", f"{row['ms_starting_and_ending_moves']:.3f}",
            f"{row['ms_hidden_wait_for_service']:.3f}",
        )  # fmt: skip
    console.print(table)
    for row in result["loops"]:
        for name, called in row.get("calls_per_step", {}).items():
            if name in WAITING:
                console.print(f"{row['loop']}: {name} {called['times']:.2f} times a step, {called['host_ms']:.3f} ms")
    for name, milliseconds in result["agreement_ms"].items():
        console.print(f"one agreement over {name}: {milliseconds:.3f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=2, help="processes, one per GPU if there are GPUs")
    parser.add_argument("--steps", type=int, default=20, help="steps of a block")
    parser.add_argument("--blocks", type=int, default=5, help="blocks of each loop")
    parser.add_argument("--step-ms", type=float, default=100.0, help="a step's own work")
    parser.add_argument("--quick", action="store_true", help="two short blocks")
    parser.add_argument("--without-service", action="store_true", help="leave the balancer out")
    parser.add_argument("--json", type=Path, help="where the result goes")
    parser.add_argument("--trace", type=Path, help="folder for timelines of each loop; counts what makes the host wait")
    parser.add_argument("--address", default="", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.steps, options.blocks, options.step_ms = 6, 2, 20.0
    if options.result is not None:
        work(options)
        return
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        address = "" if options.without_service else stack.enter_context(running_balancer()).address
        path = Path(folder) / "result.json"
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}",
            "-m", "benchmarks.overhead", "--result", str(path), "--address", address,
            "--ranks", str(options.ranks), "--steps", str(options.steps), "--blocks", str(options.blocks),
            "--step-ms", str(options.step_ms),
            *(["--trace", str(options.trace.resolve())] if options.trace is not None else []),
        ]  # fmt: skip
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        result = json.loads(path.read_text())
    result = {
        "command": " ".join(["python -m benchmarks.overhead", *sys.argv[1:]]), "ranks": options.ranks,
        "step_ms": options.step_ms, "steps": options.steps, "blocks": options.blocks, **result,
    }  # fmt: skip
    show(result, Console())
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
