"""Train an HSTU-shaped ranking model with balanced batches.

One process, Gloo ranks on CPUs, and GPUs take the same flags:

    python -m examples.train_hstu --small
    torchrun --nproc-per-node 2 -m examples.train_hstu --small --balancer embedded
    torchrun --nproc-per-node 8 -m examples.train_hstu --balancer grpc://balancer:50051 --embeddings routed \
        --dist-type hash_roundrobin
    torchrun --nproc-per-node 2 -m examples.train_hstu --small --split --batch-size 2

`--split` lets a history that is more than a rank's share of a step lie on several ranks, each with a part of it.
`--max-tokens-per-rank` caps what a rank holds of a batch, so that one rank's long histories do not end the job.
Without data the sequences are synthetic; `--data` takes an unpacked MovieLens or KuaiRand folder, or a file of Gowalla,
Amazon or Yambda, as published.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from evenkeel.partitioning import strategies
from examples.datasets import (
    DISTRIBUTIONS,
    Histories,
    HistoryBatches,
    Keys,
    SequenceBatch,
    SyntheticSequences,
    lengths_named,
    read_histories,
)
from examples.hstu.attention import ATTENTIONS, KERNELS, choose_kernel
from examples.hstu.balance_log import BalanceLogger, ConsoleLines, JsonLines, plot_balance
from examples.hstu.embeddings import STORAGES
from examples.hstu.flops import peak_tflops
from examples.hstu.model import ModelOptions
from examples.hstu.training import Run, Trainer
from trainer_client.balancing import BalanceOptions, Balancer, SplitOptions
from trainer_client.balancing.configuration import Configuration, load_configuration
from trainer_client.embedding.routing import DIST_TYPES
from trainer_client.observing.measurement import gather_breakdown

SMALL = {"layers": 2, "width": 64, "heads": 2, "head_dim": 32, "max_length": 256, "items": 2000, "embedding_dim": 32}


def main() -> None:
    options = parse_arguments()
    try:
        train(options)
    except (
        ValueError,
        FileNotFoundError,
        ImportError,
    ) as error:  # what flags, data or configuration made impossible, on all ranks alike
        sys.exit(f"train_hstu: {error}")


def train(options: argparse.Namespace) -> None:
    """Trains as the flags say and tells how it went."""
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    joined = dist.is_initialized()
    rank, device = start(options.device, grouped=options.embeddings == "torchrec")
    chosen = choose(options)
    histories = read_histories(options.data) if options.data else None
    model = model_options(options, device, histories)
    trainer = Trainer(
        model, device, learning_rate=options.learning_rate, track_layers=options.track_layers, seed=options.seed,
        storage=options.embeddings, dist_type=options.dist_type, plan_file=options.plan,
        activation_budget=None if options.activation_budget is None else int(options.activation_budget * 2**20),
        split=options.split,
    )  # fmt: skip
    balancer = make_balancer(options, chosen.options, split_options(model, device) if options.split else None)
    console = Console()
    sinks: list[Any] = [ConsoleLines(console, every=options.log_every)] if rank == 0 else []
    if options.log_file and rank == 0:
        sinks.append(JsonLines(options.log_file))
    log = BalanceLogger(sinks)
    batches = make_data(options, model, histories, rank)
    learned = trainer.learned_cost(prior=chosen.cost) if options.fit_cost else None
    run = trainer.run(batches, balancer, log=log, cost=learned or chosen.cost)
    log.close()
    summary = summarize(run, device, skip=options.skip)
    if learned is not None:
        summary["fit_explained"] = None if learned.fit is None else learned.fit.explained
    if rank == 0:
        report(summary, console)
        if options.json:
            options.json.write_text(json.dumps(summary, indent=1) + "\n")
        if options.plot:
            plot_balance(log.records, options.plot)
    balancer.close()
    if dist.is_initialized():
        dist.barrier()
        if not joined:
            dist.destroy_process_group()


def start(wanted: str | None, *, grouped: bool) -> tuple[int, torch.device]:
    """Joins the ranks that torchrun or the caller started; alone without them, in a group of one if `grouped`."""
    on_gpu = torch.cuda.is_available() if wanted is None else wanted == "cuda"
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if dist.is_initialized():
        return dist.get_rank(), device
    backend, own = "cpu:gloo,cuda:nccl" if on_gpu else "gloo", device if on_gpu else None
    if "RANK" in os.environ:
        dist.init_process_group(backend, device_id=own)
        return dist.get_rank(), device
    if grouped:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, device_id=own)  # type: ignore[attr-defined]
    return 0, device


def choose(options: argparse.Namespace) -> Configuration:
    """What the configuration file says."""
    if options.config is None:
        return Configuration(cost=None, options=BalanceOptions(), pipeline=None)
    chosen = load_configuration(options.config)
    if chosen.pipeline is not None:
        raise ValueError(f"{options.config}: pipeline is {chosen.pipeline!r}, but this example has a loop of its own; "
                         "leave pipeline out")  # fmt: skip
    return chosen


def split_options(model: ModelOptions, device: torch.device) -> SplitOptions:
    """When samples are split: by rates as steps of this model see them on H200, on CPUs wherever it evens out work."""
    if device.type != "cuda":
        return SplitOptions()
    numbers = 4 * model.num_layers * model.num_heads * model.head_dim
    return SplitOptions.at_rates(position_bytes=2 * numbers, within=130e9, between=30e9, cost_per_second=280e12)


def make_balancer(options: argparse.Namespace, choices: BalanceOptions, split: SplitOptions | None = None) -> Balancer:
    """The balancer that `--balancer` names."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    flags: dict[str, Any] = {"strategy": options.strategy, "counts": options.counts, "window": options.window}
    if split is not None:
        flags["split"] = split
    if options.max_tokens_per_rank is not None:
        flags["memory_caps"] = [float(options.max_tokens_per_rank)] * world
    choices = replace(choices, **{name: value for name, value in flags.items() if value is not None})
    if options.balancer == "off":
        return Balancer.off(options=choices)
    if options.balancer == "embedded":
        return Balancer.embedded(options=choices)
    return Balancer.connect(options.balancer, job=options.job, options=choices)


