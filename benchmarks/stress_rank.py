"""One rank of the stress run; `benchmarks.stress` starts it by torchrun."""

from __future__ import annotations

import argparse
import faulthandler
import importlib.metadata
import json
import os
import platform
import signal
import time
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist

from benchmarks.gpus import own_gpu
from benchmarks.stress import add_workload
from benchmarks.stress_data import Ledger
from benchmarks.stress_loops import left_out, make_workload, run_loop
from trainer_client.balancing import BalancedLoader, BalanceOptions, Balancer, Mode

PACKAGES = ("torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "grpcio", "numpy")
BEAT_STEPS = 20
WARM_STEPS = 10  # compilation and first communication are over
SYNCHRONIZE_STEPS = 100  # a device that hangs is noticed even if the host can queue on


class Watchdog:
    """Ends the process with the stacks of all its threads when no step ends for some time; torchrun ends the others."""

    def __init__(self, seconds: float, stacks: TextIO, device: torch.device, stall: int | None) -> None:
        self._seconds = seconds
        self._stacks = stacks
        self._device = device
        self._stall = stall
        self.warm_at = 0.0
        self.arm()

    def arm(self) -> None:
        """Starts the time anew."""
        faulthandler.dump_traceback_later(self._seconds, exit=True, file=self._stacks)

    def beat(self, step: int) -> None:
        """A step has ended."""
        if step == WARM_STEPS:
            self.warm_at = time.perf_counter()
        if step == self._stall:
            hang()
        if self._device.type == "cuda" and step % SYNCHRONIZE_STEPS == 0:
            torch.cuda.synchronize(self._device)
        if step % BEAT_STEPS == 0:
            self.arm()


def hang() -> None:
    """Hangs."""
    while True:
        time.sleep(60)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--address", required=True, help="of the balancer; empty where there is none")
    add_workload(parser)
    options = parser.parse_args()
    rank = int(os.environ["RANK"])
    stacks = options.result.with_name(f"stacks_{rank}.txt").open("w")
    faulthandler.register(signal.SIGTERM, file=stacks, chain=True)  # torchrun stops the others when one has ended
    on_gpu = torch.cuda.is_available() if options.device is None else options.device == "cuda"
    device = own_gpu() if on_gpu else torch.device("cpu")
    stall = options.stall_step if rank == dist_size() - 1 else None
    watchdog = Watchdog(options.hang_seconds, stacks, device, stall)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    results: dict[str, Any] = describe(device) | {"loops": {}}
    for loop in options.loops:
        reason = left_out(loop, device)
        results["loops"][loop] = {"left_out": reason} if reason else {"running": True}
        write(options.result, results)
        if reason is None:
            results["loops"][loop] = stress(loop, options, device, watchdog)
            write(options.result, results)
    dist.barrier()
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()


def dist_size() -> int:
    return int(os.environ["WORLD_SIZE"])


def describe(device: torch.device) -> dict[str, Any]:
    """Machine and versions."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    cuda = device.type == "cuda"
    return {
        "machine": torch.cuda.get_device_name(device) if cuda else platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "backend": dist.get_backend(),
        "ranks": dist.get_world_size(),
        "gpus": min(torch.cuda.device_count(), dist.get_world_size()) if cuda else 0,
        "versions": versions | {"python": platform.python_version(), "cuda": torch.version.cuda},
    }


def stress(loop: str, options: argparse.Namespace, device: torch.device, watchdog: Watchdog) -> dict[str, Any]:
    """One loop to its end, and what became of its samples."""
    workload = make_workload(
        loop, steps=options.steps, world=dist.get_world_size(), batch_size=options.batch_size, window=options.window,
        seed=options.seed,
    )  # fmt: skip
    ledger = Ledger(workload, device)
    choices = BalanceOptions(window=options.window)
    if options.balancer == "grpc":
        balancer = Balancer.connect(options.address, job=f"stress-{loop}", options=choices)
    else:
        balancer = Balancer.embedded(options=choices)
    watchdog.arm()
    started = watchdog.warm_at = time.perf_counter()
    loader, model = run_loop(loop, workload, balancer, device, ledger, watchdog.beat)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    ended = time.perf_counter()
    watchdog.arm()
    steady = max(ledger.steps - WARM_STEPS, 1)
    result = {
        "steps": ledger.steps,
        "seconds": round(ended - started, 2),
        "ms_per_step": round(1e3 * (ended - watchdog.warm_at) / steady, 3),
        "hangs": 0,
        **ledger.close(),
        **rounds(loader, Mode.SERVICE if options.balancer == "grpc" else Mode.EMBEDDED),
        **model,
    }
    if device.type == "cuda":
        result["peak_mib"] = round(torch.cuda.max_memory_allocated(device) / 2**20, 1)
    balancer.close()
    return result


def rounds(loader: BalancedLoader[Any], wanted: Mode) -> dict[str, Any]:
    """How the rounds ended, over all ranks; collective."""
    own = {f"{mode}/{reason}": count for (mode, reason), count in loader.counters.rounds.items()}
    tables: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(tables, own)
    # How many rounds a rank has ended after the last batch depends on when it looks.
    tables = [{key: count for key, count in table.items() if not key.startswith(f"{Mode.END}/")} for table in tables]
    good = f"{wanted}/"
    return {
        "fell_back": sum(count for table in tables for key, count in table.items() if not key.startswith(good)),
        "ranks_disagree": any(table != tables[0] for table in tables),
        "rounds": tables[dist.get_rank()],
        "exposed_ms_per_step": round(1e3 * loader.counters.exposed_seconds / max(sum(own.values()), 1), 4),
        "moving_ms_per_step": round(1e3 * loader.counters.redistribution_seconds / max(sum(own.values()), 1), 4),
    }


def write(path: Path, results: dict[str, Any]) -> None:
    """Rank 0's results so far, whole or not at all."""
    if dist.get_rank() == 0:
        part = path.with_suffix(".part")
        part.write_text(json.dumps(results))
        part.replace(path)


if __name__ == "__main__":
    main()
