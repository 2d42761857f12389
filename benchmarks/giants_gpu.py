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
import os
import platform
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks import giants_gpu_checks as checks
from benchmarks.giants_gpu_bench import WINDOW, Bench, between
from benchmarks.giants_gpu_data import Cell, TimedCost, batches_of, make_batch
from evenkeel import partitioning
from examples.hstu.training import Trainer
from trainer_client.attention import PieceGroup
from trainer_client.balancing import redistribution

CELLS = [
    *(Cell(giant=giant, samples=2) for giant in (65_536, 32_768, 131_072)),
    *(Cell(giant=giant, samples=4) for giant in (65_536, 32_768, 131_072)),
    *(Cell(giant=giant, samples=32) for giant in (65_536, 32_768, 131_072)),
    *(Cell(giant=0, samples=samples) for samples in (2, 4, 8, 32)),
]
STEPS = {131_072: 3, 65_536: 5, 32_768: 7, 0: 6}
SETTINGS = ("split", "even", "whole", "off", "window")
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
            times.append(between(before, after))
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
