"""Why nothing fits: the binding budget, the shortfall, and between which sizes the smallest budgets that work lie."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import replace

import numpy as np

from evenkeel.placement.hardware import MAX_BYTES
from evenkeel.placement.layouts import Scope
from evenkeel.placement.options import PAGE
from evenkeel.placement.placing import place, solve_and_place
from evenkeel.placement.plan import Shortage
from evenkeel.placement.problem import SLACK, UNIT, Choice, Problem, budget_of
from evenkeel.placement.request import PlanRequest, Topology, Watch
from evenkeel.placement.search import solve

_LEAST = PAGE / UNIT


def explain_shortage(request: PlanRequest, problem: Problem, watch: Watch) -> Shortage:
    """What keeps every plan of a request from fitting, and the least that would change it."""
    needs = [_need(request, problem, resource, watch.part(share)) for resource, share in enumerate((0.4, 0.7))]
    # Where no size of one would do, the other is too small by itself.
    hbm_is_enough, host_is_enough = (np.isfinite(least) for least, _ in needs)
    binding = "both" if hbm_is_enough == host_is_enough else "hbm" if hbm_is_enough else "host"
    least, enough = ([_size(request, b, need[number]) for b, need in enumerate(needs)] for number in range(2))
    now = (request.topology.hbm_bytes, request.topology.host_bytes or 0)
    short = [None if value is None else max(0, value - have) for value, have in zip(enough, now, strict=True)]
    resource = 1 if binding == "host" else 0
    roomy = problem.with_budget(np.inf, np.inf)
    frugal = solve(roomy.minimising(resource), watch).choice
    placed = None if frugal is None else place(roomy, request.topology, frugal)
    both = [None if placed is None else _size(request, b, float(placed.use[b])) for b in range(2)]
    homeless = [request.tables[index].name for index in _without_rank(problem)]
    tables = dict.fromkeys([*homeless, *_largest(request, problem, frugal, resource)])
    return Shortage(
        binding=binding,
        hbm_shortfall_bytes=short[0],
        host_shortfall_bytes=short[1],
        smallest_hbm_bytes=enough[0],
        smallest_host_bytes=enough[1],
        least_hbm_bytes=least[0],
        least_host_bytes=least[1],
        tables=tuple(tables)[: max(5, len(homeless))],
        explanation=_explain(request, binding, enough, least, both, list(tables), homeless),
    )


def _without_rank(problem: Problem) -> list[int]:
    """Tables of which no shard fits on a rank and its host, though they could be on some."""
    everywhere = problem.least(np.where(problem.scope == Scope.EVERYWHERE, problem.seconds, np.inf))
    found: list[int] = np.flatnonzero(
        np.isinf(np.minimum(everywhere, problem.least(problem.limited().seconds)))
    ).tolist()
    return found


def _need(request: PlanRequest, problem: Problem, resource: int, watch: Watch) -> tuple[float, float]:
    """Units of a budget, the other being what it is: nothing below the first does, the second is known to do."""
    if not np.isfinite(problem.budget[resource]):  # there is all that there could be
        return np.inf, np.inf
    lifted = problem.minimising(resource)
    found = solve(lifted, watch.part(0.5 if problem.has_shards else 1.0))
    if not problem.has_shards:
        exact = found.proved and found.bound >= found.cost * (1 - 1e-12)
        return found.cost if exact else found.bound, found.cost
    if not np.isfinite(found.bound):
        return np.inf, np.inf
    least = max(found.bound, lifted.limited().least_shard(1 + resource))
    if resource == 0:  # with HBM in the place of time, the fullest rank is the slowest one
        placed, _ = solve_and_place(lifted, request.topology, watch)
    else:
        placed = None if found.choice is None else place(lifted, request.topology, found.choice)
    return least, np.inf if placed is None else max(least, float(placed.use[resource]))


def _size(request: PlanRequest, resource: int, units: float) -> int | None:
    size = smallest_bytes(request, resource, units)
    return size if size < MAX_BYTES else None


def with_memory(topology: Topology, resource: int, size: int) -> Topology:
    """The same machines with another HBM of a rank (0) or memory of a host (1)."""
    return replace(topology, **{("hbm_bytes", "host_bytes")[resource]: size})


def smallest_bytes(request: PlanRequest, resource: int, units: float) -> int:
    """The least HBM of a rank (0), or memory of a host (1), whose budget holds `units` beside what is reserved."""
    return bisect_left(range(MAX_BYTES), max(_LEAST, units - SLACK), key=budget_of(request, resource))


def _largest(request: PlanRequest, problem: Problem, choice: Choice | None, resource: int) -> list[str]:
    """Names of the tables that take most of a budget in a choice, the largest five."""
    use = [] if choice is None else (problem.host if resource else problem.hbm)[choice].tolist()
    return [name for _, name in sorted((-size, table.name) for size, table in zip(use, request.tables))[:5]]  # noqa: B905


def _explain(
    request: PlanRequest,
    binding: str,
    enough: list[int | None],
    least: list[int | None],
    both: list[int | None],
    tables: list[str],
    homeless: list[str],
) -> str:
    what = {
        "hbm": "HBM is too small whatever the host memory",
        "host": f"host memory is too small {'whatever the HBM' if request.topology.hbm_bytes else 'without GPUs'}",
        "both": "HBM and host memory are too small together",
    }[binding]
    if homeless:
        are = "is one table" if len(homeless) == 1 else f"are {len(homeless)} tables"
        named = ", ".join(homeless[:5])
        what = f"there {are} of which no shard fits on a rank ({named}): more column shards, or row_wise, are smaller"
    machines = request.topology
    places = (
        ("of HBM on every GPU", machines.hbm_reserved_bytes or machines.hbm_reserved_fraction),
        ("of memory on every host", machines.host_reserved_bytes or machines.host_reserved_fraction),
    )
    remedies = [
        f"{_between(most, fewest)} {place}{' (with what is reserved of it)' if reserved else ''}"
        for most, fewest, (place, reserved) in zip(enough, least, places, strict=True)
        if fewest
    ]
    if remedies:
        cure = f"what would do, all else equal: {' or '.join(remedies)}"
    elif machines.host_bytes is None:
        cure = "no HBM of a rank is enough: reserve less of it, or plan for more ranks or smaller tables"
    else:
        sizes = [f"{_gib(size)} {place}" for size, (place, _) in zip(both, places, strict=True) if size]
        cure = f"neither budget alone is enough to change: raise both, such as to {' and '.join(sizes)}"
    largest = f"; the largest are {', '.join(tables[:5])}" if tables else ""
    return f"{what}; {cure}{largest}."


def _between(enough: int | None, least: int) -> str:
    below = f"{math.floor(least / 2**30 * 100) / 100:.2f} GiB"
    if enough is None:
        return f"no less than {below} (that less is not enough is proved, that as much is, is not)"
    known = "proved the smallest" if enough == least else f"less than {below} is proved not to be enough"
    return f"{_gib(enough)} ({known})"


def _gib(size: int) -> str:
    return f"{math.ceil(size / 2**30 * 100) / 100:.2f} GiB"  # rounded up, as less would not do
