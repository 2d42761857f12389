"""The clock has the last word: the best few plans and the trivial ones train for some steps; the quickest stays."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from evenkeel.key_statistics import KeyTrace
from evenkeel.placement import InvalidInputError, Mode, Plan, PlanRequest, Runtime, Sharding, Table, plan
from evenkeel.placement.application import TORCHREC_KERNELS
from evenkeel.placement.fields import require
from evenkeel.placement.plan_file import MeasuredPlan, PlanFile, seconds_by_mode
from evenkeel.placement.planner import trivial_plans
from evenkeel.placement.request import with_time
from trainer_client.planning.collective import from_first, is_true_anywhere
from trainer_client.planning.machine import host_bytes
from trainer_client.planning.trial import Batch, DenseWork, TableModel, Timing, Trial, drawn_batches

_SEARCH_S = 2.0
"""Time limit of the search for each of the plans to compare with."""
_MISSES = {2.0: "misses twice as slow", 0.5: "misses half as slow"}
"""Plans for other costs: what is best if the profile is off."""
_NOISE = 1.01
_MODES = {"dense": Mode.HBM_ONLY} | {kernel: mode for mode, kernel in TORCHREC_KERNELS.items()}
_DEFAULT_LOAD_FACTOR = 0.2
"""Of FBGEMM, where TorchRec's planner names none."""


def contenders(request: PlanRequest, first: Plan, torchrecs: Mapping[str, Any] | None = None) -> dict[str, Plan]:
    """The plan, those that are best if the profile is somewhat wrong, and what one writes by hand in a minute."""
    made: dict[str, Plan | None] = {"plan": first}
    for factor, name in _MISSES.items():
        costs = request.profile.costs(request.runtime)
        runtimes = {request.runtime.value: replace(costs, miss_factor=factor * costs.miss_factor)}
        other = _planned(replace(request, hardware=replace(request.profile, runtimes=runtimes)))
        if other is not None and other.placements:
            pairs = zip(request.tables, other.placements, strict=True)
            tables = [_pinned(table, one.mode, one.ratio, one.sharding, one.column_shards) for table, one in pairs]
            made[name] = _planned(replace(request, tables=tuple(tables)))  # its times by the profile as it is
    with contextlib.suppress(InvalidInputError):  # there may be no time to price all tables
        made |= trivial_plans(with_time(request, min(_SEARCH_S, request.solver.time_limit_s)))
    with contextlib.suppress(InvalidInputError):  # TorchRec cuts into widths that FBGEMM does not take
        made["TorchRec's planner"] = as_cut(request, torchrecs) if torchrecs else None
    different: dict[tuple[Any, ...], tuple[str, Plan]] = {}
    for name, each in made.items():
        if each is not None and each.placements:
            choices = tuple((p.mode, p.ratio, p.sharding, p.column_shards, p.ranks) for p in each.placements)
            different.setdefault(choices, (name, each))
    return dict(different.values())


def _planned(request: PlanRequest) -> Plan | None:
    try:
        return plan(with_time(request, min(_SEARCH_S, request.solver.time_limit_s)))
    except InvalidInputError:  # a table may have no such mode or sharding
        return None


def _pinned(table: Table, mode: Mode, ratio: float, sharding: Sharding, parts: int) -> Table:
    """A table that can be stored and cut in one way only."""
    cached = ratio if mode is Mode.CACHING and 0 < ratio < 1 else None
    parts = parts if parts > 1 else table.column_shards
    return replace(table, modes=(mode,), ratio=cached, sharding=sharding, column_shards=parts)


