"""Why nothing fits: the binding budget, the shortfall, and between which sizes the smallest budgets that work lie."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from evenkeel.placement.building import budgets, build_problem, without_rank
from evenkeel.placement.cases import Case
from evenkeel.placement.incumbent import can_be_placed, heaviest_use
from evenkeel.placement.layers import SLACK
from evenkeel.placement.layouts import Scope
from evenkeel.placement.limits import Limits, Watch
from evenkeel.placement.options import table_layouts
from evenkeel.placement.placement_problem import UNIT, PlacementProblem, Solution
from evenkeel.placement.placing import solve_and_place
from evenkeel.placement.plan import Shortage
from evenkeel.placement.request import PlanRequest
from evenkeel.placement.solver import solve

_PAGE = 4096
_GROWTH = (1.0, 1.003, 1.01, 1.03, 1.07, 1.15, 1.3, 1.6, 2.2)
_GAP = 1e-5


@dataclass(frozen=True, slots=True)
class _Need:
    """What is needed of one budget, the other being what it is, in units.

    Attributes:
        least: Nothing below this does; infinite where nothing does.
        enough: Known to do; infinite where nothing is known to.
    """

    least: float
    enough: float


def explain_shortage(cases: Sequence[Case], limits: Limits) -> Shortage:
    """What keeps every plan of all cases of a request from fitting, and the least that would change it."""
    watch = Watch(limits)
    exact = replace(limits, gap=_GAP)
    request, problem = cases[0].request, cases[0].problem
    # With both budgets lifted the least use of one is the sum of the groups', and takes no search.
    roomy = [_lifted(case.request, case.problem, (0, 1)).with_budget(np.inf, np.inf) for case in cases]
    least_of = [
        [solve(lifted.minimising(b), exact.within(max(0.1, watch.left() / 8 / len(cases)))) for lifted in roomy]
        for b in (0, 1)
    ]
    frugal = [min(range(len(cases)), key=lambda number: own[number].bound) for own in least_of]
    alone = [own[number] for own, number in zip(least_of, frugal, strict=True)]
    needs_more = [alone[b].bound > problem.budget[b] for b in range(2)]
    binding = ("hbm" if needs_more[0] else "host") if needs_more[0] != needs_more[1] else "both"
    needs = [_least_need(cases, 0, exact, watch.part(0.5)), _least_need(cases, 1, exact, watch.part(1.0))]
    enough = [_size(request, resource, need.enough) for resource, need in enumerate(needs)]
    least = [_size(request, resource, need.least) for resource, need in enumerate(needs)]
    now = (request.topology.hbm_bytes, request.topology.host_bytes or 0)
    short = [None if value is None else max(0, value - have) for value, have in zip(enough, now, strict=True)]
    resource = 1 if binding == "host" else 0
    tables = _largest(request, roomy[frugal[resource]], alone[resource], resource)
    nowhere = [without_rank(case.request, case.problem) for case in cases]
    homeless = [index for index in nowhere[0] if all(index in others for others in nowhere)]
    if homeless:
        names = [request.tables[index].name for index in homeless]
        tables = (*names, *(name for name in tables if name not in names))
    return Shortage(
        binding=binding,
        hbm_shortfall_bytes=short[0],
        host_shortfall_bytes=short[1],
        smallest_hbm_bytes=enough[0],
        smallest_host_bytes=enough[1],
        least_hbm_bytes=least[0],
        least_host_bytes=least[1],
        tables=tables[: max(5, len(homeless))],
        explanation=_explain(request, binding, enough, least, tables, homeless=tables[: len(homeless)]),
    )


def _least_need(cases: Sequence[Case], resource: int, limits: Limits, watch: Watch) -> _Need:
    """What the case needs that needs least."""
    needs = [
        _need(case.request, case.problem, resource, limits, watch.part(1 / (len(cases) - number)))
        for number, case in enumerate(cases)
    ]
    return _Need(min(need.least for need in needs), min(need.enough for need in needs))


def _need(request: PlanRequest, problem: PlacementProblem, resource: int, limits: Limits, watch: Watch) -> _Need:
    if not np.isfinite(problem.budget[resource]):  # there is all that there could be
        return _Need(np.inf, np.inf)
    lifted = _lifted(request, problem, (resource,)).with_budget(*map(float, problem.budget))
    single = can_be_placed(lifted)
    share = 0.5 if single else 1.0
    found = solve(lifted.minimising(resource), limits.within(share * watch.left()))
    least = found.bound
    if not single:
        exact = found.proved and found.gap <= 1e-12
        return _Need(found.cost if exact else least, found.cost)
    if not np.isfinite(least):
        return _Need(np.inf, np.inf)
    least = max(least, heaviest_use(request, lifted, resource))
    if resource:
        return _Need(least, _known_to_place(request, lifted, resource, least, limits, watch))
    # With HBM in the place of time, the fullest rank is the slowest one.
    placed, found = solve_and_place(request, lifted.minimising(0), limits.within(watch.left()))
    least = max(least, found.bound) if placed is not None else least
    return _Need(least, np.inf if placed is None else max(least, float(placed.use[0])))


def _lifted(request: PlanRequest, problem: PlacementProblem, resources: tuple[int, ...]) -> PlacementProblem:
    """The problem with all that there is to choose from where these resources are not scarce.

    Shards that no rank can hold today are not in `problem`, and may be all that a table has besides larger ones.
    """
    layouts = (layout for table in request.tables for layout in table_layouts(request, table))
    if all(layout.scope is Scope.EVERYWHERE for layout in layouts):
        return problem
    topology = request.topology
    hbm = 2**53 if 0 in resources and topology.hbm_bytes else topology.hbm_bytes
    host = None if 1 in resources else topology.host_bytes
    return build_problem(replace(request, topology=replace(topology, hbm_bytes=hbm, host_bytes=host)))


def _known_to_place(
    request: PlanRequest, problem: PlacementProblem, resource: int, least: float, limits: Limits, watch: Watch
) -> float:
    """A budget under which shards were put on ranks; infinite where none was found."""
    for number, growth in enumerate(_GROWTH):
        if watch.is_over():
            break
        budget = problem.budget.copy()
        budget[resource] = math.ceil(least * growth * UNIT / _PAGE) * _PAGE / UNIT
        larger = problem.with_budget(float(budget[0]), float(budget[1]))
        if without_rank(request, larger):
            continue
        quick = limits.at_most(0.01).within(watch.left() / (len(_GROWTH) - number))
        placed, _ = solve_and_place(request, larger, quick)
        if placed is not None:
            return float(placed.use[resource])
    return np.inf


def _size(request: PlanRequest, resource: int, units: float) -> int | None:
    topology = request.topology
    reserved = topology.host_reserved_fraction if resource else topology.hbm_reserved_fraction
    if not np.isfinite(units) or reserved >= 1:  # of whatever there is, all is reserved
        return None
    size = (smallest_host_bytes if resource else smallest_hbm_bytes)(request, units)
    given = replace(topology, **{"host_bytes" if resource else "hbm_bytes": size})
    return size if budgets(replace(request, topology=given))[resource] >= units - SLACK else None


def smallest_hbm_bytes(request: PlanRequest, units: float) -> int:
    """The least HBM of a rank whose budget, reservations and workspace taken off, holds `units`."""
    topology = request.topology
    workspace = request.profile.costs(request.runtime).workspace_bytes if request.tables else 0
    need = math.ceil((units - SLACK) * UNIT / _PAGE) * _PAGE + workspace + topology.hbm_reserved_bytes
    total = _grow(need, topology.hbm_reserved_fraction)
    while total < 2**53 and budgets(replace(request, topology=replace(topology, hbm_bytes=total)))[0] < units - SLACK:
        total += _PAGE
    return total


def smallest_host_bytes(request: PlanRequest, units: float) -> int:
    """The least memory of a host whose budget, reservation taken off, holds `units`."""
    topology = request.topology
    need = math.ceil((units - SLACK) * UNIT / _PAGE) * _PAGE + topology.host_reserved_bytes
    total = _grow(need, topology.host_reserved_fraction)
    while total < 2**53 and budgets(replace(request, topology=replace(topology, host_bytes=total)))[1] < units - SLACK:
        total += _PAGE
    return total


def _grow(need: int, fraction: float) -> int:
    return 2**53 if fraction >= 1 else min(2**53, math.ceil(need / (1 - fraction)))


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
    request: PlanRequest,
    binding: str,
    enough: list[int | None],
    least: list[int | None],
    tables: tuple[str, ...],
    *,
    homeless: tuple[str, ...],
) -> str:
    what = {
        "hbm": "HBM is too small whatever the host memory",
        "host": "host memory is too small whatever the HBM",
        "both": "HBM and host memory are too small together",
    }[binding]
    if homeless:
        are = "is one table" if len(homeless) == 1 else f"are {len(homeless)} tables"
        named = ", ".join(homeless[:5])
        what = f"there {are} of which no shard fits on a rank ({named}): more column shards, or row_wise, are smaller"
    machines = request.topology
    reserved = (
        machines.hbm_reserved_bytes or machines.hbm_reserved_fraction,
        machines.host_reserved_bytes or machines.host_reserved_fraction,
    )
    names = ("of HBM on every rank", "of memory on every host")
    places = [
        f"{name} (with what is reserved of it)" if own else name for name, own in zip(names, reserved, strict=True)
    ]
    remedies = [
        f"{_between(most, fewest)} {place}" for most, fewest, place in zip(enough, least, places, strict=True) if fewest
    ]
    if remedies:
        cure = f"what would do, all else equal: {' or '.join(remedies)}"
    elif machines.host_bytes is None:
        cure = "no HBM of a rank is enough: reserve less of it, or plan for more ranks or smaller tables"
    else:
        cure = "neither budget alone is enough to change: raise both"
    largest = f"; the largest are {', '.join(tables[:5])}" if tables else ""
    return f"{what}; {cure}{largest}."


def _between(enough: int | None, least: int) -> str:
    below = f"{math.floor(least / 2**30 * 100) / 100:.2f} GiB"
    if enough is None:
        return f"no less than {below} (that less is not enough is proved, that as much is, is not)"
    if enough == least:
        return f"{in_gib(enough)} (proved the smallest)"
    return f"{in_gib(enough)} (less than {below} is proved not to be enough)"


def in_gib(size: int) -> str:
    """A size of which so much is needed, in words: rounded up, as less would not do."""
    return f"{math.ceil(size / 2**30 * 100) / 100:.2f} GiB"
