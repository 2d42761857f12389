"""Global batches of a fixed number of samples beside such of a budget of cost, at the same mean size.

    python -m benchmarks.budgets --json benchmarks/results/budgets.json
    python -m benchmarks.budgets --quick
    python -m benchmarks.budgets --device cuda --ranks 2 --json benchmarks/results/budgets_2xh200.json

Three parts. `loads` follows the loads of 8 ranks over many steps, for two costs and three distributions of lengths: how
much longer the longest rank takes than the mean (with and without balancing), how much steps differ, what balancing
still moves, and the tokens of the fullest rank. It is exact and the same on every machine. `training` trains a small
ranking model on real ranks (Gloo on the CPU, NCCL on GPUs) behind `BalancedLoader`, with the time of samples of each
length as cost, measured first; a step's time is that of its slowest rank in forward and backward: CPU time of its
thread, the shortest of three runs, or by CUDA events. `costs` is what samplers take of a training loop, also with 10⁹
samples. With `--parts` a part is measured anew and the others in the file stay.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from evenkeel.partitioning import partition
from examples.datasets.lengths import Lengths, LogNormalLengths, ZipfLengths
from examples.demo.histories import NUM_ITEMS
from examples.demo.model import Ranker
from trainer_client import BalancedLoader, Balancer, BatchSpec, GlobalBatchSampler, TokenBudgetSampler
from trainer_client.balancing.sampling import OrderedBatchSampler

RANKS = 8  # of the part `loads`
SAMPLES = 32  # of a rank and step, in the mean
DISTRIBUTIONS: dict[str, Lengths] = {
    "lognormal": LogNormalLengths(mean=600),
    "zipf": ZipfLengths(exponent=1.2),
    "cut": LogNormalLengths(mean=2500),  # histories of which many are longer than the model takes, as KuaiRand's
}
COSTS: dict[str, Callable[[NDArray[np.int64]], NDArray[np.int64]]] = {
    "tokens": lambda lengths: lengths,
    "hstu": lambda lengths: lengths * lengths + 5120 * lengths,  # attention and products, at width 1024
}
_REPEATS = {"cpu": 3, "cuda": 1}  # of each step, of which the shortest counts: other work slows a shared CPU down
WIDTH, NUM_LAYERS, NUM_HEADS = {"cpu": 32, "cuda": 512}, 2, 2


def _sampler(
    count: int, budgeted: NDArray[Any] | None, samples: int, rank: int | None = None, world_size: int | None = RANKS
) -> OrderedBatchSampler:
    """Of a number of samples in a step, or of a budget that is as much in the mean."""
    if budgeted is None:
        return GlobalBatchSampler(samples, global_batch_size=count, rank=rank, world_size=world_size)
    budget = count * float(budgeted.mean())
    return TokenBudgetSampler(samples, budget=budget, costs=budgeted, rank=rank, world_size=world_size)


def loads_of(
    samplers: list[OrderedBatchSampler], lengths: NDArray[np.int64], costs: NDArray[np.int64], steps: int
) -> dict[str, float]:
    """What ranks have to do in some steps, as their samplers divide it, and balanced."""
    longest, balanced, total, tokens, moved, size = [], [], [], [], 0.0, 0.0
    ranks = [iter(sampler) for sampler in samplers]
    for _ in range(steps):
        parts = [np.array(next(rank, []), np.int64) for rank in ranks]
        chosen = np.concatenate(parts)
        homes = np.repeat(np.arange(RANKS), [part.size for part in parts])
        plan = partition(costs[chosen], homes, RANKS, sizes=lengths[chosen])
        longest.append(float(plan.home_loads.max()))
        balanced.append(float(plan.loads.max()))
        total.append(float(plan.loads.sum()))
        tokens.append(float(np.bincount(plan.destinations, lengths[chosen], RANKS).max()))
        moved, size = moved + plan.moved_size, size + float(lengths[chosen].sum())
    times, sums = np.array(balanced), np.array(total)
    return {
        "steps": steps,
        "max_over_mean_as_loaded": float((np.array(longest) * RANKS / sums).mean()),
        "max_over_mean_balanced": float((times * RANKS / sums).mean()),
        "efficiency_as_loaded": float(sums.sum() / RANKS / np.sum(longest)),
        "efficiency_balanced": float(sums.sum() / RANKS / times.sum()),
        "step_cv_balanced": float(times.std() / times.mean()),
        "longest_step_over_mean": float(times.max() / times.mean()),
        "most_tokens_of_a_rank_over_mean": float(np.max(tokens) * RANKS * steps / size),
        "moved_share": moved / size,
    }


def measure_loads(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each distribution, cost and way to form batches."""
    rows, steps = [], 20 if options.quick else 200
    for kind, distribution in DISTRIBUTIONS.items():
        count = RANKS * SAMPLES
        lengths = distribution.draw(np.random.default_rng(0), 2 * steps * count)
        for name, cost in COSTS.items():
            costs = cost(lengths)
            ways: dict[str, NDArray[np.int64] | None] = {"count": None, "token budget": lengths, "cost budget": costs}
            for way, budgeted in ways.items():
                if name == "tokens" and way == "cost budget":
                    continue  # the same
                samplers = [_sampler(count, budgeted, len(lengths), rank) for rank in range(RANKS)]
                rows.append(
                    {"lengths": kind, "cost": name, "batches": way, **loads_of(samplers, lengths, costs, steps)}
                )
    return rows