def as_cut(request: PlanRequest, parameters: Mapping[str, Any]) -> Plan | None:
    """A plan that cuts and stores tables as another planner does; on which ranks is decided here."""
    tables = []
    for table in request.tables:
        given = parameters.get(table.name)
        if given is None or given.sharding_type not in set(Sharding) or given.compute_kernel not in _MODES:
            return None
        factor = getattr(given.cache_params, "load_factor", None) or _DEFAULT_LOAD_FACTOR
        blocks = {shard.shard_offsets[1] for shard in given.sharding_spec.shards} if given.sharding_spec else {0}
        sharding = Sharding(given.sharding_type)
        tables.append(_pinned(table, _MODES[given.compute_kernel], factor, sharding, len(blocks)))
    return _planned(replace(request, tables=tuple(tables)))


def torchrecs_parameters(request: PlanRequest, device: torch.device) -> dict[str, Any]:
    """What TorchRec's own planner makes of the tables, by name; nothing where it finds no plan."""
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
    from torchrec.distributed.planner import Topology as TorchRecTopology
    from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
    from torchrec.distributed.planner.types import PlannerError
    from torchrec.distributed.types import CacheParams

    machines = request.topology
    free = machines.hbm_budget - request.profile.costs(request.runtime).workspace_bytes
    kernels = list(TORCHREC_KERNELS.values()) if device.type == "cuda" else None
    planner = EmbeddingShardingPlanner(
        topology=TorchRecTopology(
            world_size=machines.ranks,
            local_world_size=machines.local_ranks,
            compute_device=device.type,
            hbm_cap=max(free, 0),
            ddr_cap=(machines.host_bytes or 1 << 42) // machines.local_ranks,
        ),
        batch_size=request.step.samples_per_rank,
        storage_reservation=FixedPercentageStorageReservation(0.0),
        constraints={
            table.name: ParameterConstraints(
                compute_kernels=kernels,
                sharding_types=[sharding.value for sharding in table.shardings],
                pooling_factors=[table.ids_per_sample / table.features] * table.features,
                cache_params=CacheParams(load_factor=_DEFAULT_LOAD_FACTOR),
            )
            for table in request.tables
        },
    )
    try:
        made = planner.plan(
            TableModel(request, device), [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]
        )
    except (PlannerError, RuntimeError):  # nothing fits, or its runtime has no such sharding here
        return {}
    return {name: value for module in made.plan.values() for name, value in module.items()}


def run_race(
    request: PlanRequest,
    plans: Plan | Mapping[str, Plan],
    batches: Sequence[Batch],
    device: torch.device,
    *,
    seconds: float,
    group: dist.ProcessGroup | None = None,
) -> tuple[Plan, tuple[MeasuredPlan, ...]]:
    """Trains the tables of each plan for some steps, in turns, and keeps the quickest. Collective.

    Where the time of the dense part is known (`Step.dense_ms`), the quickest has the shortest steps beside as much
    work. Where it is not, kernels decide, as a real model launches ahead of them; of plans whose kernels are within a
    hundredth of the quickest, the shortest step does. A plan within a hundredth of the quickest that stands before it
    is preferred. Plans that do not fit into memory together are run one after another.

    Args:
        request: What was planned for.
        plans: The plans by name; of one alone its contenders too, which rank 0 makes.
        batches: Keys of this rank.
        device: Of this rank.
        seconds: Training time of each plan.
        group: The ranks; all by default.

    Returns:
        The quickest plan, and all that were run.

    Raises:
        InvalidInputError: If these ranks cannot run the plans, or there is no time.
        RuntimeError: If the memory suffices for none.
    """
    check_race(request, dist.get_world_size(group), seconds)
    if isinstance(plans, Plan):
        first = plans
        if not first.placements:
            return first, ()
        plans = from_first(lambda: contenders(request, first, torchrecs_parameters(request, device)), group)
    dense_ms, timings = request.step.dense_ms, dict[str, Timing]()
    dense = DenseWork(dense_ms or 0.0, device)
    for names in _together(request, plans, device, group):
        few = {name: plans[name] for name in names}
        timings |= _timed(request, few, batches, device, dense, seconds, group)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if not timings:
        raise RuntimeError("the clock: no plan could be run; the tables of each take more memory than there is")
    quickest = _quickest(timings, dense_ms is None)
    measured = tuple(
        MeasuredPlan(
            name=name,
            step_s=timing.step_s,
            kernels_s=timing.kernels_s,
            dense_ms=dense_ms or 0.0,
            predicted=seconds_by_mode(plans[name]),
            chosen=name == quickest,
        )
        for name, timing in timings.items()
    )
    return plans[quickest], measured


