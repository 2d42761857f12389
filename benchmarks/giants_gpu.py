"""Steps with a giant among the samples of two GPUs: split over the ranks, beside other ways of balancing.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.giants_gpu --json benchmarks/results/giants_2xh200.json
    torchrun --standalone --nproc-per-node 2 -m benchmarks.giants_gpu --quick      # CPUs, Gloo, tiny: only that it runs

The model is the HSTU of the examples (8 layers, width 1024, 4 heads of 256, bf16). Parts run one after the other until
`--seconds` are over; what is left out is named, and the file is written after each part:

checks: attention over random pieces on the ranks beside attention over whole samples on one, values and gradients.
cells: batches with one history of 32 k, 64 k or 128 k tokens among log-normal ones, 2, 4 or 32 samples a rank, and
batches of long histories; milliseconds of a step as loaded, with whole samples balanced, with windows of eight batches,
split, and of an even division: batches of the same FLOPs without a giant, the same on each rank.
without: batches without giants, balanced with splitting on and off, in turns.
blocks: a split step by how many of the GPU's blocks NCCL may take.
bf16: gradients of a split step beside those of whole samples, both against float32.
silu: split and even steps with pointwise attention.
memory: the longest history that fits on one rank whole, and on two split, from peaks at two lengths; and steps at the
predicted lengths within a memory limit.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks import giants_gpu_checks as checks
from benchmarks.giants_gpu_data import Cell, TimedCost, batches_of, make_batch
from evenkeel import partitioning
from evenkeel.partitioning.splits import SplitSample
from examples.datasets import SequenceBatch
from examples.hstu.attention import Attention, choose_kernel
from examples.hstu.model import ModelOptions
from examples.hstu.training import Trainer
from trainer_client.attention import PieceGroup
from trainer_client.balancing import BalancedLoader, BalanceOptions, Balancer, SplitOptions, redistribution
from trainer_client.observing.measurement import StepTimer

CELLS = [
    *(Cell(giant=giant, samples=2) for giant in (65_536, 32_768, 131_072)),
    *(Cell(giant=giant, samples=4) for giant in (65_536, 32_768, 131_072)),
    *(Cell(giant=giant, samples=32) for giant in (65_536, 32_768, 131_072)),
    *(Cell(giant=0, samples=samples) for samples in (2, 4, 8, 32)),
]
STEPS = {131_072: 3, 65_536: 5, 32_768: 7, 0: 6}
LONGEST = 131_072 + 64
WINDOW = 8
SETTINGS = ("split", "even", "whole", "off", "window")
EXCHANGE_RATE = 75e9  # bytes a second and rank, as steps saw it on two H200, of which the planner knows
NO_GIANTS = Cell(giant=0, samples=32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--seconds", type=float, default=500, help="no part begins later")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--giants", nargs="*", type=int, help="cells with these giants only; 0: of long histories")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, on CPUs too")
    options = parser.parse_args()
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, device_id=device if on_gpu else None, timeout=timedelta(seconds=150))
    for turn in (0, 1):  # compiled by one rank, and read by the others
        if (dist.get_rank() == 0) == (turn == 0):
            partitioning.warm_up()
            redistribution.warm_up(device)
        dist.barrier()
    bench = Bench(options, device)
    bench.results |= {
        "command": "torchrun --standalone --nproc-per-node 2 -m benchmarks.giants_gpu",
        "machine": torch.cuda.get_device_name(device) if on_gpu else platform.machine(),
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda},
        "ranks": bench.ranks,
    }
    for name in options.parts:
        bench.part(name, PARTS[name])
    bench.say(f"done after {bench.seconds:.0f} s")
    dist.barrier()
    dist.destroy_process_group()


class Bench:
    """The model on this rank, and what has been measured."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        """Builds the model; collective."""
        self.options, self.device = options, device
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.scale = 128 if options.quick else 1
        self.results: dict[str, Any] = {}
        self._began = time.monotonic()
        self._balancers: dict[str, Balancer] = {}
        self.model = self._model_options("softmax")
        self.trainer = Trainer(self.model, device, learning_rate=1e-4, split=True)
        self.cost: TimedCost | None = None

    def _model_options(self, attention: Attention) -> ModelOptions:
        size: dict[str, Any] = {"max_tokens": LONGEST}
        if self.options.quick:
            size = {"num_layers": 2, "width": 32, "num_heads": 2, "head_dim": 16, "max_tokens": 8192, "num_items": 500}
        kernel = choose_kernel("auto", self.device, 1, attention=attention, split=True)
        return ModelOptions(kernel=kernel, compile=self.device.type == "cuda", **size)

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._began

    def has_time(self) -> bool:
        """Whether something more may begin, on all ranks alike."""
        answer = [self.seconds < self.options.seconds]
        dist.broadcast_object_list(answer, src=0, device=torch.device("cpu"))
        return bool(answer[0])

    def say(self, text: str) -> None:
        """To the console, by rank 0."""
        if self.rank == 0:
            print(f"[{self.seconds:5.0f} s] {text}", flush=True)

    def part(self, name: str, run: Callable[[Bench], Any]) -> None:
        """Runs a part, unless time is over; what it raises is noted, and the next part runs."""
        if not self.has_time():
            self.results.setdefault("left_out", []).append(name)
            self.write()
            return
        self.say(name)
        found, error = None, ""
        try:
            found = run(self)
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem}"
            traceback.print_exc()
        errors = self.gather(error)
        if found is not None and not any(errors):
            self.results[name] = found
        if any(errors):
            self.results.setdefault("errors", {})[name] = errors
        self.write()

    def gather(self, value: Any) -> list[Any]:
        """The value of each rank."""
        values: list[Any] = [None] * self.ranks
        dist.all_gather_object(values, value)
        return values

    def write(self) -> None:
        """All that has been measured, by rank 0."""
        if self.rank == 0 and self.options.json:
            self.options.json.write_text(json.dumps(self.results, indent=1) + "\n")

    def balancer(self, setting: str) -> Balancer:
        """The balancer of a setting."""
        if setting in ("off", "even"):
            return self._balancers.setdefault("off", Balancer.off())
        if setting not in self._balancers:
            split = None
            if setting == "split":
                split = SplitOptions(above=0.02, within=self.exchange_price())
            window = WINDOW if setting == "window" else 1
            choices = BalanceOptions(counts="free", split=split, window=window, timeout=timedelta(seconds=60))
            self._balancers[setting] = Balancer.embedded(job=setting, options=choices)
        return self._balancers[setting]

    def exchange_price(self) -> float:
        """Milliseconds that a position's keys and values take, and their gradients back, in all layers."""
        model = self.model
        number = 2 if self.device.type == "cuda" else 4
        values = 2 * model.num_heads * model.head_dim * number * model.num_layers * 2
        return 1e3 * values / EXCHANGE_RATE

    def loader(self, batches: Iterable[SequenceBatch], setting: str, name: str) -> BalancedLoader[SequenceBatch]:
        """The batches, balanced."""
        assert self.cost is not None
        return BalancedLoader(
            list(batches), self.balancer(setting), cost=self.cost, memory=self.model.tokens(),
            spec=SequenceBatch.spec(), device=self.device, name=name,
        )  # fmt: skip

    def run(self, loader: BalancedLoader[SequenceBatch], trainer: Trainer | None = None) -> dict[str, Any]:
        """Trains; milliseconds between steps, from the first batch to the end, and what was split."""
        trainer = trainer or self.trainer
        timer = StepTimer(self.device)
        marks, modes, split = [], [], []
        self.wait()
        for batch in loader:
            marks.append(self.mark())
            timer.batch_ready()
            pieces = trainer.pieces(loader.splits)
            trainer._step(batch, loader.loss_scale, timer, pieces)
            timer.end_step()
            modes.append(loader.report.mode.value)
            split.append(loader.splits)
        marks.append(self.mark())
        self.wait()
        timer.close()
        times = [_between(*pair) for pair in itertools.pairwise(marks)]
        return {"ms": times, "modes": sorted(set(modes)), **sum_up(split, self)}

    def mark(self) -> Any:
        """A point of time, on the device's stream."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def wait(self) -> None:
        """Until all ranks have done all that they have queued."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        dist.barrier()


