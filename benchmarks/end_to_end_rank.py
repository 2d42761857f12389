"""One rank of the end-to-end benchmark; `benchmarks.end_to_end` starts it by torchrun."""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import platform
import signal
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.end_to_end import add_blocks, add_workload
from benchmarks.end_to_end_ideal import IDEALS, ideal_batches
from benchmarks.references.all_gather import by_gathering
from examples.datasets import Keys, SequenceBatch, SyntheticSequences, lengths_named
from examples.hstu.attention import choose_kernel
from examples.hstu.flops import peak_tflops
from examples.hstu.model import ModelOptions
from examples.hstu.training import Run, Trainer
from trainer_client.balancing import BalanceOptions, Balancer
from trainer_client.balancing.costs import FitOptions, LearnedCost, TokenCost
from trainer_client.observing.measurement import PHASES

TRACKED_STEPS = 20
FIT = FitOptions(every=12, skip=4)


def main() -> None:
    faulthandler.register(signal.SIGTERM, chain=True)  # a rank that is stopped tells where it was
    parser = argparse.ArgumentParser()
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--balancer", required=True, help="its address; empty where no setting needs one")
    add_workload(parser)
    add_blocks(parser)
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available() if options.device is None else options.device == "cuda"
    rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = True
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    model = make_model(options, device)
    trainer = Trainer(model, device, learning_rate=1e-4, seed=options.seed)
    say(rank, f"model on {device}, {sum(p.numel() for p in trainer.model.parameters()) / 1e6:.1f} M parameters")
    results: dict[str, Any] = {
        "machine": torch.cuda.get_device_name(device) if on_gpu else platform.processor() or platform.machine(),
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda},
        "ranks": dist.get_world_size(),
        "options": {key: value for key, value in vars(options).items() if not isinstance(value, Path)},
        "kernel": model.kernel,
        "embeddings": "torch.nn.Embedding, replicated",
        "peak_tflops": peak_tflops(device),
        "workloads": {},
    }
    for lengths in options.lengths:
        # Page-locked, as a DataLoader with pin_memory makes them: copies of other memory make the host wait.
        data = make_data(options, lengths, rank)
        batches = [batch.pin_memory() if on_gpu else batch for batch in data]
        length = -(-len(batches) // options.blocks)
        workload: dict[str, Any] = {"samples": gather(sample_lengths(batches, model)), "block_steps": length}
        flops = np.array([of_rank["flops"] for of_rank in workload["samples"]])
        even = {
            kind: [batch.pin_memory() if on_gpu else batch for batch in ideal_batches(kind, flops, data, model)]
            for kind in IDEALS
            if kind in options.settings
        }
        trainer.reset()
        # All batches once: whatever is compiled or loaded for some number of tokens is there before time counts.
        for loaded in (batches, *even.values()):
            trainer.run(loaded[: options.warm_up], Balancer.off(), name="warm-up")
        say(rank, f"{lengths}: warmed up, {compilations()} graphs compiled")
        entrants = []
        for setting in options.settings:
            trainer.reset()
            cost = trainer.learned_cost(FIT) if setting.endswith("_fitted") else None
            balancer = make_balancer(setting, options, lengths)
            entrants.append(
                Entrant(
                    setting=setting,
                    batches=even.get(setting, batches),
                    balancer=balancer,
                    cost=cost,
                    state=trainer.state(),
                )
            )
        for first in range(0, len(batches), length):
            # Settings take turns, in turned order, so that a host that slows down does so for all.
            entrants.reverse()
            for entrant in entrants:
                trainer.restore(entrant.state)
                compiled = compilations()
                with by_gathering() if entrant.setting == "kk_all_gather" else nullcontext():
                    part = entrant.batches[first : first + length]
                    run = trainer.run(part, entrant.balancer, cost=entrant.cost)
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
        workload["settings"] = {setting: collected[setting] for setting in options.settings}
        # Layers are measured in a run of their own: hooks and events take time of the host.
        trainer.track_layers = True
        tracked = trainer.run(batches[:TRACKED_STEPS], Balancer.off(), name="tracked")
        trainer.track_layers = False
        workload["layers"] = gather(sum_up(tracked))
        results["workloads"][lengths] = workload
        if rank == 0:  # after each workload, so that a run that is stopped leaves what it has
            options.result.write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


@dataclass(slots=True, kw_only=True)
class Entrant:
    """A setting, and where it is: blocks of its steps take turns with those of the others."""

    setting: str
    batches: list[SequenceBatch]
    balancer: Balancer
    cost: LearnedCost | None
    state: dict[str, Any]
    runs: list[Run] = field(default_factory=list)
    compilations: int = 0


def make_model(options: argparse.Namespace, device: torch.device) -> ModelOptions:
    """The shape that the flags ask for."""
    return ModelOptions(
        num_layers=options.layers,
        width=options.width,
        num_heads=options.heads,
        head_dim=options.head_dim,
        num_items=options.items,
        max_tokens=options.max_length,
        kernel=choose_kernel(options.kernel, device, 1),
        compile=device.type == "cuda" and not options.no_compile,
    )


def make_data(options: argparse.Namespace, lengths: str, rank: int) -> SyntheticSequences:
    """This rank's batches."""
    return SyntheticSequences(
        num_batches=options.steps,
        batch_size=options.batch_size,
        lengths=lengths_named(lengths, maximum=options.max_length, mean=options.mean),
        items=Keys(count=options.items, exponent=1.05),
        seed=options.seed,
        rank=rank,
    )


def make_balancer(setting: str, options: argparse.Namespace, lengths: str) -> Balancer:
    """The balancer of a setting."""
    match setting.removesuffix("_fitted"):
        case "window":
            return Balancer.embedded(options=BalanceOptions(window=options.window))
        case "off" | "ideal" | "fixed":
            return Balancer.off()
        case "kk_all_gather":
            return Balancer.embedded(options=BalanceOptions(strategy="karmarkar_karp"))
        case "embedded":
            return Balancer.embedded(options=BalanceOptions())
        case "grpc":
            return Balancer.connect(options.balancer, job=f"{setting}-{lengths}", options=BalanceOptions())
    raise ValueError(f"the setting is {setting!r}")


def sample_lengths(batches: list[SequenceBatch], model: ModelOptions) -> dict[str, list[list[float]]]:
    """(steps, samples) tokens and FLOPs of this rank's samples as loaded."""
    cost = model.cost()
    tokens = TokenCost(tokens=("num_history", "num_history", "num_candidates"), per_sample=model.num_context)
    return {
        "tokens": [tokens(batch).tolist() for batch in batches],
        "flops": [cost(batch).tolist() for batch in batches],
    }


def collect(runs: list[Run]) -> dict[str, Any]:
    """The blocks of one setting, on all ranks."""
    reports = [report for run in runs for report in run.reports]
    return {
        "times": gather([[getattr(step, phase) for phase in PHASES] for run in runs for step in run.times]),
        "tokens": gather([tokens for run in runs for tokens in run.tokens]),
        "flops": gather([flops for run in runs for flops in run.flops]),
        "own_load": gather([report.own_load for report in reports]),
        "imbalance_before": [report.imbalance_before for report in reports],
        "imbalance": [report.imbalance for report in reports],
        "moved_share": [report.moved_share for report in reports],
        "modes": [report.mode.value for report in reports],
        "wait_seconds": gather([report.wait_seconds for report in reports]),
        "partition_seconds": gather([report.partition_seconds for report in reports]),
        "exposed_seconds": gather(runs[-1].exposed_seconds),  # counted since the stream opened
        "peak_bytes": gather(max(run.peak_bytes for run in runs)),
        "losses": torch.cat([run.losses for run in runs]).tolist(),
    }


def sum_up(run: Run) -> dict[str, float]:
    """FLOPs and milliseconds of all layers, from the second half of a run."""
    late = [perf for perf in run.perf if perf.step >= TRACKED_STEPS // 2]
    return {
        "flops": sum(perf.flops for perf in late),
        "ms": sum(perf.forward_ms + perf.backward_ms for perf in late),
    }


def describe_fit(cost: LearnedCost) -> dict[str, Any]:
    """The fit that the cost follows, the same on all ranks."""
    fit = cost.fit
    if fit is None:
        return {"used": False}
    return {
        "used": True,
        "explained": fit.explained,
        "mean_error": fit.error,
        "fixed_ms": fit.fixed,
        "coefficients_ms": fit.coefficients.tolist(),
        "observations": fit.observations,
    }


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
