"""What balancing gains on more ranks than there are GPUs.

    python -m benchmarks.end_to_end_replay --ranks 8 16 --json benchmarks/results/end_to_end_replay.json

Every rank's batch of every step is trained on a real GPU, one after the other, and a step takes as long as its slowest
rank: no samples move between GPUs and no gradients are averaged. So this shows what the lengths and the plans give, by
the clock; what moving and agreeing cost, `benchmarks.end_to_end` shows. The GPUs of this host share the steps, and
each step stays on one of them. Same model, data and seeds as there:

- `off`: every sample is trained where it was loaded;
- `kk`: Karmarkar-Karp with equal counts;
- `minimal_move`: this library's default, by FLOPs;
- `window`: the same over windows of `--window` batches.

Columns as in `benchmarks.end_to_end`.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as mp
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

from benchmarks.end_to_end import add_workload
from benchmarks.end_to_end_rank import make_data, make_model, runs_on_gpus, use_device
from benchmarks.end_to_end_report import show, summarize
from benchmarks.harness.results import write
from evenkeel.partitioning.refinements import plan_round
from evenkeel.partitioning.rounds import RoundOptions, RoundSamples
from examples.datasets import SequenceBatch
from examples.hstu.training import Run, Trainer
from trainer_client.balancing import Balancer
from trainer_client.balancing.batches import FlatBatch, flatten
from trainer_client.balancing.costs.base import Cost
from trainer_client.balancing.redistribution import pick

SETTINGS = {"off": None, "kk": "karmarkar_karp", "minimal_move": "minimal_move", "window": "minimal_move"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8], help="numbers of ranks to replay")
    add_workload(parser, tuple(SETTINGS))
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.set_defaults(steps=40)
    options = parser.parse_args()
    on_gpu = runs_on_gpus(options)
    workers = torch.cuda.device_count() if on_gpu else 1
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_worker, (workers, on_gpu, options, folder), nprocs=workers)  # type: ignore[attr-defined,no-untyped-call]
        parts = [json.loads((Path(folder) / f"{worker}.json").read_text()) for worker in range(workers)]
    console = Console(width=190)
    results: dict[str, Any] = {"options": parts[0]["options"], "gpus": workers, "replays": {}}
    for ranks in options.ranks:
        merged = {name: merge([part["replays"][str(ranks)][name] for part in parts]) for name in options.lengths}
        raw = {"ranks": ranks, "device": f"{parts[0]['device']} (replayed on {workers})", "workloads": merged}
        results["replays"][str(ranks)] = summarize(raw, skip=0)
        show(results["replays"][str(ranks)], console)
    write(options.json, results)


def run_worker(worker: int, workers: int, on_gpu: bool, options: argparse.Namespace, folder: str) -> None:
    """Replays this GPU's share of the steps and writes what it measured."""
    torch.set_num_threads(2 if on_gpu else os.cpu_count() or 1)
    device = use_device(on_gpu, worker)
    model = make_model(options, device)
    trainer = Trainer(model, device, learning_rate=1e-4, seed=options.seed)
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if on_gpu else "CPU",
        "options": {key: value for key, value in vars(options).items() if not isinstance(value, Path)},
        "replays": {},
    }
    windows = range(0, options.steps, options.window)
    own = [step for first in windows[worker::workers] for step in range(first, first + options.window)]
    own = [step for step in own if step < options.steps]
    for ranks in options.ranks:
        results["replays"][ranks] = {}
        for lengths in options.lengths:
            all_steps = [list(make_data(options, lengths, rank)) for rank in range(ranks)]
            mine = [[batches[step] for step in own] for batches in all_steps]
            trainer.reset()
            loaded = [pinned(batch, on_gpu) for step in zip(*mine, strict=True) for batch in step]
            trainer.run(loaded[: options.warm_up], Balancer.off())
            plans = {setting: plan(mine, setting, model.cost(), options.window) for setting in options.settings}
            runs: dict[str, list[Run]] = {setting: [] for setting in options.settings}
            for first in track(range(0, len(own), options.window), f"{ranks} ranks, {lengths}", disable=worker > 0):
                for setting, (planned, _) in plans.items():
                    batches = [batch for step in planned[first : first + options.window] for batch in step]
                    runs[setting].append(trainer.run([pinned(batch, on_gpu) for batch in batches], Balancer.off()))
            settings = {setting: collect(runs[setting], ranks) | plans[setting][1] for setting in options.settings}
            results["replays"][ranks][lengths] = {"steps": own, "settings": settings}
    (Path(folder) / f"{worker}.json").write_text(json.dumps(results))


