"""Planners of embedding tables on the same tables, budgets and prices: TorchEasyRec's and ours.

On tables with 20 options each (caching or split between the memories, ten sizes), at prices that are ours,
TorchEasyRec's dynamic program proposes plans, and the best one that fits counts; so does the smallest budget for which
there is a plan.
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

from benchmarks.peers.checkouts import TorchEasyRec, load_torcheasyrec
from benchmarks.placement import knapsack
from evenkeel.placement.knapsack import Knapsack, solve_knapsack

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
        "priced": [_price(peer, *size) for size in (PRICED[:2] if options.quick else PRICED)],
        "tight": _tight(peer, 4 if options.quick else 12),
    }
    _show(found, console)
    return found


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
