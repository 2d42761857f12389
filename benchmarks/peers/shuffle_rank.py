"""One rank of the shufflers side by side; `benchmarks.peers` starts it by torchrun."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.end_to_end_rank import compilations, gather, join, make_data, make_model, save, say
from benchmarks.peers.batches import batch_class, make_batch, to_sequences
from benchmarks.peers.checkouts import RecsysExamples, load_recsys_examples
from benchmarks.peers.loops import Ours, Shuffled, Timed, their_shuffler
from benchmarks.peers.on_cpu import stand_ins
from examples.hstu.model import loss_of
from examples.hstu.training import Trainer
from trainer_client.balancing import BalanceOptions, Balancer
from trainer_client.balancing.adapters.recsys_examples import evenkeel_shuffler


def main() -> None:
    options, device = join()
    with nullcontext() if device.type == "cuda" else stand_ins():
        measure(options, device)
    dist.barrier()
    dist.destroy_process_group()


@dataclass(slots=True, kw_only=True)
class Entrant:
    """A setting, and what was measured of it so far."""

    setting: str
    source: Timed
    closing: Callable[[], None] | None = None
    steps_ms: list[list[float]] = field(default_factory=list)
    host_ms: list[float] = field(default_factory=list)
    loads: list[list[float]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak_bytes: int = 0


def measure(options: argparse.Namespace, device: torch.device) -> None:
    """Runs all cases, and has rank 0 write what all ranks measured."""
    rank = dist.get_rank()
    peer = load_recsys_examples(Path(options.recsys_examples))
    trainer = Trainer(make_model(options, device), device, learning_rate=1e-4, seed=options.seed)
    results: dict[str, Any] = {
        "peer": asdict(peer.checkout),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "ranks": dist.get_world_size(),
        "options": vars(options),
        "cases": [],
    }
    say(rank, f"{peer.checkout}; {trainer.options.num_layers} layers on {device}")
    kind = batch_class(peer.batch.BaseBatch)
    for case in options.lengths:
        began = time.perf_counter()
        batches = make_batches(options, case, kind, trainer, device)
        warm_up = Shuffled(None, device)
        train(trainer, Timed(warm_up), batches[: options.warm_up], Entrant(setting="", source=Timed(warm_up)))
        entrants = [enter(setting, options, peer, device, case) for setting in options.settings]
        length = -(-options.steps // options.blocks)
        for first in range(0, options.steps, length):
            entrants.reverse()  # settings take turns, so that a host that slows down does so for all
            for entrant in entrants:
                trainer.reset()
                compiled = compilations()
                train(trainer, entrant.source, batches[first : first + length], entrant)
                shown = float(np.median(entrant.steps_ms[-1]))
                again = f", {compilations() - compiled} graphs compiled" if compilations() > compiled else ""
                say(rank, f"{case}, {entrant.setting}, from step {first}: {shown:.2f} ms a step{again}")
        collected = {}
        for entrant in sorted(entrants, key=lambda one: options.settings.index(one.setting)):
            measured = ("steps_ms", "host_ms", "loads", "losses", "peak_bytes")
            collected[entrant.setting] = {name: gather(getattr(entrant, name)) for name in measured}
            if entrant.closing is not None:
                entrant.closing()
        seconds = time.perf_counter() - began
        results["cases"].append({"case": case, "seconds": seconds, "settings": collected})
        if rank == 0:  # after each case, so that a run that is stopped leaves what it has
            save(results)


def enter(setting: str, options: argparse.Namespace, peer: RecsysExamples, device: torch.device, case: str) -> Entrant:
    """A setting, ready for its first block."""
    if setting in ("evenkeel", "evenkeel_window"):
        window = options.window if setting == "evenkeel_window" else 1
        balancer = Balancer.embedded(options=BalanceOptions(window=window))
        ours = Ours(balancer, device, f"{case}-{setting}")
        return Entrant(setting=setting, source=Timed(ours), closing=balancer.close)
    shuffler, closing = None, None
    if setting == "evenkeel_drop_in":
        shuffler = evenkeel_shuffler(type(their_shuffler(peer)))()
        shuffler.name = f"{case}-{setting}"
        closing = shuffler.close
    elif setting != "off":
        shuffler = their_shuffler(peer)
    source = Timed(Shuffled(shuffler, device, all_to_all=setting == "theirs_all_to_all"))
    return Entrant(setting=setting, source=source, closing=closing)


def make_batches(
    options: argparse.Namespace, case: str, kind: type[Any], trainer: Trainer, device: torch.device
) -> list[Any]:
    """This rank's batches."""
    cost, batches = trainer.options.cost(), []
    for sequences in make_data(options, case, dist.get_rank()):
        batch = make_batch(kind, sequences, torch.as_tensor(np.asarray(cost(sequences)) / 1e3).long())
        batches.append(batch.pin_memory() if device.type == "cuda" else batch)
    return batches


def train(trainer: Trainer, source: Timed, batches: list[Any], entrant: Entrant) -> None:
    """One block of steps."""
    total = sum(batch.actual_batch_size for batch in batches[:1]) * dist.get_world_size()
    device, on_gpu = trainer.device, trainer.device.type == "cuda"
    dist.barrier()
    if on_gpu:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    source.begin(batches)
    marks, host, losses, loads = [_mark(on_gpu)], [], [], []
    for _ in batches:
        before = source.seconds
        batch = source.take()
        loads.append(batch.workload.sum())
        sequences = to_sequences(batch)
        source.before_forward()
        mixed: Any = torch.autocast("cuda", dtype=torch.bfloat16) if on_gpu else nullcontext()
        with mixed:
            loss = loss_of(trainer.model(sequences), sequences)
        source.after_forward()
        trainer.optimizer.zero_grad(set_to_none=True)
        (loss * (dist.get_world_size() / total)).backward()
        trainer.optimizer.step()
        losses.append(loss.detach() / total)
        marks.append(_mark(on_gpu))
        host.append(1000 * (source.seconds - before))
    if on_gpu:
        torch.cuda.synchronize(device)
        entrant.peak_bytes = max(entrant.peak_bytes, torch.cuda.max_memory_allocated(device))
    entrant.steps_ms.append([_between(*pair) for pair in pairwise(marks)])
    entrant.host_ms += host
    entrant.loads.append([float(load) for load in loads])
    entrant.losses += [float(loss) for loss in losses]


def _mark(on_gpu: bool) -> Any:
    if not on_gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _between(first: Any, second: Any) -> float:
    return float(first.elapsed_time(second)) if hasattr(first, "elapsed_time") else 1000 * (second - first)


if __name__ == "__main__":
    main()