def model_options(options: argparse.Namespace, device: torch.device, histories: Histories | None) -> ModelOptions:
    """The model's shape for the data."""
    num_context = 2 if histories is None else histories.context.shape[1]
    least = num_context + 2 + options.candidates
    if options.max_length < least:
        raise ValueError(f"--max-length is {options.max_length}; use at least {least}, for {num_context} context "
                         f"features, an item and its action, and --candidates {options.candidates}")  # fmt: skip
    context_values = 1024 if histories is None else int(histories.context.max(initial=0)) + 1
    return ModelOptions(
        num_layers=options.layers,
        width=options.width,
        num_heads=options.heads,
        head_dim=options.head_dim,
        embedding_dim=options.embedding_dim,
        num_items=options.items if histories is None else histories.num_items,
        num_actions=8 if histories is None else int(histories.actions.max(initial=0)) + 1,
        num_context=num_context,
        num_context_values=max(context_values, 1),
        max_tokens=options.max_length,
        kernel=choose_kernel(
            options.kernel, device, options.candidates, attention=options.attention, split=options.split
        ),
        compile=device.type == "cuda" and not options.no_compile,
    )


def make_data(
    options: argparse.Namespace, model: ModelOptions, histories: Histories | None, rank: int
) -> Iterable[SequenceBatch]:
    """This rank's batches."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    if histories is not None:
        longest = (options.max_length - model.num_context - options.candidates) // 2
        data: Iterable[SequenceBatch] = HistoryBatches(
            histories=histories, batch_size=options.batch_size, rank=rank, world_size=world,
            num_candidates=options.candidates, max_history=longest, seed=options.seed,
        )  # fmt: skip
    else:
        data = SyntheticSequences(
            num_batches=options.steps, batch_size=options.batch_size,
            lengths=lengths_named(
                options.lengths, maximum=options.max_length, exponent=options.zipf, mean=options.mean_length
            ),
            items=Keys(count=options.items, exponent=1.05, drift=options.drift), num_candidates=options.candidates,
            seed=options.seed, rank=rank,
        )  # fmt: skip
    for step, batch in enumerate(data):
        if step == options.steps:
            return
        yield batch.pin_memory() if torch.cuda.is_available() else batch


def summarize(run: Run, device: torch.device, *, skip: int) -> dict[str, Any]:
    """Figures over all ranks; collective."""
    first = skip if len(run.times) > skip else 0
    breakdown = gather_breakdown(run.times[first:])
    reports = run.reports[first:]
    flops = torch.tensor(sum(run.flops[first:]), dtype=torch.float64)  # the costs may be in other units
    ranks = 1
    if dist.is_initialized():
        ranks = dist.get_world_size()
        dist.all_reduce(flops)
    tflops = float(flops) / ranks / (breakdown.step.sum() / 1e3) / 1e12
    peak = peak_tflops(device)
    layers: dict[str, Any] = {}
    for perf in run.perf:
        if perf.step >= first:
            layers.setdefault(perf.module.removeprefix("module."), []).append(perf)
    return breakdown.summary() | {
        "steps": len(reports),
        "tflops_per_rank": tflops,
        "mfu": tflops / peak if peak else None,
        "imbalance_before": sum(report.imbalance_before for report in reports) / max(len(reports), 1),
        "imbalance": sum(report.imbalance for report in reports) / max(len(reports), 1),
        "peak_gib": run.peak_bytes / 2**30,
        "first_loss": float(run.losses[0]) if len(run.losses) else None,
        "last_loss": float(run.losses[-10:].mean()) if len(run.losses) else None,
        "layers_tflops": {
            name: sum(perf.flops for perf in perfs) / sum(perf.forward_ms + perf.backward_ms for perf in perfs) / 1e9
            for name, perfs in layers.items()
        },
    }


def report(summary: dict[str, Any], console: Console) -> None:
    """What people want to know."""
    mfu = f", MFU {summary['mfu']:.1%}" if summary["mfu"] else ""
    ms = {name.removesuffix("_ms"): f"{value:.2f}" for name, value in summary.items() if name.endswith("_ms")}
    ms |= {name: f"{summary[f'step_ms_{name}']:.2f}" for name in ("median", "mean", "p99")}
    phases = [
        f"compute {ms['compute']}", f"waiting for the slowest rank {ms['waiting']}",
        f"exposed communication {ms['communication']}", f"data {ms['data']}", f"optimizer {ms['optimizer']}",
    ]  # fmt: skip
    load = f"{summary['imbalance_before']:.3f} as loaded, {summary['imbalance']:.3f} as trained"
    console_lines = [
        f"{summary['steps']} steps of {ms['median']} ms in the median (mean {ms['mean']}, p99 {ms['p99']}).",
        f"Means over steps and ranks, in ms: {', '.join(phases)}.",
        f"{summary['tflops_per_rank']:.3g} TFLOP/s per rank{mfu}. Load max/mean, mean over steps: {load}.",
    ]
    first, last = summary["first_loss"], summary["last_loss"]
    if first is not None:
        console_lines.append(f"Loss of the first step {first:.4f}, mean of the last ten {last:.4f}.")
    if "fit_explained" in summary:
        console_lines.append(f"--fit-cost: {tell_fit(summary['fit_explained'])}")
    for line in console_lines:
        console.print(line, highlight=False, soft_wrap=True)


def tell_fit(explained: float | None) -> str:
    """What fitting the cost came to."""
    if explained is None:
        return "too few steps were measured, or no fit explained them; batches were balanced by the given cost."
    return f"the fit explains {explained:.0%} of the variance of compute time; batches were balanced by it."


def make_parser() -> argparse.ArgumentParser:
    """The flags; none may begin one of torchrun's, which would take it for its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--balancer", default="embedded", help="off, embedded, or grpc://host:port of a balancer service")
    add("--job", default="train-hstu", help="name of the job at the service")
    add("--config", type=Path, help="YAML or TOML file of cost and balancing, by names; flags go before it")
    add("--strategy", choices=strategies(), help="default: minimal_move")
    add("--counts", choices=("equal", "free"), help="samples per rank; default: equal")
    add("--window", type=int, help="batches that are balanced together; default: 1")
    add("--max-tokens-per-rank", type=int, help="most tokens that any rank may get of a batch; default: any number")
    add("--activation-budget", type=float, help="MiB that a step may keep for its backward pass; default: all there is")
    add("--fit-cost", action="store_true", help="learn the cost from measured times")
    add("--embeddings", choices=STORAGES, default="local", help="where the item table lives")
    add("--dist-type", choices=DIST_TYPES, default="continuous", help="which rank owns an item (routed embeddings)")
    add("--plan", type=Path, help="placement of the tables by `evenkeel plan` (TorchRec embeddings)")
    add("--data", type=Path, help="MovieLens, KuaiRand, Gowalla, Amazon or Yambda; default: synthetic")
    add("--lengths", choices=DISTRIBUTIONS, default="zipf", help="distribution of synthetic lengths")
    add("--zipf", type=float, default=1.2, help="exponent of zipf")
    add("--mean-length", type=float, help="mean of lognormal (default 600) and normal (default half the longest)")
    add("--drift", type=float, default=0.0, help="places by which popularity moves each step")
    add("--steps", type=int, default=50, help="at most so many batches of each rank")
    add("--batch-size", type=int, default=32, help="samples per rank")
    add("--candidates", type=int, default=1, help="candidates per sample")
    add("--small", action="store_true", help="a shape for CPUs; other flags still count")
    for flag, default in (("layers", 8), ("width", 1024), ("heads", 4), ("head-dim", 256), ("embedding-dim", 128),
                          ("max-length", 4096), ("items", 100_000)):  # fmt: skip
        add(f"--{flag}", type=int, help=f"default {default}, or {SMALL[flag.replace('-', '_')]} with --small")
        parser.set_defaults(**{f"default_{flag.replace('-', '_')}": default})
    add("--attention", choices=ATTENTIONS, default="softmax", help="softmax, or pointwise with SiLU as in HSTU")
    add("--split", action="store_true", help="samples that outweigh a rank's share lie on several ranks")
    add("--kernel", choices=KERNELS, default="auto", help="of the attention")
    add("--no-compile", action="store_true", help="do not compile the layers")
    add("--device", choices=("cuda", "cpu"), help="default: GPUs if there are any")
    add("--learning-rate", type=float, default=1e-3)
    add("--seed", type=int, default=0)
    add("--track-layers", action="store_true", help="measure each layer; takes some time of the host")
    add("--skip", type=int, default=5, help="first steps that the summary leaves out")
    add("--log-file", type=Path, help="JSON lines of what balancing did")
    add("--log-every", type=int, default=10, help="steps between lines on the console")
    add("--json", type=Path, help="where to write the summary")
    add("--plot", type=Path, help="where to draw the load before and after balancing")
    return parser


