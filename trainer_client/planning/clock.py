"""The clock has the last word: the best few plans and the trivial ones are trained for some steps, the quickest stays.

torchrun --nproc-per-node 2 -m trainer_client.planning.clock --plan plan.json --seconds 5
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from evenkeel.key_statistics import KeyTrace, loads, merge
from evenkeel.placement import InvalidInputError, Mode, Plan, PlanRequest, Runtime, Sharding, plan
from evenkeel.placement.fields import encode
from evenkeel.placement.plan_file import MeasuredPlan, PlanFile, dumps, seconds_by_mode
from evenkeel.placement.plan_file import loads as loads_plan
from evenkeel.placement.planner import trivial_plans
from evenkeel.placement.request import with_time
from trainer_client.planning.collective import from_first, join_group
from trainer_client.planning.machine import host_bytes
from trainer_client.planning.trials import Batch, DenseWork, TableModel, Timing, Trial, drawn_batches, is_true_anywhere

_SEARCH_S = 2.0
"""Time limit of the search for each of the plans to compare with."""
_MISSES = {2.0: "misses twice as slow", 0.5: "misses half as slow"}
"""Plans for other costs: what is best if the profile is off."""
_BATCHES = 64
_NOISE, _CLOSE = 1.01, 1.03
_KERNELS = {"fused": Mode.HBM_ONLY, "dense": Mode.HBM_ONLY, "fused_uvm": Mode.HOST_ONLY}
_KERNELS["fused_uvm_caching"] = Mode.CACHING
_DEFAULT_LOAD_FACTOR = 0.2
"""Of FBGEMM, where TorchRec's planner names none."""


def contenders(request: PlanRequest, first: Plan, torchrecs: Mapping[str, Any] | None = None) -> dict[str, Plan]:
    """The plan, those that are best if the profile is somewhat wrong, and what one writes by hand in a minute."""
    made: dict[str, Plan | None] = {"plan": first}
    for factor, name in _MISSES.items():
        costs = request.profile.costs(request.runtime)
        runtimes = {request.runtime.value: replace(costs, miss_factor=factor * costs.miss_factor)}
        made[name] = _priced(request, _planned(replace(request, hardware=replace(request.profile, runtimes=runtimes))))
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


def _priced(request: PlanRequest, found: Plan | None) -> Plan | None:
    """A plan that was made for other costs, with the times that this request's profile predicts."""
    if found is None or not found.placements:
        return None
    tables = [
        replace(
            table,
            modes=(placed.mode,),
            ratio=placed.ratio if 0 < placed.ratio < 1 else None,
            sharding=placed.sharding,
            column_shards=placed.column_shards if placed.column_shards > 1 else table.column_shards,
        )
        for table, placed in zip(request.tables, found.placements, strict=True)
    ]
    return _planned(replace(request, tables=tuple(tables)))


def as_cut(request: PlanRequest, parameters: Mapping[str, Any]) -> Plan | None:
    """A plan that cuts and stores tables as another planner does; on which ranks is decided here."""
    tables = []
    for table in request.tables:
        given = parameters.get(table.name)
        if given is None or given.sharding_type not in set(Sharding) or given.compute_kernel not in _KERNELS:
            return None
        mode = _KERNELS[given.compute_kernel]
        factor = getattr(given.cache_params, "load_factor", None) or _DEFAULT_LOAD_FACTOR
        blocks = {shard.shard_offsets[1] for shard in given.sharding_spec.shards} if given.sharding_spec else {0}
        cut = replace(
            table,
            modes=(mode,),
            ratio=factor if mode is Mode.CACHING else None,
            sharding=Sharding(given.sharding_type),
            column_shards=len(blocks) if len(blocks) > 1 else table.column_shards,
        )
        tables.append(cut)
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
    kernels = [name for name in _KERNELS if name != "dense"] if device.type == "cuda" else None
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
    work. Where it is not, kernels decide, as a real model launches ahead of them; of plans whose kernels are within
    three hundredths of the quickest, the shortest step does. A plan within a hundredth of the quickest that stands
    before it is preferred. Plans that do not fit into memory together are run one after another.

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
    if not seconds > 0:
        raise InvalidInputError("clock", seconds, "is no time", "give the seconds that each plan trains, such as 5")
    check_request(request, dist.get_world_size(group))
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
        if is_true_anywhere(name not in trials, device, group):
            trials.pop(name, None)
    for trial in trials.values():
        trial.run(seconds / 2)
    begin, is_over = time.perf_counter(), not trials
    while not is_over:
        for trial in trials.values():
            trial.block()
        is_over = is_true_anywhere(time.perf_counter() - begin > seconds / 2 * len(trials), device, group)
    return {name: trial.timing() for name, trial in trials.items()}


def _quickest(timings: Mapping[str, Timing], by_kernels: bool) -> str:
    decisive, within = {name: timing.step_s for name, timing in timings.items()}, _NOISE
    kernels = {name: timing.kernels_s for name, timing in timings.items() if timing.kernels_s is not None}
    if by_kernels and len(kernels) == len(timings):
        decisive, within = kernels, _CLOSE
    close = [name for name, seconds in decisive.items() if seconds <= within * min(decisive.values())]
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
    return [[name] for name in plans] if is_true_anywhere(not fits, device, group) else [list(plans)]


def check_request(request: PlanRequest, ranks: int) -> None:
    """Refuses what cannot be run on so many ranks."""
    machines = request.topology
    if machines.ranks != ranks:
        what = f"is not the {ranks} that are here to run plans"
        remedy = "leave the clock out, or run it on the job's ranks"
        raise InvalidInputError("topology.ranks", machines.ranks, what, remedy)
    if request.runtime is not Runtime.TORCHREC:
        remedy = "plan with runtime torchrec, or leave the clock out"
        raise InvalidInputError("runtime", request.runtime.value, "is not run by the clock", remedy)


def main() -> None:
    """Runs the plan of a plan file and its contenders on the ranks of torchrun; writes the file of the quickest."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--plan", type=Path, required=True, help="plan file, which is replaced")
    parser.add_argument("--statistics", type=Path, action="append", default=[], help="key statistics to replay")
    parser.add_argument("--seconds", type=float, default=5.0, help="training time of each plan")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    device = join_group(options.device)
    content = loads_plan(options.plan.read_text("utf-8"))
    traces: Mapping[str, KeyTrace] = merge(loads(path.read_bytes()) for path in options.statistics)
    quickest, measured = run_race(
        content.request,
        content.plan,
        drawn_batches(content.request, _BATCHES, traces=traces, seed=dist.get_rank()),
        device,
        seconds=options.seconds,
    )
    if dist.get_rank() == 0:
        made = PlanFile(request=content.request, plan=quickest, measured=measured)
        options.plan.write_text(dumps(made), "utf-8")
        print(json.dumps(encode(measured)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
