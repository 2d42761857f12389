"""What `BalancedLoader.state_dict` costs a step, when the step before it has left nothing of it in the caches.

    python -m benchmarks.states --json benchmarks/results/states.json    # about two minutes
    python -m benchmarks.states --quick

Two Gloo ranks train through windows of 1 and 8 batches, with each way in which a place in the data is found again. A
step works through 40 MiB for about four milliseconds; then a state is asked for. "Written out" is the floor beside it:
a function that does nothing but write a dict of as many fields, asked in every second step, in turns. "First" is the
first state of a window; "at once" is the same call again right after, with everything still in the caches.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import platform
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.harness.ranks import run_ranks
from trainer_client import BalancedLoader, BalanceOptions, Balancer, BatchSpec
from trainer_client.balancing.sampling import GlobalBatchSampler, TokenBudgetSampler

WAYS = ("sampler", "budget", "loader", "skip")
WINDOWS = (1, 8)
SAMPLES = 128  # of a rank and step
TOUCHED = 40 << 20  # bytes that a step works through
SPEC = BatchSpec(rows_per_sample={"values": "count"})
LIMIT = 50.0  # microseconds
SECONDS = 25.0  # of a loop at most: on a machine that is busy with other things there are fewer steps


def lengths(samples: int) -> torch.Tensor:
    """Values of each sample: mostly few, sometimes many."""
    rng = np.random.default_rng(0)
    return torch.from_numpy(np.minimum(rng.lognormal(2.0, 1.0, samples).astype(np.int64), 400))


def collate(samples: list[tuple[int, int]]) -> dict[str, torch.Tensor]:
    """A jagged batch."""
    ids = torch.tensor([sample for sample, _ in samples])
    counts = torch.tensor([count for _, count in samples])
    return {"id": ids, "count": counts, "values": ids.repeat_interleave(counts)}


class Stateful:
    """A rank's own stream with a state, as torchdata's `StatefulDataLoader`."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader, self._read = loader, 0

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            self._read += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """How far it is."""
        return {"read": self._read, "workers": [{"fetched": self._read, "ended": False}], "generator": None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Not needed here; by it a loader is known."""


def make_loader(way: str, steps: int, rank: int, world_size: int) -> Any:
    """The loader that is wrapped."""
    counts = lengths(steps * SAMPLES * world_size)
    data: Any = list(enumerate(counts.tolist()))
    if way in ("sampler", "budget"):
        own: Any = (
            GlobalBatchSampler(data, global_batch_size=SAMPLES * world_size)
            if way == "sampler"
            else TokenBudgetSampler(data, budget=int(counts.sum()) // steps, costs=counts)
        )
        return DataLoader(data, batch_sampler=own, collate_fn=collate)
    each: DistributedSampler[Any] = DistributedSampler(data, num_replicas=world_size, rank=rank)
    loader: DataLoader[Any] = DataLoader(data, batch_size=SAMPLES, sampler=each, collate_fn=collate)
    return loader if way == "skip" else Stateful(loader)


def written_out(values: list[Any]) -> dict[str, Any]:
    """The floor: what writing down a state of as many fields takes."""
    one, two, three, four = values
    return {
        "version": one, "name": two, "rank": three, "world_size": four, "epoch": one, "batches": two, "finished": three,
        "fields": [one, two, three],
        "source": {
            "way": one, "ended": two, "last": three,
            "at": {
                "version": one, "samples": two, "seed": three, "shuffle": four, "epoch": one, "position": two,
                "rest": three, "division": four,
            },
        },
        "window": {"size": one, "left": [two], "last": three, "batch_sizes": [one], "plan": two, "lengths": three},
    }  # fmt: skip


def measure(rank: int, way: str, window: int, steps: int) -> dict[str, Any]:
    """On one rank: microseconds of each state, with the step's place in its window, and what a state takes."""
    touched = torch.ones(TOUCHED // 4)
    options = BalanceOptions(window=window)
    found: dict[str, Any] = {"cold": [], "first": [], "at_once": [], "written_out": [], "step": []}
    bytes_pickled, values = 0, [1, "train", False, 2]
    with Balancer.embedded(options=options) as balancer:
        loader = BalancedLoader(
            make_loader(way, steps + 2 * window, rank, 2), balancer, cost=lambda batch: batch["count"], spec=SPEC
        )
        until = time.perf_counter() + SECONDS
        for step, _ in enumerate(loader):
            began = time.perf_counter()
            if began > until:
                break  # which ends the loops of both ranks
            touched.add_(1.0)
            asked = time.perf_counter()
            found["step"].append(asked - began)
            if (step + (step // window if window > 1 else 0)) % 2:
                written_out(values)
                found["written_out"].append(time.perf_counter() - asked)
                continue
            state = loader.state_dict()
            took = time.perf_counter() - asked
            if step < 2 * window:  # also compiles kernels
                continue
            found["cold"].append(took)
            if step % window == 0:
                found["first"].append(took)
            asked = time.perf_counter()
            loader.state_dict()
            found["at_once"].append(time.perf_counter() - asked)
            bytes_pickled = max(bytes_pickled, len(pickle.dumps(state)))
    return {**{name: [1e6 * one for one in times] for name, times in found.items()}, "bytes": bytes_pickled}


def summary(way: str, window: int, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Of both ranks together."""
    both = {name: np.array([one for rank in ranks for one in rank[name]]) for name in ranks[0] if name != "bytes"}
    return {
        "found_by": way,
        "window": window,
        "states": len(both["cold"]),
        "median": round(float(np.median(both["cold"])), 1),
        "p90": round(float(np.quantile(both["cold"], 0.9)), 1),
        "first_median": round(float(np.median(both["first"])), 1),
        "at_once_median": round(float(np.median(both["at_once"])), 1),
        "written_out_median": round(float(np.median(both["written_out"])), 1),
        "step_median": round(float(np.median(both["step"])), 1),
        "bytes": max(rank["bytes"] for rank in ranks),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=800, help="of each loop")
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS, help="how a place in the data is found again")
    parser.add_argument("--json", type=Path, help="result file")
    options = parser.parse_args()
    steps = 80 if options.quick else options.steps
    rows = [
        summary(way, window, run_ranks(2, measure, way, window, steps)) for way in options.ways for window in WINDOWS
    ]
    table = Table("found by", "window", "median", "90 %", "first", "at once", "written out", "bytes", title="µs")
    for row in rows:
        names = ("median", "p90", "first_median", "at_once_median", "written_out_median")
        shown = (row["found_by"], row["window"], *(row[name] for name in names), row["bytes"])
        table.add_row(*map(str, shown))
    Console().print(table)
    if options.json is not None:
        machine = {"machine": platform.processor() or platform.machine(), "cpus": os.cpu_count()}
        versions = {"python": platform.python_version(), **{name: version(name) for name in ("torch", "numpy")}}
        command = " ".join(["python -m benchmarks.states", *sys.argv[1:]])
        result = {"command": command, **machine, "versions": versions, "load": os.getloadavg()[0], "microseconds": rows}
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return int(max(row["median"] for row in rows) > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