def parse_arguments() -> argparse.Namespace:
    parser = make_parser()
    options = parser.parse_args()
    for name, small in SMALL.items():
        if getattr(options, name) is None:
            setattr(options, name, small if options.small else getattr(options, f"default_{name}"))
    check_arguments(options, parser)
    return options


def check_arguments(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Refuses what does not fit together, before any rank waits for another."""
    for name in (*SMALL, "steps", "batch_size", "candidates", "log_every"):
        value = getattr(options, name)
        if value < 1:
            parser.error(f"--{name.replace('_', '-')} is {value}; use at least 1")
    if options.skip < 0:
        parser.error(f"--skip is {options.skip}; use at least 0")
    if options.plan is not None and options.embeddings != "torchrec":
        parser.error(f"--plan is for --embeddings torchrec, not {options.embeddings}")
    if options.dist_type != "continuous" and options.embeddings != "routed":
        parser.error(f"--dist-type {options.dist_type} is for --embeddings routed, not {options.embeddings}")
    if options.split and (options.fit_cost or options.track_layers):
        parser.error("--fit-cost and --track-layers read lengths of whole samples; leave them out with --split")
    if options.attention == "silu" and options.kernel not in ("auto", "dense"):
        parser.error(f"--kernel {options.kernel} is of softmax attention; use auto or dense with --attention silu")
    on_gpu = torch.cuda.is_available() if options.device is None else options.device == "cuda"
    if not on_gpu and options.kernel not in ("auto", "dense"):
        parser.error(f"--kernel {options.kernel} needs a GPU; use dense or auto")


if __name__ == "__main__":
    main()
