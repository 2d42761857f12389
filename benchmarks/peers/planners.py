"""Planners of embedding tables on the same tables, budgets and prices: TorchEasyRec's, TorchRec's own, and ours.

Two kinds of problem. On TorchRec's search space each planner's proposals go through TorchRec's planner, which shards,
places and rates them by its own model: the slowest rank, over a bound that no plan is below. And on tables with 20
options each (caching or split between the memories, ten sizes), at prices that are ours, TorchEasyRec's dynamic
program proposes plans, and the best one that fits counts; so does the smallest budget for which there is a plan.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torchrec
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.proposers import DynamicProgrammingProposer, UniformProposer

from benchmarks.peers.checkouts import TorchEasyRec, load_torcheasyrec
from benchmarks.placement import knapsack
from benchmarks.placement_torchrec import model, run
from evenkeel.placement.knapsack import Knapsack, solve_knapsack
from trainer_client.planning import ExactProposer

SHARDED = ((10, 8), (100, 8))
LIMIT_S = 60
PRICED = ((20, 1), (100, 1), (20, 8))
OPTIONS = 20
SEEDS = 3
TIGHT = (0.002, 0.005, 0.01, 0.02, 0.05)  # above the smallest budget of HBM that works; host memory 20 % above


def compare(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """All problems; tables of each kind."""
    peer = load_torcheasyrec(options.torcheasyrec)
    logging.disable(logging.WARNING)
    found = {
        "peer": peer.checkout.describe(),
        "torchrec": torchrec.__version__,
        "sharded": [_shard(peer, *size) for size in (SHARDED[:1] if options.quick else SHARDED)],
        "priced": [_price(peer, *size) for size in (PRICED[:2] if options.quick else PRICED)],
        "tight": _tight(peer, 4 if options.quick else 12),
    }
    _show(found, console)
    return found


def _shard(peer: TorchEasyRec, tables: int, ranks: int) -> dict[str, Any]:
    """One model on TorchRec's search space."""
    built, total = model(tables)
    hbm = int(0.6 * total / ranks) + (1 << 30)
    exact = ExactProposer()
    proposers: dict[str, list[Any] | None] = {
        "evenkeel": [exact],
        "torcheasyrec": [peer.planner.DynamicProgrammingProposer(), UniformProposer()],  # as its create_planner
        "torchrec": None,
        "torchrec_dynamic": [DynamicProgrammingProposer()],
    }
    row: dict[str, Any] = {"tables": tables, "ranks": ranks, "hbm_bytes": hbm}
    for name, chosen in proposers.items():
        topology = Topology(
            world_size=ranks, local_world_size=min(8, ranks), compute_device="cuda", hbm_cap=hbm, ddr_cap=1 << 40
        )
        row[name] = run(built, topology, chosen, LIMIT_S)
    return row | {"lower_bound": exact.lower_bound}


def _price(peer: TorchEasyRec, tables: int, ranks: int) -> dict[str, Any]:
    """Tables of priced options, evenly sharded: seconds of both, and how much longer their plan's step is."""
    ours_s, theirs_s, over = [], [], []
    for seed in range(SEEDS):
        problem = knapsack(tables, OPTIONS, seed)
        began = time.perf_counter()
        best = solve_knapsack(problem, gap=1e-4)
        ours_s.append(time.perf_counter() - began)
        began = time.perf_counter()
        cost = _their_cost(peer, problem, ranks)
        theirs_s.append(time.perf_counter() - began)
        over.append(None if cost is None else cost / best.cost)
    return {"tables": tables, "ranks": ranks, "ours_s": ours_s, "theirs_s": theirs_s, "theirs_over_ours": over}


def _tight(peer: TorchEasyRec, instances: int) -> dict[str, Any]:
    """Budgets for which there is a plan, by construction: how many of them each planner finds."""
    rows = []
    for above in TIGHT:
        missed = ours_missed = 0
        for seed in range(instances):
            problem = knapsack(50, OPTIONS, seed)
            least = problem.use[0].min(axis=1)
            host = np.where(problem.use[0] == least[:, None], problem.use[1], np.inf).min(axis=1)
            budget = np.array([np.ceil(least.sum() * (1 + above)), np.ceil(1.2 * host.sum())])
            tight = Knapsack(problem.cost, problem.use, budget)
            missed += _their_cost(peer, tight, 1) is None
            ours_missed += solve_knapsack(tight).choice is None
        rows.append({"above": above, "tried": instances, "theirs_missed": missed, "ours_missed": ours_missed})
    return {"tables": 50, "ranks": 1, "rows": rows}