def _between(first: Any, second: Any) -> float:
    return 1e3 * (second - first) if isinstance(first, float) else float(first.elapsed_time(second))


def sum_up(steps: list[tuple[SplitSample, ...]], bench: Bench) -> dict[str, Any]:
    """Split samples, their pieces, and what travels beside the least that must."""
    model = bench.model
    number = 2 if bench.device.type == "cuda" else 4
    position = 2 * model.num_heads * model.head_dim * number * model.num_layers * 2  # forward, and gradients backward
    sent = least = 0
    for sample in (sample for splits in steps for sample in splits):
        for index, piece in enumerate(sample.pieces):
            others = {later.rank for later in sample.pieces[index + 1 :]} - {piece.rank}
            sent += sample.num_keys(index) * len(others)
            least += min(piece.begin, len(sample) - sample.num_candidates)
    samples = [[(piece.rank, len(piece)) for piece in sample.pieces] for sample in (steps[-1] if steps else ())]
    return {
        "split_samples": sum(map(len, steps)) / max(len(steps), 1), "last_split": samples,
        "exchanged_bytes": sent * position / max(len(steps), 1), "exchanged_over_least": sent / least if least else 1.0,
    }  # fmt: skip


# ---------------------------------------------------------------------- parts


def check(bench: Bench) -> dict[str, Any]:
    """Attention over pieces beside attention over whole samples, and batches cut on the device."""
    return checks.attention(bench.device, quick=bench.options.quick) | {"cut": checks.cuts(bench.device)}