def _timed(
    request: PlanRequest,
    plans: Mapping[str, Plan],
    batches: Sequence[Batch],
    device: torch.device,
    dense: DenseWork,
    seconds: float,
    group: dist.ProcessGroup | None,
) -> dict[str, Timing]:
    """Times of plans that take turns, but for those that the memory of a rank does not suffice for."""
    trials: dict[str, Trial] = {}
    for name, made in plans.items():
        with contextlib.suppress(torch.OutOfMemoryError):
            trials[name] = Trial(request, made, batches, device, dense=dense, group=group)
        if is_true_anywhere(name not in trials, group):
            trials.pop(name, None)
    for trial in trials.values():
        trial.run(seconds / 2)
    begin, is_over = time.perf_counter(), not trials
    while not is_over:
        for trial in trials.values():
            trial.block()
        is_over = is_true_anywhere(time.perf_counter() - begin > seconds / 2 * len(trials), group)
    return {name: trial.timing() for name, trial in trials.items()}


def _quickest(timings: Mapping[str, Timing], by_kernels: bool) -> str:
    decisive = {name: timing.step_s for name, timing in timings.items()}
    kernels = {name: timing.kernels_s for name, timing in timings.items() if timing.kernels_s is not None}
    if by_kernels and len(kernels) == len(timings):
        decisive = kernels
    close = [name for name, seconds in decisive.items() if seconds <= _NOISE * min(decisive.values())]
    shortest = min(timings[name].step_s for name in close)
    return next(name for name in close if timings[name].step_s <= _NOISE * shortest)


def _together(
    request: PlanRequest, plans: Mapping[str, Plan], device: torch.device, group: dist.ProcessGroup | None
) -> list[list[str]]:
    """Names of the plans to run in turns with each other: all where memory suffices, else each alone."""
    ranks = request.topology.local_ranks
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        fits = sum(made.hbm.used_bytes for made in plans.values()) < 0.9 * free
        fits = fits and sum(made.host.used_bytes for made in plans.values()) < 0.8 * host_bytes()
    else:  # all tables are in the host's memory, whatever the plan says
        size = sum(table.rows * table.dim * 8 for table in request.tables) // request.topology.ranks * ranks
        fits = size * len(plans) < 0.5 * host_bytes()
    return [[name] for name in plans] if is_true_anywhere(not fits, group) else [list(plans)]


def check_race(request: PlanRequest, ranks: int, seconds: float) -> None:
    """Refuses what cannot be run on so many ranks, or for so long."""
    require(seconds > 0, "clock", seconds, "is no time", "give the seconds that each plan trains, such as 5")
    given, what = request.topology.ranks, f"is not the {ranks} that are here to run plans"
    require(given == ranks, "topology.ranks", given, what, "run it on the job's ranks, or try it with --device cpu")
    runtime, remedy = request.runtime, "plan with runtime torchrec, or leave the clock out"
    require(runtime is Runtime.TORCHREC, "runtime", runtime.value, "is not run by the clock", remedy)


def race_of_file(device: torch.device, content: PlanFile, traces: Mapping[str, KeyTrace], seconds: float) -> PlanFile:
    """The quickest of a file's plan and its contenders, by the keys of traces. Collective."""
    drawn = drawn_batches(content.request, traces=traces, seed=dist.get_rank())
    quickest, measured = run_race(content.request, content.plan, drawn, device, seconds=seconds)
    return replace(content, plan=quickest, measured=measured)