def _their_cost(peer: TorchEasyRec, problem: Knapsack, ranks: int) -> float | None:
    """The least cost among what their dynamic program proposes and what fits; None if nothing does.

    Tables are sharded by rows over all ranks, so a plan fits the ranks if and only if it fits their sum.
    """
    proposer = peer.planner.DynamicProgrammingProposer()
    proposer.load(_search_space(problem, ranks))
    storage = SimpleNamespace(hbm=problem.budget[0] / ranks, ddr=problem.budget[1] / ranks)
    topology = SimpleNamespace(devices=[SimpleNamespace(storage=storage)] * ranks, local_world_size=ranks)
    least: float | None = None
    while (plan := proposer.propose()) is not None:
        choice = np.array([option.index for option in plan])
        tables = np.array([int(option.fqn) for option in plan])
        fits = bool(np.all(problem.use[:, tables, choice].sum(axis=1) <= problem.budget))
        cost = float(problem.cost[tables, choice].sum())
        if fits and (least is None or cost < least):
            least = cost
        proposer.feedback(partitionable=fits, plan=plan, perf_rating=cost, storage_constraint=topology)
    return least


def _search_space(problem: Knapsack, ranks: int) -> list[Any]:
    """The options with what their proposer reads of a TorchRec `ShardingOption`."""

    def option(table: int, index: int, use: NDArray[np.float64]) -> Any:
        shard = SimpleNamespace(storage=SimpleNamespace(hbm=float(use[0]) / ranks, ddr=float(use[1]) / ranks))
        return SimpleNamespace(
            fqn=str(table), index=index, shards=[shard] * ranks, total_perf=float(problem.cost[table, index]),
            total_storage=SimpleNamespace(hbm=float(use[0]), ddr=float(use[1])),
        )  # fmt: skip

    tables, count = problem.cost.shape
    return [option(table, index, problem.use[:, table, index]) for table in range(tables) for index in range(count)]


def _show(found: dict[str, Any], console: Console) -> None:
    peer = found["peer"]
    who = f"{peer['name']} at {peer['commit']}, TorchRec {found['torchrec']}"
    table = Table(title=f"On TorchRec's search space, rated by it: seconds (rating over a bound); {who}")
    names = ("evenkeel", "torcheasyrec", "torchrec", "torchrec_dynamic")
    for name in ("tables x ranks", *names):
        table.add_column(name, justify="right")
    for row in found["sharded"]:
        cells = [
            f"{row[name]['seconds']:.1f} "
            + ("(no plan)" if row[name]["rating"] is None else f"({row[name]['rating'] / row['lower_bound']:.3f})")
            for name in names
        ]
        table.add_row(f"{row['tables']} x {row['ranks']}", *cells)
    console.print(table)
    table = Table(title=f"{OPTIONS} priced options a table; {who}")
    for name in ("tables x ranks", "ours, s", "theirs, s", "their step over ours, each instance"):
        table.add_column(name, justify="right")
    for row in found["priced"]:
        over: Sequence[float | None] = row["theirs_over_ours"]
        shown = " ".join("no plan" if one is None else f"{one:.3f}" for one in over)
        table.add_row(
            f"{row['tables']} x {row['ranks']}", f"{np.median(row['ours_s']):.3f}", f"{np.median(row['theirs_s']):.2f}",
            shown,
        )  # fmt: skip
    console.print(table)
    tight = found["tight"]
    table = Table(
        title=f"{tight['tables']} tables of priced options, one rank: plans that exist and are not found; {who}"
    )
    for name in ("HBM above the least that works", "tried", "missed by theirs", "missed by ours"):
        table.add_column(name, justify="right")
    for row in tight["rows"]:
        counts = (row["tried"], row["theirs_missed"], row["ours_missed"])
        table.add_row(f"{row['above']:.1%}", *map(str, counts))
    console.print(table)
