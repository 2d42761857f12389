"""The time of a whole step through `DistributedModelParallel`: what the GPU does, or what the host needs to launch it.

The host prepares each exchange of keys and rows, waits for the number of keys that arrive, and launches every kernel.
Where tables are fast, the GPU waits for it. A plan's time is that of the tables' kernels; an exchange has kernels of
its own, which order and copy keys and rows. Host and GPU overlap, so a step takes about as long as the slower one.
"""

from __future__ import annotations

from dataclasses import dataclass

from evenkeel.placement.hardware import FALLBACK, Runtime, StepCosts, builtin_profile
from evenkeel.placement.layouts import Layout
from evenkeel.placement.options import RankLoad, mixing_seconds
from evenkeel.placement.plan import Plan
from evenkeel.placement.request import Mode, PlanRequest, Sharding, Table

_SHARPNESS = 6


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step consists of.

    Attributes:
        tables: Time of a step of the tables' modules alone: their kernels, launches and waiting.
        exchanges: Number of exchanges.
        exchanged: Tables in them.
        caching: Exchanges with a cached table in them.
        of_rows: Exchanges of rows that are not pooled.
        sweep_s: Time of the GPU to read or write every byte once that a rank sends or receives.
        kernels: Time of the tables' kernels alone.
    """

    tables: float
    exchanges: int
    exchanged: int
    caching: int
    of_rows: int
    sweep_s: float
    kernels: float = 0.0


def step_work(request: PlanRequest, plan: Plan) -> StepWork:
    """What a step of `plan` consists of."""
    cached: dict[tuple[str, bool, Sharding], bool] = {}
    fused: dict[object, list[tuple[Table, bool]]] = {}
    exchanged, moved = 0, 0.0
    for table, placement in zip(request.tables, plan.placements, strict=True):
        fused.setdefault(table.fuse_key, []).append((table, placement.mode is Mode.CACHING))
        if placement.sharding is Sharding.DATA_PARALLEL:
            continue
        key = (table.group, table.pooled, placement.sharding)
        cached[key] = cached.get(key, False) or placement.mode is Mode.CACHING
        exchanged += 1
        layout = Layout(placement.sharding, placement.column_shards)
        load = RankLoad(request, table, layout)
        rows = (load.served + load.sent) * load.output_bytes * (2 if load.training else 1)
        moved += layout.mean(request.topology) * (rows + (load.received + load.sent) * load.key_bytes)
    known = request.profile.costs(request.runtime)
    rate = max(rate for _, rate in known.hbm_gather or request.profile.hbm_gather)
    of_rows = sum(not pooled for _, pooled, _ in cached)
    # Whole steps were fitted with the launches of second modules instead of their kernels.
    mixed = [own for own in fused.values() if len({is_cached for _, is_cached in own}) > 1]
    mixing = sum(mixing_seconds(request, [table for table, _ in own]) for own in mixed)
    kernels = (plan.seconds or 0.0) - mixing
    alone = kernels + (plan.host_seconds or 0.0)
    return StepWork(alone, len(cached), exchanged, sum(cached.values()), of_rows, moved / rate, kernels)


def host_seconds(work: StepWork, costs: StepCosts) -> float:
    """Time that the host takes to launch a step, however fast the GPU is."""
    exchanges = work.exchanges * costs.exchange_host_s + work.caching * costs.cache_host_s
    exchanges += work.of_rows * costs.rows_host_s
    return costs.host_s + exchanges + work.exchanged * costs.table_host_s


def exchange_kernel_seconds(work: StepWork, costs: StepCosts) -> float:
    """Time of the kernels that order and copy keys and rows for exchanges."""
    return work.exchanges * costs.exchange_gpu_s + costs.copies * work.sweep_s


def whole_step_seconds(request: PlanRequest, plan: Plan) -> float | None:
    """Predicted time of a step of the sharded tables, input distribution and output exchange included.

    Near the point where host and GPU take the same time, each makes the other wait a little.

    Args:
        request: The request.
        plan: Its plan.

    Returns:
        Seconds, or `None` where the plan places nothing.
    """
    if plan.seconds is None:
        return None
    return seconds_of(step_work(request, plan), step_costs(request))


def step_costs(request: PlanRequest) -> StepCosts:
    """What the request's profile says of steps on so many ranks."""
    known, one_rank = request.profile.costs(request.runtime), request.topology.ranks == 1
    own = known.step_one_rank if one_rank else known.step  # TorchRec exchanges keys and rows on one rank, too
    return own or measured_costs(one_rank=one_rank)


def measured_costs(*, one_rank: bool) -> StepCosts:
    """What steps took with TorchRec 1.6 on one H200, or on two: for profiles without figures of their own."""
    known = builtin_profile(FALLBACK).costs(Runtime.TORCHREC)
    costs = known.step_one_rank if one_rank else known.step
    assert costs is not None
    return costs


def seconds_of(work: StepWork, costs: StepCosts) -> float:
    """Predicted time of a step."""
    if not work.exchanges:
        return work.tables
    host, gpu = host_seconds(work, costs), work.tables + exchange_kernel_seconds(work, costs)
    larger = max(host, gpu, 1e-12)
    total: float = larger * ((host / larger) ** _SHARPNESS + (gpu / larger) ** _SHARPNESS) ** (1 / _SHARPNESS)
    return total
