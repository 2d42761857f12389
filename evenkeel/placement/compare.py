"""A user's own plan against the best one, and why they differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from evenkeel.placement.bounds import Share, check_bounds
from evenkeel.placement.invalid_input import InvalidInputError, require
from evenkeel.placement.limits import Limits, Watch
from evenkeel.placement.model import Mode, Name, Runtime, Sharding, Table
from evenkeel.placement.plan import Placement, Plan
from evenkeel.placement.planner import plan
from evenkeel.placement.request import PlanRequest, with_time
from evenkeel.placement.shortage import in_gib
from evenkeel.placement.storage import row_bytes

_SHARE = 0.7
"""Of the time limit, for the best plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnPlacement:
    """A placement that a user chose.

    Attributes:
        table: Name of the table.
        mode: Its mode.
        ratio: Fraction of its rows in HBM; of no meaning for HBM_ONLY and HOST_ONLY.
    """

    table: Name
    mode: Mode
    ratio: Share = 0.5

    def __post_init__(self) -> None:
        check_bounds(self)

    @property
    def held(self) -> float:
        """The ratio that the mode means."""
        return {Mode.HBM_ONLY: 1.0, Mode.HOST_ONLY: 0.0}.get(self.mode, self.ratio)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One table that the plans place differently.

    Attributes:
        table: Name of the table.
        own_mode: Its mode as the runtime would really run the user's plan.
        own_ratio: Its ratio likewise.
        best_mode: Its mode in the best plan.
        best_ratio: Its ratio there.
        saves_seconds: Time of a step that the best plan saves on it; negative where it pays for others.
        frees_hbm_bytes: HBM that the best plan takes less for it on a rank.
        reason: Why, in words.
    """

    table: str
    own_mode: Mode
    own_ratio: float
    best_mode: Mode
    best_ratio: float
    saves_seconds: float
    frees_hbm_bytes: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two plans.

    Attributes:
        own: The user's plan as the runtime would really run it, whether it fits or not; `None` where it cannot run.
        fits: Whether it keeps both budgets.
        problems: What keeps it from running or fitting, and what the runtime would silently change.
        best: The best plan.
        differences: The tables placed differently, largest saving first.
    """

    own: Plan | None
    fits: bool
    problems: tuple[str, ...]
    best: Plan
    differences: tuple[Difference, ...]


def compare(
    request: PlanRequest, own: tuple[OwnPlacement, ...], *, should_stop: Callable[[], bool] | None = None
) -> Comparison:
    """Judge the placements `own` against the best plan of `request`.

    Raises:
        InvalidInputError: If a table is unknown, missing or named twice, or as for `plan`.
        SolveCancelledError: If `should_stop` answered true.
    """
    wanted = _by_table(request, own)
    effective, problems = _pooled(request, wanted)
    watch = Watch(Limits(time_limit_s=request.solver.time_limit_s))
    best = plan(with_time(request, _SHARE * watch.left()), split=False, should_stop=should_stop)
    pinned = tuple(_pinned(table, *effective[table.name]) for table in request.tables)
    machines = request.topology
    roomy = replace(machines, hbm_bytes=max(machines.hbm_bytes, 2**52) if machines.hbm_bytes else 0, host_bytes=None)
    asked = replace(request, tables=pinned)
    try:
        alone = plan(
            with_time(replace(asked, topology=roomy), _SHARE * watch.left()), split=False, should_stop=should_stop
        )
        if _overrun(alone, best) and any(placement.ranks for placement in alone.placements):
            # Shards were put where they are fast, whatever they take there.
            kept = plan(with_time(asked, watch.left()), split=False, should_stop=should_stop)
            alone = alone if kept.seconds is None else kept
    except InvalidInputError as error:
        return Comparison(own=None, fits=False, problems=(*problems, str(error)), best=best, differences=())
    if alone.seconds is None:
        never = "these modes and ratios contradict each other within a fused group"
        return Comparison(own=None, fits=False, problems=(*problems, never), best=best, differences=())
    problems += (over := _overrun(alone, best))
    alone = replace(
        alone,
        hbm=replace(best.hbm, used_bytes=alone.hbm.used_bytes, seconds_per_gib=0.0),
        host=replace(best.host, used_bytes=alone.host.used_bytes, seconds_per_gib=0.0),
    )
    differences = _differences(alone, best)
    return Comparison(own=alone, fits=not over, problems=tuple(problems), best=best, differences=differences)


