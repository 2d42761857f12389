"""One rank of the end-to-end benchmark; `benchmarks.end_to_end` starts it by torchrun."""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import platform
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from examples.datasets import Keys, SyntheticSequences, lengths_named
from examples.hstu.attention import choose_kernel
from examples.hstu.model import ModelOptions
from examples.hstu.training import Run, Trainer
from trainer_client.balancing import BalanceOptions, Balancer
from trainer_client.balancing.costs import FitOptions, LearnedCost
from trainer_client.observing.measurement import PHASES

FIT = FitOptions(every=12, skip=4)


def main() -> None:
    faulthandler.register(signal.SIGTERM, chain=True)  # a rank that is stopped tells where it was
    options, device = join()
    rank, on_gpu = dist.get_rank(), device.type == "cuda"
    model = make_model(options, device)
    trainer = Trainer(model, device, learning_rate=1e-4, seed=options.seed)
    say(rank, f"model on {device}, {sum(p.numel() for p in trainer.model.parameters()) / 1e6:.1f} M parameters")
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if on_gpu else platform.machine(),
        "ranks": dist.get_world_size(),
        "options": vars(options),
        "kernel": model.kernel,
        "workloads": {},
    }
    for lengths in options.lengths:
        # Page-locked, as a DataLoader with pin_memory makes them: copies of other memory make the host wait.
        data = make_data(options, lengths, rank)
        batches = [batch.pin_memory() if on_gpu else batch for batch in data]
        length = -(-len(batches) // options.blocks)
        trainer.reset()
        # All batches once: whatever is compiled or loaded for some number of tokens is there before time counts.
        trainer.run(batches[: options.warm_up], Balancer.off(), name="warm-up")
        say(rank, f"{lengths}: warmed up, {compilations()} graphs compiled")
        entrants = []
        for setting in options.settings:
            trainer.reset()
            cost = trainer.learned_cost(FIT) if setting == "fitted" else None
            balancer = make_balancer(setting, options, lengths)
            entrants.append(Entrant(setting=setting, balancer=balancer, cost=cost, state=trainer.state()))
        for first in range(0, len(batches), length):
            entrants.reverse()  # settings take turns, so that a host that slows down does so for all
            for entrant in entrants:
                trainer.restore(entrant.state)
                compiled = compilations()
                run = trainer.run(batches[first : first + length], entrant.balancer, cost=entrant.cost)
                entrant.compilations += compilations() - compiled
                entrant.state = trainer.state()
                entrant.runs.append(run)
                median = np.median([step.total for step in run.times[10:] or run.times])
                say(rank, f"{lengths}, {entrant.setting}, from step {first}: {median:.2f} ms a step")
        collected = {}
        for entrant in entrants:
            collected[entrant.setting] = collect(entrant.runs) | {"compilations": gather(entrant.compilations)}
            if entrant.cost is not None:
                collected[entrant.setting]["cost_fit"] = describe_fit(entrant.cost)
        for entrant in entrants:
            entrant.balancer.close()
        settings = {setting: collected[setting] for setting in options.settings}
        results["workloads"][lengths] = {"block_steps": length, "settings": settings}
        if rank == 0:  # after each workload, so that a run that is stopped leaves what it has
            save(results)
    dist.barrier()
    dist.destroy_process_group()


def join() -> tuple[argparse.Namespace, torch.device]:
    """Joins the ranks that `benchmarks.end_to_end.measured_by` has started; the options and this rank's device."""
    options = argparse.Namespace(**json.loads(Path(sys.argv[1], "options.json").read_text()))
    device = use_device(runs_on_gpus(options), int(os.environ["LOCAL_RANK"]))
    if device.type == "cuda":
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    return options, device


def save(results: dict[str, Any]) -> None:
    """Writes what was measured to where it is looked for."""
    Path(sys.argv[1], "raw.json").write_text(json.dumps(results))


def runs_on_gpus(options: argparse.Namespace) -> bool:
    """Whether the flags ask for GPUs, or there are any and they do not say."""
    return torch.cuda.is_available() if options.device is None else bool(options.device == "cuda")


def use_device(on_gpu: bool, number: int) -> torch.device:
    """This process's device."""
    if not on_gpu:
        return torch.device("cpu")
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    torch.backends.cuda.matmul.allow_tf32 = True
    return device


@dataclass(slots=True, kw_only=True)
class Entrant:
    """A setting, whose blocks of steps take turns with those of the others."""

    setting: str
    balancer: Balancer
    cost: LearnedCost | None
    state: dict[str, Any]
    runs: list[Run] = field(default_factory=list)
    compilations: int = 0


def make_model(options: argparse.Namespace, device: torch.device) -> ModelOptions:
    """The shape that the flags ask for."""
    return ModelOptions(
        num_layers=options.layers, width=options.width, num_heads=options.heads, head_dim=options.head_dim,
        num_items=options.items, max_tokens=options.max_length, kernel=choose_kernel("auto", device, 1),
        compile=device.type == "cuda",
    )  # fmt: skip


def make_data(options: argparse.Namespace, lengths: str, rank: int) -> SyntheticSequences:
    """This rank's batches."""
    drawn = lengths_named(lengths, maximum=options.max_length, mean=options.mean)
    return SyntheticSequences(
        num_batches=options.steps, batch_size=options.batch_size, lengths=drawn, seed=options.seed, rank=rank,
        items=Keys(count=options.items, exponent=1.05),
    )  # fmt: skip


def make_balancer(setting: str, options: argparse.Namespace, lengths: str) -> Balancer:
    """The balancer of a setting, as a job of its own: streams of one job and name wait for each other."""
    job = f"{setting}-{lengths}"
    match setting:
        case "off":
            return Balancer.off()
        case "window":
            return Balancer.embedded(job=job, options=BalanceOptions(window=options.window))
        case "embedded" | "fitted":
            return Balancer.embedded(job=job)
        case "grpc":
            return Balancer.connect(options.balancer, job=job)
    raise ValueError(f"the setting is {setting!r}")


def collect(runs: list[Run]) -> dict[str, Any]:
    """The blocks of one setting, on all ranks."""
    reports = [report for run in runs for report in run.reports]
    modes = [report.mode.value for report in reports]
    return {
        "times": gather([[getattr(step, phase) for phase in PHASES] for run in runs for step in run.times]),
        "flops": gather([flops for run in runs for flops in run.flops]),
        "imbalance": [report.imbalance for report in reports],
        "moved_share": [report.moved_share for report in reports],
        "modes": {mode: modes.count(mode) for mode in dict.fromkeys(modes)},
        "exposed_seconds": gather(runs[-1].exposed_seconds),  # counted since the stream opened
        "peak_bytes": gather(max(run.peak_bytes for run in runs)),
        "losses": torch.cat([run.losses for run in runs]).tolist(),
    }


def describe_fit(cost: LearnedCost) -> dict[str, float]:
    """The fit that the cost follows, the same on all ranks; nothing where it follows none."""
    fit = cost.fit
    return {} if fit is None else {"explained": fit.explained, "mean_error": fit.error, "fixed_ms": fit.fixed}


def compilations() -> int:
    """Graphs that torch.compile has made so far, one more for each recompilation."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def gather(value: Any) -> list[Any]:
    """The value of each rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def say(rank: int, text: str) -> None:
    if rank == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
