"""Why nothing fits: the binding budget, the shortfall, and the smallest budgets that work."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from evenkeel.placement.options import budgets
from evenkeel.placement.placement_problem import UNIT, PlacementProblem, Solution
from evenkeel.placement.plan import Shortage
from evenkeel.placement.request import PlanRequest
from evenkeel.placement.solver import Limits, solve

_PAGE = 4096
_SEARCH_SECONDS = 10.0


def explain_shortage(request: PlanRequest, problem: PlacementProblem, limits: Limits) -> Shortage:
    """What keeps every plan from fitting, and the least that would change it."""
    exact = replace(limits, gap=1e-6, time_limit_s=min(limits.time_limit_s / 4, _SEARCH_SECONDS))
    given = [solve(problem.minimising(resource), exact) for resource in (0, 1)]
    lifted = problem.with_budget(np.inf, np.inf)
    alone = [solve(lifted.minimising(resource), exact) for resource in (0, 1)]
    needs_more = [alone[b].cost > problem.budget[b] for b in range(2)]
    binding = ("hbm" if needs_more[0] else "host") if needs_more[0] != needs_more[1] else "both"
    need = [_units(solution) for solution in given]
    short = [None if n is None else max(0, math.ceil((n - problem.budget[b]) * UNIT)) for b, n in enumerate(need)]
    resource = 1 if binding == "host" else 0
    source = given[resource] if given[resource].modules is not None else alone[resource]
    smallest_hbm = None if need[0] is None else smallest_hbm_bytes(request, need[0])
    smallest_host = None if need[1] is None else smallest_host_bytes(request, need[1])
    tables = _largest(request, problem, source, resource)
    return Shortage(
        binding=binding,
        hbm_shortfall_bytes=short[0],
        host_shortfall_bytes=short[1],
        smallest_hbm_bytes=smallest_hbm,
        smallest_host_bytes=smallest_host,
        tables=tables,
        explanation=_explain(binding, smallest_hbm, smallest_host, tables, _units(alone[0])),
    )


def smallest_hbm_bytes(request: PlanRequest, units: float) -> int:
    """The least HBM of a rank whose budget, reservations and workspace taken off, holds `units`."""
    topology = request.topology
    workspace = request.profile.costs(request.runtime).workspace_bytes if request.tables else 0
    need = math.ceil(units * UNIT / _PAGE) * _PAGE + workspace + topology.hbm_reserved_bytes
    total = _grow(need, topology.hbm_reserved_fraction)
    while total < 2**53 and budgets(replace(request, topology=replace(topology, hbm_bytes=total)))[0] < units - 1e-9:
        total += _PAGE
    return total


def smallest_host_bytes(request: PlanRequest, units: float) -> int:
    """The least memory of a host whose budget, reservation taken off, holds `units`."""
    topology = request.topology
    need = math.ceil(units * UNIT / _PAGE) * _PAGE + topology.host_reserved_bytes
    total = _grow(need, topology.host_reserved_fraction)
    while total < 2**53 and budgets(replace(request, topology=replace(topology, host_bytes=total)))[1] < units - 1e-9:
        total += _PAGE
    return total


def _grow(need: int, fraction: float) -> int:
    return 2**53 if fraction >= 1 else min(2**53, math.ceil(need / (1 - fraction)))


def _units(solution: Solution) -> float | None:
    return None if solution.modules is None else solution.cost


def _largest(
    request: PlanRequest, problem: PlacementProblem, solution: Solution, resource: int, count: int = 5
) -> tuple[str, ...]:
    if solution.modules is None:
        return ()
    sizes: list[tuple[float, str]] = []
    for group, chosen in zip(problem.groups, solution.modules, strict=True):
        use = group.host if resource else group.hbm
        for row, table in enumerate(group.tables):
            sizes.append((-float(use[row, chosen[row]]), request.tables[table].name))
    return tuple(name for _, name in sorted(sizes)[:count])


def _explain(
    binding: str,
    smallest_hbm: int | None,
    smallest_host: int | None,
    tables: tuple[str, ...],
    least_hbm_units: float | None,
) -> str:
    what = {
        "hbm": "HBM is too small whatever the host memory",
        "host": "host memory is too small whatever the HBM",
        "both": "HBM and host memory are too small together",
    }[binding]
    remedies = []
    if smallest_hbm is not None:
        remedies.append(f"{smallest_hbm / 2**30:.2f} GiB of HBM on every rank")
    if smallest_host is not None:
        remedies.append(f"{smallest_host / 2**30:.2f} GiB of memory on every host")
    if remedies:
        cure = "what would do, all else equal: " + " or ".join(remedies)
    elif least_hbm_units is None:
        cure = (
            "the pinned modes and ratios of tables that fuse contradict each other: unpin one or give it another group"
        )
    else:
        cure = "neither budget alone is enough to change: raise both"
    largest = f"; the largest are {', '.join(tables)}" if tables else ""
    return f"{what}; {cure}{largest}."
