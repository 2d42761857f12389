"""The time of a whole step through `DistributedModelParallel`: what the GPU does, or what the host needs to launch it.

The host prepares each exchange of keys and rows, waits for the number of keys that arrive, and launches every kernel.
Where tables are fast, the GPU waits for it. A plan's time is that of the GPU; the two overlap, so a step takes about as
long as the slower of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from evenkeel.placement.model import Mode, Sharding
from evenkeel.placement.plan import Plan
from evenkeel.placement.request import PlanRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Launches:
    """What a host takes for a step on several ranks.

    Attributes:
        exchange_s: For each exchange: the tables of one module that are sharded alike, forward and backward.
        cache_s: More where any of these tables are cached.
    """

    exchange_s: float
    cache_s: float


MEASURED = Launches(exchange_s=3.555e-3, cache_s=0.282e-3)
"""Fitted by `benchmarks/placement_gpu_fit.py` to every other of 32 steps of TorchRec 1.6 on two H200."""

_SHARPNESS = 6


def launch_seconds(request: PlanRequest, plan: Plan, launches: Launches = MEASURED) -> float:
    """Time that the host takes for a step, however fast the GPU is; 0 on one rank or without exchange."""
    if request.topology.ranks == 1:
        return 0.0
    tables = {table.name: table for table in request.tables}
    cached: dict[tuple[str, bool, Sharding], bool] = {}
    for placement in plan.placements:
        table = tables[placement.table]
        if placement.sharding is not Sharding.DATA_PARALLEL:
            key = (table.group, table.pooled, placement.sharding)
            cached[key] = cached.get(key, False) or placement.mode is Mode.CACHING
    return len(cached) * launches.exchange_s + sum(cached.values()) * launches.cache_s


def whole_step_seconds(request: PlanRequest, plan: Plan, launches: Launches = MEASURED) -> float | None:
    """Predicted time of a step of the sharded tables, input distribution and output exchange included.

    Near the point where host and GPU take the same time, each makes the other wait a little.

    Returns:
        Seconds, or `None` where the plan places nothing.
    """
    if plan.seconds is None:
        return None
    host = launch_seconds(request, plan, launches)
    total: float = (host**_SHARPNESS + plan.seconds**_SHARPNESS) ** (1 / _SHARPNESS)
    return total
