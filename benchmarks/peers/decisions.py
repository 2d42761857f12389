"""The Karmarkar-Karp of recsys-examples beside our search: the decisions of one core for any number of ranks.

Costs are the FLOPs of the example's model. `moved` is the share of a batch's values that another rank trains; an
all-gather moves all of them to every rank, whatever the plan says. In an incomplete batch each rank has half to all of
its samples, which theirs fills up with samples of no cost, as it needs equal numbers.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.peers.checkouts import load_recsys_examples
from benchmarks.peers.on_cpu import stand_ins
from evenkeel.partitioning import partition, warm_up
from examples.datasets import lengths_named
from examples.hstu.model import ModelOptions

RANKS = (2, 8, 16, 32, 64, 256)
SAMPLES = (32, 128)
LENGTHS = ("uniform", "lognormal", "zipf")


def compare(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """A row for each number of ranks and samples, each distribution, complete and not; means over seeds."""
    peer = load_recsys_examples(options.recsys_examples)
    warm_up()
    ranks, seeds = (RANKS[:3], 3) if options.quick else (RANKS, 6)
    cells = list(itertools.product(ranks, SAMPLES, LENGTHS, (False, True)))
    rows = []
    for world_size, samples, lengths, incomplete in track(cells, console=console, transient=True):
        if world_size * samples > 16_384:
            continue
        with nullcontext() if torch.cuda.is_available() else stand_ins():
            drawn = [_decide(peer, world_size, samples, lengths, incomplete, seed, options) for seed in range(seeds)]
        means = {key: float(np.mean([one[key] for one in drawn])) for key in drawn[0] if not key.endswith("_ms")}
        times = {key: float(np.median([one[key] for one in drawn])) for key in drawn[0] if key.endswith("_ms")}
        rows.append(
            {"ranks": world_size, "samples": samples, "lengths": lengths, "incomplete": incomplete} | means | times
        )
    found = {"peer": peer.checkout.describe(), "seeds": seeds, "rows": rows}
    _show(found, console)
    return found


def _decide(
    peer: Any, world_size: int, samples: int, lengths: str, incomplete: bool, seed: int, options: argparse.Namespace
) -> dict[str, float]:
    draw = np.random.default_rng([seed, world_size, samples])
    tokens = lengths_named(lengths, maximum=options.max_length, mean=None).draw(draw, world_size * samples)
    flops = ModelOptions().cost().flops(tokens.astype(np.float64), 1.0, 2.0)
    cost = np.asarray(flops / 1e3).astype(np.int64)
    homes = np.repeat(np.arange(world_size, dtype=np.int32), samples)
    there = np.ones(len(cost), dtype=bool)
    if incomplete:
        keep = draw.integers(samples // 2, samples + 1, world_size)
        there = np.tile(np.arange(samples), world_size) < np.repeat(keep, samples)
    padded = np.where(there, cost, 0)
    theirs, theirs_ms = _timed(lambda: peer.partitioner.karmarkar_karp(padded.tolist(), world_size, equal_size=True))
    destinations = np.empty(len(cost), dtype=np.int64)
    for rank, chosen in enumerate(theirs):
        destinations[chosen] = rank
    ours, ours_ms = _timed(lambda: partition(cost[there], homes[there], world_size, sizes=tokens[there]))
    return {
        "before": _uneven(padded, homes, world_size),
        "theirs": _uneven(padded, destinations, world_size),
        "ours": _uneven(cost[there], ours.destinations, world_size),
        "bound": ours.lower_bound * world_size / float(padded.sum()),
        "theirs_moved": _moved(tokens[there], homes[there], destinations[there]),
        "ours_moved": _moved(tokens[there], homes[there], ours.destinations),
        "theirs_ms": theirs_ms,
        "ours_ms": ours_ms,
    }


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """The result, and the least of three times."""
    times = []
    for _ in range(3):
        began = time.perf_counter()
        result = call()
        times.append(1000 * (time.perf_counter() - began))
    return result, min(times)


def _uneven(cost: NDArray[np.int64], ranks: NDArray[Any], world_size: int) -> float:
    loads = np.bincount(ranks, cost, world_size)
    return float(loads.max() / loads.mean())


def _moved(tokens: NDArray[np.int64], homes: NDArray[Any], destinations: NDArray[Any]) -> float:
    return float(tokens[homes != destinations].sum() / tokens.sum())


def _show(found: dict[str, Any], console: Console) -> None:
    peer = found["peer"]
    table = Table(title=f"Decisions on one core; theirs: {peer['name']} at {peer['commit']}, {peer['compiled']}")
    names = (
        "ranks x samples",
        "lengths",
        "before",
        "bound",
        "theirs",
        "ours",
        "theirs moved",
        "ours",
        "theirs ms",
        "ours",
    )
    for name in names:
        table.add_column(name, justify="left" if name in names[:2] else "right")
    for row in found["rows"]:
        table.add_row(
            f"{row['ranks']} x {row['samples']}", row["lengths"] + (", incomplete" if row["incomplete"] else ""),
            *(f"{row[key]:.4f}" for key in ("before", "bound", "theirs", "ours")),
            f"{row['theirs_moved']:.0%}", f"{row['ours_moved']:.1%}",
            f"{row['theirs_ms']:.2f}", f"{row['ours_ms']:.2f}",
        )  # fmt: skip
    console.print(table)