class _Histories(Dataset[dict[str, Any]]):
    """Histories of given lengths, each drawn when it is read."""

    def __init__(self, lengths: NDArray[np.int64]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        rng = np.random.default_rng(index)
        taste = int(rng.integers(0, 2))
        items = rng.integers(0, NUM_ITEMS // 2, int(self.lengths[index])) + taste * (NUM_ITEMS // 2)
        return {"items": torch.from_numpy(items), "label": float(taste)}


def _collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {
        "items": torch.cat([sample["items"] for sample in samples]),
        "num_items": torch.tensor([len(sample["items"]) for sample in samples]),
        "label": torch.tensor([sample["label"] for sample in samples]),
    }


class _Clock:
    """Seconds of this rank's own work: CPU time of this thread, or of a GPU by its events."""

    def __init__(self, device: torch.device) -> None:
        timing = torch.cuda.Event if device.type == "cuda" else None
        self._events: list[Any] = [] if timing is None else [timing(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        self._begun = 0.0

    def begin(self) -> None:
        self._begun = time.thread_time()
        if self._events:
            self._events[0].record()

    def end(self) -> float:
        if not self._events:
            return time.thread_time() - self._begun
        self._events[1].record()
        self._events[1].synchronize()
        return float(self._events[0].elapsed_time(self._events[1])) / 1e3


Seconds = Callable[[NDArray[np.int64]], NDArray[np.float64]]


def measure_samples(device: torch.device, longest: int) -> Seconds:
    """What samples of some length take in forward and backward, as measured on rank 0; the same function on all."""
    width, clock = WIDTH[device.type], _Clock(device)
    model = Ranker(width=width, num_layers=NUM_LAYERS, num_heads=NUM_HEADS).to(device)
    grid = np.unique(np.geomspace(1, longest, 12).astype(np.int64))
    seconds = []
    for length in grid.tolist():
        items = torch.zeros(16 * length, dtype=torch.int64, device=device)
        times = []
        for _ in range(5):
            clock.begin()
            model(items, torch.full((16,), length)).sum().backward()
            times.append(clock.end())
        seconds.append(min(times) / 16)
    box = [np.maximum.accumulate(seconds)]  # longer ones do not take less time
    dist.broadcast_object_list(box, 0)
    return lambda lengths: np.interp(lengths, grid, box[0])


def train(
    way: str, balance: bool, lengths: NDArray[np.int64], seconds_of: Seconds, device: torch.device, steps: int
) -> dict[str, float]:
    """Trains on all ranks; what the steps took."""
    world_size, data = dist.get_world_size(), _Histories(lengths)
    count, width = world_size * SAMPLES, WIDTH[device.type]
    torch.manual_seed(0)
    model = Ranker(width=width, num_layers=NUM_LAYERS, num_heads=NUM_HEADS).to(device)
    costs = seconds_of(lengths)
    sampler = _sampler(count, None if way == "count" else costs, len(lengths), world_size=None)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    clock, rows, moved, size = _Clock(device), [], 0.0, 0.0
    with Balancer.embedded() if balance else Balancer.off() as balancer:
        loader = BalancedLoader(
            DataLoader(data, batch_sampler=sampler, collate_fn=_collate),
            balancer,
            cost=lambda batch: seconds_of(batch["num_items"].cpu().numpy()),
            device=device,
            spec=BatchSpec(rows_per_sample={"items": "num_items"}),
            name=f"{way}-{balance}",
        )
        for step, batch in enumerate(loader):
            seconds = []
            for _ in range(_REPEATS[device.type]):
                optimizer.zero_grad()
                clock.begin()
                logits = model(batch["items"], batch["num_items"])
                loss = functional.binary_cross_entropy_with_logits(logits, batch["label"], reduction="sum")
                (loss * loader.loss_scale).backward()  # type: ignore[no-untyped-call]
                seconds.append(clock.end())
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, dist.ReduceOp.SUM)
            optimizer.step()
            moved, size = moved + loader.report.moved_size, size + loader.report.size
            if step >= 3:  # warm
                rows.append([min(seconds), float(batch["items"].numel())])
            if len(rows) == steps:
                break
    table = torch.tensor(rows, dtype=torch.float64, device=device)
    everyone = [torch.empty_like(table) for _ in range(world_size)]
    dist.all_gather(everyone, table)
    every = torch.stack(everyone).cpu().numpy()  # rank, step, (seconds, tokens)
    times = every[:, :, 0].max(0)
    return {
        "steps": steps,
        "tokens_per_second": float(every[:, :, 1].sum() / times.sum()),
        "step_seconds_mean": float(times.mean()),
        "step_seconds_cv": float(times.std() / times.mean()),
        "longest_step_over_mean": float(times.max() / times.mean()),
        "max_over_mean_of_ranks": float((times / every[:, :, 0].mean(0)).mean()),
        "moved_share": moved / size if size else 0.0,
    }


def run_training(options: argparse.Namespace) -> None:
    """On each rank; the first one writes the rows."""
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo,cuda:nccl" if options.device == "cuda" else "gloo")
    steps, longest = (10, 256) if options.quick else (30, 512) if options.device == "cpu" else (200, 4096)
    rows, seconds_of = [], measure_samples(device, longest)
    for kind in ("lognormal", "zipf") if options.quick else tuple(DISTRIBUTIONS):
        distribution = DISTRIBUTIONS[kind]
        drawn = distribution.draw(np.random.default_rng(1), 4 * dist.get_world_size() * SAMPLES * (steps + 20))
        lengths = np.maximum(drawn * longest // 4096, 1)
        for way, balance in (("count", False), ("count", True), ("cost budget", True)):
            row = train(way, balance, lengths, seconds_of, device, steps)
            rows.append({"lengths": kind, "longest": longest, "batches": way, "balanced": balance, **row})
    if dist.get_rank() == 0:
        options.json.write_text(json.dumps(rows))
    dist.destroy_process_group()


def measure_training(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Starts the ranks."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}",
                   "-m", "benchmarks.budgets", "--rank", "--device", options.device, "--json", str(path)]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command + ["--quick"] * options.quick, check=True, env=environment, timeout=1800)
        rows: list[dict[str, Any]] = json.loads(path.read_text())
        return rows


def _median(function: Callable[[], object], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        begun = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - begun)
    return float(np.median(seconds))


def measure_costs(options: argparse.Namespace) -> list[dict[str, Any]]:
    """What samplers take, in seconds: of 8 ranks, 8,192 samples in a step (1,024 a rank) or as much in tokens."""
    size, samples, rows = 8192, 10**7 if options.quick else 10**9, []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lengths.bin"
        block = LogNormalLengths(mean=600).draw(np.random.default_rng(0), 1 << 22).astype(np.uint16)
        with path.open("wb") as file:
            for begin in range(0, samples, block.size):
                block[: samples - begin].tofile(file)
        ways: dict[str, Callable[[], OrderedBatchSampler]] = {
            "count": lambda: GlobalBatchSampler(samples, global_batch_size=size, rank=3, world_size=RANKS),
            "budget": lambda: TokenBudgetSampler(
                samples, budget=600 * size, costs=np.memmap(path, np.uint16, "r"), rank=3, world_size=RANKS
            ),
        }
        for way, make in ways.items():
            next(iter(make()))  # kernels are compiled
            begun = time.perf_counter()
            sampler = make()
            sampler.load_state_dict({**sampler.state_dict(), "position": samples // 2 + 1})
            batches: Iterator[list[int]] = iter(sampler)
            next(batches)
            row: dict[str, Any] = {
                "samples": samples,
                "batches": way,
                "load_to_first_batch": time.perf_counter() - begun,
            }
            row["batch"] = _median(lambda: next(batches), 50)  # noqa: B023
            row["state_after"] = _median(lambda: sampler.state_after(9), 2000)  # noqa: B023
            rows.append(row)
    return rows


PARTS = {"loads": measure_loads, "costs": measure_costs, "training": measure_training}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer steps, 10⁷ samples")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the model is trained")
    parser.add_argument("--ranks", type=int, default=2, help="that train")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        run_training(options)
        return
    result: dict[str, Any] = {}
    if options.json and options.json.exists():
        result = json.loads(options.json.read_text())
    for part in options.parts:
        result[part] = {
            "command": f"python -m benchmarks.budgets --parts {part} --device {options.device} --ranks {options.ranks}",
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, "
            f"numpy {np.__version__}",
            "gpu": torch.cuda.get_device_name() if options.device == "cuda" else None,
            "rows": PARTS[part](options),
            "load_average": os.getloadavg()[0],
        }
        _show(part, result[part]["rows"])
        if options.json:
            options.json.write_text(json.dumps(result, indent=1) + "\n")


def _show(title: str, rows: list[dict[str, Any]]) -> None:
    print(f"\n{title}")
    for row in rows:
        print("  " + ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))


if __name__ == "__main__":
    main()
