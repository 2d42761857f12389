from __future__ import annotations

import itertools

import numpy as np
import scipy.sparse as sp

from evenkeel.placement import PlanRequest, Runtime, Step, Table, Topology, Zipf
from evenkeel.placement.knapsack import Knapsack
from evenkeel.placement.layers import SLACK
from evenkeel.placement.milp import MilpResult, solve_milp
from evenkeel.placement.placement_problem import PlacementProblem


def random_tables(count: int, seed: int, **same: object) -> tuple[Table, ...]:
    draw = np.random.default_rng(seed)
    return tuple(
        Table(
            name=f"table_{index}",
            rows=int(draw.lognormal(14, 1.5)) + 100,
            dim=int(draw.choice([32, 64, 128])),
            ids_per_sample=float(draw.choice([1, 1, 5, 20])),
            access=Zipf(exponent=float(draw.uniform(0.7, 1.2))),
            **same,  # type: ignore[arg-type]
        )
        for index in range(count)
    )


def request(
    tables: tuple[Table, ...], *, hbm_gib: float, host_gib: float | None = None, **fields: object
) -> PlanRequest:
    topology = Topology(
        ranks=int(str(fields.pop("ranks", 8))),
        hbm_bytes=int(hbm_gib * 2**30),
        host_bytes=None if host_gib is None else int(host_gib * 2**30),
    )
    runtime = Runtime(str(fields.pop("runtime", "dynamicemb")))
    step = Step(samples_per_rank=2048)
    return PlanRequest(tables=tables, topology=topology, runtime=runtime, step=step, **fields)  # type: ignore[arg-type]


def random_knapsack(items: int, options: int, seed: int, tightness: float) -> Knapsack:
    draw = np.random.default_rng(seed)
    size = np.ceil(draw.lognormal(5, 1.5, items))[:, None]
    held = np.linspace(0, 1, options)[None, :]
    hbm = np.ceil(size * held)
    host = np.where(held < 1, np.ceil(size * (1 - held * draw.integers(0, 2, (items, 1)))), 0.0)
    cost = size**0.6 * (1 - held) ** draw.uniform(0.5, 3, (items, 1)) * draw.uniform(0.9, 1.1, (items, options))
    low = np.array([hbm.min(axis=1).sum(), host.min(axis=1).sum()])
    high = np.array([hbm.max(axis=1).sum(), host.max(axis=1).sum()])
    return Knapsack(
        cost, np.stack([hbm, host]), np.floor(low + (high - low) * np.array([tightness, 1 - tightness / 2]))
    )


def brute_force_knapsack(problem: Knapsack) -> float:
    items = np.arange(len(problem.cost))
    best = np.inf
    for choice in itertools.product(range(problem.cost.shape[1]), repeat=len(items)):
        picked = np.array(choice)
        if np.all(problem.use[:, items, picked].sum(axis=1) <= problem.budget):
            best = min(best, float(problem.cost[items, picked].sum()))
    return best


def solve_by_highs(problem: Knapsack, gap: float = 0.0, enough: float | None = None) -> MilpResult:
    """The program as it is, without any of the planner's own search."""
    items, options = problem.cost.shape
    rows = [sp.kron(sp.eye(items), np.ones((1, options)))]
    rows += [sp.csr_matrix(problem.use[b].reshape(1, -1)) for b in range(2)]
    ones = np.ones(items)
    return solve_milp(
        problem.cost.ravel(),
        sp.vstack(rows).tocsr(),
        np.concatenate([ones, [-np.inf, -np.inf]]),
        np.concatenate([ones, problem.budget]),
        np.ones(items * options, dtype=bool),
        np.ones(items * options),
        gap=gap,
        enough=enough,
    )


def brute_force_groups(problem: PlacementProblem) -> float:
    """Every assignment of modules, with at most one open module a side of each bound group."""
    per_group = []
    for group in problem.groups:
        outcomes = []
        for choice in itertools.product(range(len(group.modules)), repeat=len(group.tables)):
            opened = sorted(set(choice))
            sides = [group.modules[m].side for m in opened if group.modules[m].side >= 0]
            if group.bound and len(sides) != len(set(sides)):
                continue
            rows = np.arange(len(choice))
            picked = np.array(choice)
            charged = opened if group.bound else choice
            fixed = sum(group.modules[m].fixed for m in charged)
            cost = float(group.time[rows, picked].sum()) + fixed
            if np.isfinite(cost):
                outcomes.append((cost, float(group.hbm[rows, picked].sum()), float(group.host[rows, picked].sum())))
        per_group.append(outcomes)
    best = np.inf
    for joint in itertools.product(*per_group):
        cost, hbm, host = (sum(part[axis] for part in joint) for axis in range(3))
        if hbm <= problem.budget[0] + SLACK and host <= problem.budget[1] + SLACK:
            best = min(best, cost)
    return best
