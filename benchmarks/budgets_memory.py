"""What fits into the same memory: steps of a fixed number of samples beside steps of a budget of tokens.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.budgets_memory --device cuda --json FILE
    torchrun --standalone --nproc-per-node 2 -m benchmarks.budgets_memory --quick

A rank's memory must hold its largest step. With a fixed number of samples that step is larger than the mean one, and
the number must be chosen for it; with a budget all steps are nearly as large, so that the mean one is larger in the
same memory. Both ways are balanced, and their sizes are chosen so that the fullest rank of the fullest step holds as
many tokens, looked up in the lengths of all steps beforehand. What a step costs whatever its size (optimizer,
gradients' exchange, launches) is then paid by more tokens: the gain is that, and no more. The ways take turns in rounds
of the same steps; the model computes each token alone, so that time and memory follow the number of tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from evenkeel.partitioning import partition
from examples.datasets.lengths import Lengths, LogNormalLengths, ZipfLengths
from trainer_client import BalancedLoader, Balancer, BatchSpec, GlobalBatchSampler, TokenBudgetSampler, TokenCost
from trainer_client.balancing.pipelines import balanced_batches
from trainer_client.balancing.sampling import OrderedBatchSampler

DISTRIBUTIONS: dict[str, Lengths] = {"lognormal": LogNormalLengths(mean=600), "zipf": ZipfLengths(exponent=1.2)}
SIZES = {"cpu": (2_000, 32, 2), "cuda": (2_000_000, 512, 8)}  # items, width, layers
WAYS = ("count", "budget")


class Tower(nn.Module):
    """A table of items, layers over each token, and a score of each sample's mean."""

    def __init__(self, items: int, width: int, layers: int) -> None:
        super().__init__()
        self.table = nn.Embedding(items, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(layers)
        )
        self.score = nn.Linear(width, 1)

    def forward(self, items: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """(samples,) scores; `items` has as many values a sample as `lengths` says."""
        tokens = self.table(items)
        for layer in self.layers:
            tokens = tokens + layer(tokens)
        samples = torch.repeat_interleave(
            torch.arange(len(lengths), device=items.device), lengths, output_size=len(items)
        )
        pooled = torch.zeros(len(lengths), tokens.shape[1], device=items.device).index_add(0, samples, tokens)
        scores: torch.Tensor = self.score(pooled / lengths.clamp(min=1)[:, None]).squeeze(-1)
        return scores


class Histories(Dataset[torch.Tensor]):
    """Items, as many as the lengths say."""

    def __init__(self, lengths: NDArray[np.int64], items: int) -> None:
        self._lengths, self._drawn = lengths, torch.randint(0, items, (int(lengths.max()),))

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._drawn[: int(self._lengths[index])]


def collate(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """A batch: `items` has as many rows a sample as `num_items` says."""
    return {"items": torch.cat(samples), "num_items": torch.tensor([len(sample) for sample in samples])}


def make_sampler(way: str, size: int, lengths: NDArray[np.int64], rank: int, ranks: int) -> OrderedBatchSampler:
    """Of `size` samples, or tokens, in a step of all ranks."""
    if way == "count":
        return GlobalBatchSampler(len(lengths), global_batch_size=size, rank=rank, world_size=ranks, drop_last=True)
    return TokenBudgetSampler(len(lengths), budget=size, costs=lengths, rank=rank, world_size=ranks, drop_last=True)


def fullest(way: str, size: int, lengths: NDArray[np.int64], ranks: int, steps: int) -> int:
    """Tokens of the fullest rank in the fullest of the first steps, balanced as in training."""
    samplers = [iter(make_sampler(way, size, lengths, rank, ranks)) for rank in range(ranks)]
    most = 0
    for _ in range(steps):
        parts = [np.array(next(sampler), np.int64) for sampler in samplers]
        chosen = lengths[np.concatenate(parts)]
        homes = np.repeat(np.arange(ranks), [len(part) for part in parts])
        most = max(most, int(partition(chosen, homes, ranks).loads.max()))
    return most


def largest_size(way: str, tokens: int, lengths: NDArray[np.int64], ranks: int, steps: int) -> int:
    """The largest size with which no rank ever holds more tokens; found by halving."""
    low, high = (ranks, tokens * ranks // int(lengths.mean()) * 2) if way == "count" else (1, tokens * ranks)
    while high - low > max(1, high // 500):
        middle = (low + high) // 2
        fits = fullest(way, middle, lengths, ranks, steps) <= tokens
        low, high = (middle, high) if fits else (low, middle)
    return low


class Run:
    """One way of training, with a model of its own."""

    def __init__(self, way: str, size: int, lengths: NDArray[np.int64], device: torch.device, workers: int) -> None:
        items, width, layers = SIZES[device.type]
        torch.manual_seed(0)
        self.model = Tower(items, width, layers).to(device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3, fused=device.type == "cuda")
        sampler = make_sampler(way, size, lengths, dist.get_rank(), dist.get_world_size())
        data = DataLoader(
            Histories(lengths, items), batch_sampler=sampler, collate_fn=collate, num_workers=workers,
            pin_memory=device.type == "cuda",
        )  # fmt: skip
        self.balancer = Balancer.embedded(job=way)
        self.loader = BalancedLoader(
            data, self.balancer, cost=TokenCost(tokens="num_items"), device=device, name=way,
            spec=BatchSpec(rows_per_sample={"items": "num_items"}),
        )  # fmt: skip
        self.batches = balanced_batches(self.loader)
        self.seconds: list[float] = []
        self.update_seconds: list[float] = []
        self.tokens: list[int] = []
        self.samples: list[int] = []

    def step(self, device: torch.device) -> None:
        """One step, from the batch to the updated weights."""
        _wait(device)
        begun = time.perf_counter()
        balanced = next(self.batches)
        batch = balanced.batch
        scores = self.model(batch["items"], batch["num_items"])
        loss = functional.binary_cross_entropy_with_logits(scores, torch.ones_like(scores), reduction="sum")
        (loss * balanced.loss_scale).backward()  # type: ignore[no-untyped-call]
        _wait(device)
        computed = time.perf_counter()
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
        self.optimizer.step()
        self.optimizer.zero_grad()
        _wait(device)
        self.seconds.append(time.perf_counter() - begun)
        self.update_seconds.append(time.perf_counter() - computed)
        self.tokens.append(len(batch["items"]))
        self.samples.append(balanced.report.samples)

    def close(self) -> None:
        """Ends the loop on all ranks."""
        del self.batches
        self.balancer.close()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(kind: str, tokens: int, device: torch.device, steps: int, workers: int) -> list[dict[str, Any]]:
    """One row for each way; they take turns in rounds of ten steps."""
    ranks = dist.get_world_size()
    drawn = DISTRIBUTIONS[kind].draw(np.random.default_rng(1), 8 * steps * ranks * tokens // 600 + 1000)
    sizes = {way: largest_size(way, tokens, drawn, ranks, steps) for way in WAYS}
    runs = {way: Run(way, size, drawn, device, workers) for way, size in sizes.items()}
    peaks = dict.fromkeys(WAYS, 0)
    for first in range(0, steps, 10):
        for way, run in runs.items():
            held = 0
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
                held = torch.cuda.memory_allocated(device)
            for _ in range(first, min(first + 10, steps)):
                run.step(device)
            if device.type == "cuda":
                peaks[way] = max(peaks[way], torch.cuda.max_memory_allocated(device) - held)
    rows: list[dict[str, Any]] = []
    for way, run in runs.items():
        run.close()
        table = torch.tensor([run.seconds, run.tokens, run.update_seconds], dtype=torch.float64, device=device)
        everyone = [torch.empty_like(table) for _ in range(ranks)]
        dist.all_gather(everyone, table)
        every = torch.stack(everyone).cpu().numpy()[:, :, min(10, steps // 2) :]  # rank, what, step; once warm
        times = every[:, 0].max(0)
        rows.append({
            "lengths": kind, "batches": way, "size": sizes[way], "steps": len(times),
            "tokens_of_a_rank_at_most": tokens,
            "tokens_of_a_rank_fullest": int(every[:, 1].max()), "tokens_of_a_rank_mean": float(every[:, 1].mean()),
            "samples_of_a_step_mean": float(np.mean(run.samples)), "peak_bytes_of_steps": peaks[way],
            "tokens_per_second": float(every[:, 1].sum() / times.sum()), "step_seconds_mean": float(times.mean()),
            "step_seconds_cv": float(times.std() / times.mean()),
            "longest_step_over_mean": float(times.max() / times.mean()),
            "update_seconds_mean": float(every[:, 2].max(0).mean()),
        })  # fmt: skip
    by_way = {row["batches"]: row["tokens_per_second"] for row in rows}
    rows[-1]["throughput_over_count"] = by_way["budget"] / by_way["count"]
    return rows


def main() -> None:
    """On each rank; the first one prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--quick", action="store_true", help="few steps, for a look")
    parser.add_argument("--tokens", type=int, default=0, help="that a rank's memory holds; default: by the device")
    parser.add_argument("--json", type=Path, help="where to write the result")
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if options.device == "cuda" else "gloo")
    steps = 20 if options.quick else 60
    tokens = options.tokens or (20_000 if options.device == "cpu" else 100_000)
    workers = 4 if options.device == "cuda" else 0
    rows = [row for kind in DISTRIBUTIONS for row in measure(kind, tokens, device, steps, workers)]
    if dist.get_rank() == 0:
        for row in rows:
            print(", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)
        if options.json:
            result = {
                "command": f"torchrun --standalone --nproc-per-node {dist.get_world_size()} "
                f"-m benchmarks.budgets_memory --device {options.device}",
                "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
                "gpu": torch.cuda.get_device_name() if options.device == "cuda" else None,
                "rows": rows,
                "load_average": os.getloadavg()[0],
            }  # fmt: skip
            options.json.write_text(json.dumps(result, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