def pinned(batch: SequenceBatch, on_gpu: bool) -> SequenceBatch:
    """The batch as a DataLoader with pin_memory gives it."""
    return batch.pin_memory() if on_gpu else batch


def plan(
    batches: list[list[SequenceBatch]], setting: str, cost: Cost, window: int
) -> tuple[list[list[SequenceBatch]], dict[str, list[float]]]:
    """Batches of all ranks, step after step, as the setting assigns them, and how good the plans are.

    Args:
        batches: (ranks, steps) as loaded.
        setting: One of `SETTINGS`.
        cost: Of each sample.
        window: Batches of a window in the setting `window`.
    """
    ranks, steps = len(batches), len(batches[0])
    size = window if setting == "window" else 1
    planned: list[list[SequenceBatch]] = []
    imbalance: list[float] = []
    moved_share: list[float] = []
    for first in range(0, steps, size):
        count = min(size, steps - first)
        places = [(rank, step) for rank in range(ranks) for step in range(count)]
        loaded = [batches[rank][first + step] for rank, step in places]
        flats = [flatten(batch, SequenceBatch.spec()) for batch in loaded]
        counts = [flat.num_samples for flat in flats]
        homes, loaded_steps = (np.repeat(np.array(which, np.int32), counts) for which in zip(*places, strict=True))
        costs, sizes = np.concatenate([cost(batch) for batch in loaded]), np.concatenate([flat.sizes for flat in flats])
        destinations, steps_of = homes, loaded_steps
        strategy = SETTINGS[setting]
        if strategy is not None:
            samples = RoundSamples(
                batch_sizes=np.array(counts).reshape(ranks, count), costs=costs, lengths=sizes[:, None], sizes=sizes
            )
            found = plan_round(samples, RoundOptions(strategy=strategy))
            destinations, steps_of = found.destinations, loaded_steps if found.steps is None else found.steps
        for step in range(count):
            inside = steps_of == step
            loads = np.bincount(destinations[inside], costs[inside], ranks)
            imbalance.append(float(loads.max() / loads.mean()))
            moved_share.append(float(sizes[inside & (destinations != homes)].sum() / sizes[inside].sum()))
            planned.append([assemble(flats, counts, inside & (destinations == rank)) for rank in range(ranks)])
    return planned, {"imbalance": imbalance, "moved_share": moved_share}


def assemble(flats: list[FlatBatch], counts: list[int], wanted: NDArray[np.bool_]) -> SequenceBatch:
    """The batch of the wanted samples of all batches."""
    batch = pick(flats, [np.flatnonzero(own) for own in np.split(wanted, np.cumsum(counts)[:-1])]).unflatten()
    assert isinstance(batch, SequenceBatch)
    return batch


def collect(runs: list[Run], ranks: int) -> dict[str, Any]:
    """What was measured, by rank and step, as `benchmarks.end_to_end_rank` writes it; nothing travels."""
    compute = np.array([step.compute for run in runs for step in run.times]).reshape(-1, ranks)
    optimizer = np.array([step.optimizer for run in runs for step in run.times]).reshape(-1, ranks)
    waiting = compute.max(axis=1, keepdims=True) - compute
    return {
        "times": np.stack([0 * compute, compute, waiting, optimizer], axis=2).transpose(1, 0, 2).tolist(),
        "flops": np.concatenate([run.flops for run in runs]).reshape(-1, ranks).T.tolist(),
        "peak_bytes": [max(run.peak_bytes for run in runs)],
    }


def merge(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The workload of all steps, in their order, from the parts that the GPUs replayed."""
    order = np.argsort(np.concatenate([part["steps"] for part in parts]))
    settings: dict[str, Any] = {}
    for name in parts[0]["settings"]:
        all_parts = [part["settings"][name] for part in parts]
        settings[name] = {
            key: np.concatenate([part[key] for part in all_parts])[order].tolist()
            for key in ("imbalance", "moved_share")
        }
        settings[name] |= {
            key: np.concatenate([part[key] for part in all_parts], axis=1)[:, order].tolist()
            for key in ("times", "flops")
        }
        settings[name]["peak_bytes"] = [value for part in all_parts for value in part["peak_bytes"]]
    return {"settings": settings}


if __name__ == "__main__":
    main()