def _overrun(own: Plan, best: Plan) -> list[str]:
    """What a plan takes more than there is, which `best` knows."""
    budgets = (("HBM on a rank", own.hbm, best.hbm), ("memory on a host", own.host, best.host))
    over = ((what, mine.used_bytes - its.limit_bytes) for what, mine, its in budgets if its.limit_bytes is not None)
    return [f"takes {in_gib(more)} more {what} than there is" for what, more in over if more > 0]


def _by_table(request: PlanRequest, own: tuple[OwnPlacement, ...]) -> dict[str, OwnPlacement]:
    names = {table.name for table in request.tables}
    wanted: dict[str, OwnPlacement] = {}
    for index, placement in enumerate(own):
        path = f"own[{index}].table"
        require(
            placement.table in names, path, placement.table, "is not among the tables", "name a table of the request"
        )
        require(placement.table not in wanted, path, placement.table, "is there twice", "place every table once")
        wanted[placement.table] = placement
    for name in sorted(names - wanted.keys()):
        raise InvalidInputError("own", name, "does not place every table", f"add a placement of {name!r}")
    return wanted


def _pooled(request: PlanRequest, wanted: dict[str, OwnPlacement]) -> tuple[dict[str, tuple[Mode, float]], list[str]]:
    """What the runtime makes of the user's ratios: fused tables share the ratio of their summed budgets."""
    effective = {name: (p.mode, p.held) for name, p in wanted.items()}
    pools: dict[object, list[Table]] = {}
    for table in request.tables:
        mode = wanted[table.name].mode
        cached = mode is Mode.CACHING
        if table.shardings == (Sharding.ROW_WISE,) and (cached or request.runtime is Runtime.DYNAMICEMB):
            pools.setdefault((table.fuse_key, cached), []).append(table)
    problems = []
    for (_, cached), tables in ((key, value) for key, value in pools.items() if isinstance(key, tuple)):
        sizes = np.array(
            [table.rows * row_bytes(table, training=request.step.training) for table in tables], dtype=float
        )
        held = np.array([wanted[table.name].held for table in tables])
        if np.ptp(held) < 1e-12:
            continue
        ratio = float(sizes @ held / sizes.sum())
        mode = Mode.CACHING if cached else Mode.HYBRID
        effective.update({table.name: (mode, ratio) for table in tables})
        names = ", ".join(table.name for table in tables[:5]) + (", ..." if len(tables) > 5 else "")
        problems.append(f"{names} fuse, so their ratios are pooled: all become {mode.value} at {ratio:.3g}")
    return effective, problems


def _pinned(table: Table, mode: Mode, ratio: float) -> Table:
    if mode in (Mode.CACHING, Mode.HYBRID):
        mode = {0.0: Mode.HOST_ONLY, 1.0: Mode.HBM_ONLY}.get(ratio, mode)
    return replace(table, modes=(mode,), ratio=ratio)


def _differences(own: Plan, best: Plan) -> tuple[Difference, ...]:
    found = []
    for mine, other in zip(own.placements, best.placements, strict=False):
        if (mine.mode, mine.ratio) == (other.mode, other.ratio):
            continue
        found.append(
            Difference(
                table=mine.table,
                own_mode=mine.mode,
                own_ratio=mine.ratio,
                best_mode=other.mode,
                best_ratio=other.ratio,
                saves_seconds=mine.seconds - other.seconds,
                frees_hbm_bytes=mine.hbm_bytes - other.hbm_bytes,
                reason=_reason(mine, other),
            )
        )
    return tuple(sorted(found, key=lambda difference: -difference.saves_seconds))


def _reason(mine: Placement, other: Placement) -> str:
    saved, freed = mine.seconds - other.seconds, (mine.hbm_bytes - other.hbm_bytes) / 2**30
    rows = f"{mine.miss_rate:.0%} of its {mine.unique_keys:,.0f} unique keys miss HBM, {other.miss_rate:.0%} would"
    if saved >= 0 and freed >= 0:
        return f"faster by {saved * 1e3:.3g} ms and {freed:.2f} GiB of HBM smaller; {rows}"
    if saved >= 0:
        return f"{-freed:.2f} GiB more HBM saves {saved * 1e3:.3g} ms here, more than elsewhere; {rows}"
    return f"frees {freed:.2f} GiB of HBM for tables to which it is worth more, at {-saved * 1e3:.3g} ms here; {rows}"