def calibrate(bench: Bench) -> dict[str, Any]:
    """What a position and a pair of positions take, forward and backward; by which samples are balanced."""
    scale, trainer = bench.scale, bench.trainer
    shapes = {"short": [1024] * 32, "long": [32_768]}
    found = {}
    for name, lengths in shapes.items():
        batch = make_batch([max(length // scale, 16) for length in lengths], bench.model, rank=bench.rank, step=0)
        batch = batch.to(bench.device)
        times = []
        for _ in range(6):
            bench.wait()
            before = bench.mark()
            with trainer._mixed():
                trainer._bare(batch).sum().backward()
            after = bench.mark()
            bench.wait()
            times.append(_between(before, after))
        trainer._bare.zero_grad(set_to_none=True)
        found[name] = float(np.median(times[2:]))
    found = {name: float(np.mean(bench.gather(value))) for name, value in found.items()}
    positions = {name: sum(max(length // scale, 16) for length in lengths) for name, lengths in shapes.items()}
    pairs = {name: sum(max(n // scale, 16) ** 2 / 2 for n in lengths) for name, lengths in shapes.items()}
    table = np.array([[positions[name], pairs[name]] for name in shapes])
    per_position, per_pair = np.linalg.solve(table, [found[name] for name in shapes])
    bench.cost = TimedCost(
        per_position=max(float(per_position), 1e-6), per_pair=max(float(per_pair), 1e-9),
        context=bench.model.num_context,
    )  # fmt: skip
    return {"ms": found, "ms_of_a_position": per_position, "ms_of_a_pair": per_pair}


def cells(bench: Bench) -> dict[str, Any]:
    """All cells; each is written when it is known."""
    found: dict[str, Any] = {}
    warm(bench)
    giants = bench.options.giants
    for cell in CELLS[:4] + CELLS[-2:] if bench.options.quick else CELLS:
        if giants is not None and cell.giant not in giants:
            continue
        if not bench.has_time():
            bench.results.setdefault("left_out", []).append(cell.name)
            continue
        row: dict[str, Any] = {"tokens": cell.lengths(bench.ranks, scale=bench.scale).tolist()}
        for setting in SETTINGS:
            steps = STEPS[cell.giant] + 1
            if setting == "window":
                steps = WINDOW
                if cell.giant == 131_072 and cell.samples > 2:
                    continue  # takes long, and differs little from fewer samples
            batches = batches_of(
                cell, steps, bench.model, rank=bench.rank, ranks=bench.ranks, even=setting == "even", scale=bench.scale
            )
            run = bench.run(bench.loader(batches, setting, "cells"))
            counted = run["ms"][1 if setting != "window" else 0 :]
            row[setting] = run | {"mean_ms": float(np.mean(counted)), "median_ms": float(np.median(counted))}
        for setting in set(SETTINGS) & row.keys():
            row[setting]["over_even"] = row[setting]["mean_ms"] / row["even"]["mean_ms"]
        found[cell.name] = row
        said = ", ".join(
            f"{setting} {row[setting]['mean_ms']:.1f} ms ({row[setting]['over_even']:.3f})"
            for setting in SETTINGS
            if setting in row
        )
        bench.say(f"{cell.name}: {said}")
        bench.results["cells"] = found
        bench.write()
    return found


def warm(bench: Bench) -> None:
    """Compiles what steps need: with pieces on a rank and without."""
    cell = Cell(giant=32_768, samples=4)
    for setting in ("even", "split", "whole"):
        batches = batches_of(
            cell, 3, bench.model, rank=bench.rank, ranks=bench.ranks, even=setting == "even", scale=bench.scale
        )
        bench.run(bench.loader(batches, setting, "cells"))
    bench.say("warmed up")


def without(bench: Bench) -> dict[str, Any]:
    """Batches that have no giant, with splitting on and off, in turns."""
    cell = replace(NO_GIANTS, samples=32)
    rng = np.random.default_rng(3)
    lengths = np.clip(rng.lognormal(6.0, 0.9, (24, bench.ranks, cell.samples)), 64, 4096) / bench.scale
    batches = [
        make_batch(np.maximum(step[bench.rank], 16).astype(np.int64), bench.model, rank=bench.rank, step=number)
        for number, step in enumerate(lengths)
    ]
    times: dict[str, list[float]] = {"split": [], "whole": []}
    pairs = 2 if bench.options.quick else 8
    for turn in range(2 * pairs + 2):
        setting = "split" if (turn + turn // 2) % 2 else "whole"
        run = bench.run(bench.loader(batches, setting, "cells"))
        assert run["split_samples"] == 0, "these batches have giants"
        if turn >= 2:
            times[setting].append(float(np.median(run["ms"][3:])))
    ratios = [split / whole for split, whole in zip(times["split"], times["whole"], strict=True)]
    return {"median_ms": times, "ratio": float(np.median(ratios)), "ratios": ratios}


def blocks(bench: Bench) -> dict[str, Any]:
    """A split step by how many blocks NCCL may take of a GPU while it waits and sends."""
    found, kept = {}, bench.trainer._pieces
    cell = Cell(giant=65_536, samples=4)
    for count in (8, 16, 32):
        bench.trainer._pieces = PieceGroup(max_ctas=count)
        batches = batches_of(cell, 5, bench.model, rank=bench.rank, ranks=bench.ranks, even=False, scale=bench.scale)
        found[str(count)] = float(np.mean(bench.run(bench.loader(batches, "split", "cells"))["ms"][1:]))
    bench.trainer._pieces = kept
    return {"mean_ms": found}


def bf16(bench: Bench) -> dict[str, Any]:
    """Errors of gradients, split and whole."""
    assert bench.cost is not None
    lengths = np.full((bench.ranks, 8), 500, np.int64)
    lengths[0, 0] = 12_000 if bench.options.quick else 6000
    found = []
    for step in range(2 if bench.options.quick else 6):
        own = make_batch(np.maximum(lengths[bench.rank] // bench.scale, 16), bench.model, rank=bench.rank, step=step)
        found.append(checks.gradients(bench.trainer, own, bench.balancer("split"), bench.cost, bench.device))
    return {name: [each[name] for each in found] for name in found[0]}


def silu(bench: Bench) -> dict[str, Any]:
    """Split and even steps with pointwise attention."""
    trainer = Trainer(bench._model_options("silu"), bench.device, learning_rate=1e-4, split=True)
    found = {}
    for cell in (Cell(giant=32_768, samples=4), Cell(giant=65_536, samples=4)):
        row = {}
        for setting in ("split", "even", "whole"):
            for steps in (3, 5):  # the first time to compile
                batches = batches_of(
                    cell, steps, bench.model, rank=bench.rank, ranks=bench.ranks, even=setting == "even",
                    scale=bench.scale,
                )  # fmt: skip
                run = bench.run(bench.loader(batches, setting, "cells"), trainer)
            row[setting] = run | {"mean_ms": float(np.mean(run["ms"][1:]))}
        for measured in row.values():
            measured["over_even"] = measured["mean_ms"] / row["even"]["mean_ms"]
        found[cell.name] = row
        bench.say(f"silu, {cell.name}: " + ", ".join(f"{name} {of['mean_ms']:.1f} ms" for name, of in row.items()))
        if not bench.has_time():
            break
    return found


def memory(bench: Bench) -> dict[str, Any]:
    """The longest history that fits."""
    if bench.device.type != "cuda":
        return {"left out": "no GPU"}
    return checks.memory(bench.trainer, bench.device, gather=bench.gather, say=bench.say)


PARTS: dict[str, Callable[[Bench], Any]] = {
    "checks": check,
    "calibration": calibrate,
    "cells": cells,
    "without": without,
    "bf16": bf16,
    "silu": silu,
    "blocks": blocks,
    "memory": memory,
}


if __name__ == "__main__":
    main()
