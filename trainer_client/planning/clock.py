"""The clock has the last word: the best few plans and the trivial ones train for some steps; the quickest stays."""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, cycle
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from evenkeel.key_statistics import KeyTrace, loads, merge
from evenkeel.key_statistics.trace import unhashed
from evenkeel.placement import (
    DataType,
    InvalidInputError,
    MissCurve,
    Mode,
    Optimizer,
    Plan,
    PlanRequest,
    Runtime,
    Sharding,
    Table,
    Zipf,
    plan,
)
from evenkeel.placement.access import popularity
from evenkeel.placement.application import TORCHREC_KERNELS
from evenkeel.placement.plan_file import MeasuredPlan, PlanFile, seconds_by_mode
from evenkeel.placement.planner import trivial_plans
from evenkeel.placement.request import with_time
from trainer_client.planning.applying import sharding_plan
from trainer_client.planning.collective import from_first
from trainer_client.planning.machine import host_bytes

_LEARNING_RATE = 0.01
_DENSE_WIDTH = {"cuda": 2048, "cpu": 256}
_PROFILED_STEPS = 16
_BLOCK_STEPS = 4
_SPREAD = 2_654_435_761
"""A prime by which keys come to be all over a table."""

Batch = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
"""By table, the values and the (features * samples,) lengths of its features."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Median times on the slowest rank, the same on all ranks.

    Attributes:
        step_s: Of a step, back to back with others and beside the dense work.
        host_s: Until the host has launched a step of the tables.
        kernels_s: Of the kernels of a step of the tables, exchanges apart; None on a CPU.
    """

    step_s: float
    host_s: float
    kernels_s: float | None


class TableModel(nn.Module):
    """The tables of a request, in collections as they are grouped there, and a loss over all that they give."""

    def __init__(self, request: PlanRequest, device: torch.device) -> None:
        """Makes the tables, to be sharded over devices of a kind, on none; optimizers are applied in backward."""
        from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
        from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
        from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
        from torchrec.types import DataType as TorchRecType

        super().__init__()
        types = {DataType.FLOAT32: TorchRecType.FP32, DataType.FLOAT16: TorchRecType.FP16}
        self.tables: dict[str, list[Table]] = {}
        for table in request.tables:
            kind = ("bags" if table.pooled else "rows") + ("_weighted" if table.weighted else "")
            self.tables.setdefault(f"{kind}_{table.group}".replace(".", "_"), []).append(table)
        self.collections = nn.ModuleDict()
        for name, tables in self.tables.items():
            pooled = tables[0].pooled
            config: Any = EmbeddingBagConfig if pooled else EmbeddingConfig
            configs = [
                config(
                    name=table.name,
                    embedding_dim=table.dim,
                    num_embeddings=table.rows,
                    feature_names=_features(table),
                    data_type=types[table.data_type],
                )
                for table in tables
            ]
            made: Any = EmbeddingBagCollection if pooled else EmbeddingCollection
            weighted = {"is_weighted": tables[0].weighted} if pooled else {}
            self.collections[name] = made(configs, device=torch.device("meta"), **weighted)
            held: Any = getattr(self.collections[name], "embedding_bags" if pooled else "embeddings")
            for table in tables:
                options = {"lr": _LEARNING_RATE}
                apply_optimizer_in_backward(_optimizer(table.optimizer, device), held[table.name].parameters(), options)

    def keys(self, batch: Batch, device: torch.device) -> dict[str, Any]:
        """The keys of each collection on a device."""
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        result = {}
        for name, tables in self.tables.items():
            values = torch.cat([batch[table.name][0] for table in tables]).to(device)
            lengths = torch.cat([batch[table.name][1] for table in tables]).to(device)
            result[name] = KeyedJaggedTensor(
                keys=[feature for table in tables for feature in _features(table)],
                values=values,
                lengths=lengths,
                weights=torch.ones(len(values), device=device) if tables[0].weighted else None,
            )
        return result

    def forward(self, keys: dict[str, Any]) -> torch.Tensor:
        """The sum of the means of all embeddings."""
        parts = []
        for name, module in self.collections.items():
            embeddings = module(keys[name])
            pooled = self.tables[name][0].pooled
            parts += [each.values().mean() for each in ([embeddings] if pooled else embeddings.values())]
        return torch.stack(parts).sum()


def _features(table: Table) -> list[str]:
    return [f"{table.name}/{number}" for number in range(table.features)]


def _optimizer(optimizer: Optimizer, device: torch.device) -> Any:
    from torchrec.optim import RowWiseAdagrad

    if device.type == "cpu" and optimizer is Optimizer.ADAM:  # which FBGEMM has for GPUs only
        return RowWiseAdagrad
    return {
        Optimizer.SGD: torch.optim.SGD,
        Optimizer.ADAM: torch.optim.Adam,
        Optimizer.ADAGRAD: torch.optim.Adagrad,
        Optimizer.ROWWISE_ADAGRAD: RowWiseAdagrad,
    }[optimizer]


class DenseWork:
    """Products of matrices that take so long on a device, in place of the rest of a model."""

    def __init__(self, milliseconds: float, device: torch.device) -> None:
        """Finds how many products take so many milliseconds."""
        width = _DENSE_WIDTH[device.type]
        self._factor = torch.ones(width, width, device=device)
        self._product = torch.empty_like(self._factor)
        self._count = 0
        if milliseconds > 0:
            self._count = 8
            self.run()
            wait(device)
            begin = time.perf_counter()
            self.run()
            wait(device)
            self._count = max(1, round(milliseconds / 1e3 / ((time.perf_counter() - begin) / self._count)))

    def run(self) -> None:
        """Launches the work."""
        for _ in range(self._count):
            torch.mm(self._factor, self._factor, out=self._product)


class Trial:
    """The tables of a plan in training on all ranks of a group, which call its methods together.

    Attributes:
        parallel: The tables, sharded by the plan.
        dense: Work of every step beside the tables.
        steps: Seconds of a step, by block.
        launches: Seconds in which the host launched a step.
    """

    def __init__(
        self,
        request: PlanRequest,
        plan: Plan | Callable[[nn.Module], Any],
        batches: Iterable[Batch],
        device: torch.device,
        *,
        dense: DenseWork,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Shards the tables of a request by a plan, or by TorchRec's plan of a model; batches are used again."""
        from torchrec.distributed.model_parallel import DistributedModelParallel
        from torchrec.distributed.types import ShardingEnv

        self._model, self._batches = TableModel(request, device), cycle(batches)
        self._device, self._group = device, group
        self.dense, self.steps, self.launches = dense, list[float](), list[float]()
        ranks = group or dist.group.WORLD
        assert ranks is not None, "there is a process group"
        sharded = plan(self._model) if callable(plan) else sharding_plan(self._model, request, plan, device=device.type)
        env = ShardingEnv.from_process_group(ranks)
        self.parallel = DistributedModelParallel(self._model, env=env, device=device, plan=sharded)

    def run(self, seconds: float) -> None:
        """Trains for so long, a step at least, untimed: caches fill. Collective."""
        begin = time.perf_counter()
        for number in count():
            self._step(self._next())
            is_over = time.perf_counter() - begin > seconds
            if number % _BLOCK_STEPS == 0 and is_true_anywhere(is_over, self._device, self._group):
                break
        wait(self._device)

    def block(self, steps: int = _BLOCK_STEPS) -> None:
        """Times steps back to back, and the launch of one. Collective."""
        kept = [self._next() for _ in range(steps + 1)]
        self._settle()
        begin = time.perf_counter()
        for keys in kept[1:]:
            self._step(keys)
        wait(self._device)
        self.steps.append((time.perf_counter() - begin) / steps)
        self._settle()
        begin = time.perf_counter()
        self.parallel(kept[0]).backward()
        self.launches.append(time.perf_counter() - begin)
        wait(self._device)

    def timing(self) -> Timing:
        """What was measured, and the time of kernels, which is measured now. Collective."""
        medians = [statistics.median(self.steps), statistics.median(self.launches), self._kernels()]
        every: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(every, medians, group=self._group)
        step, host, kernels = (max(column) for column in zip(*every, strict=True))
        return Timing(step_s=step, host_s=host, kernels_s=kernels or None)

    def _kernels(self) -> float:
        """Seconds of the kernels and copies of a step of the tables, but for exchanges, which wait for other ranks."""
        if self._device.type != "cuda":
            return 0.0
        from torch.profiler import ProfilerActivity, profile

        kept = [self._next() for _ in range(_PROFILED_STEPS)]
        self._settle()
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            for keys in kept:
                self.parallel(keys).backward()
            wait(self._device)
        events = [event for event in profiled.key_averages() if "nccl" not in event.key.lower()]
        return float(sum(event.self_device_time_total for event in events)) / 1e6 / _PROFILED_STEPS

    def _next(self) -> dict[str, Any]:
        return self._model.keys(next(self._batches), self._device)

    def _step(self, keys: dict[str, Any]) -> None:
        loss = self.parallel(keys)
        self.dense.run()
        loss.backward()

    def _settle(self) -> None:
        wait(self._device)
        dist.barrier(group=self._group)
        wait(self._device)


def is_true_anywhere(value: bool, device: torch.device, group: dist.ProcessGroup | None) -> bool:
    """Whether a value is true on any rank; the same answer on all."""
    votes = torch.tensor([float(value)], device=device)
    dist.all_reduce(votes, group=group)
    return bool(votes.item())


def wait(device: torch.device) -> None:
    """Waits until a device has done all that was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def drawn_batches(
    request: PlanRequest, number: int = 64, *, traces: Mapping[str, KeyTrace] | None = None, seed: int = 0
) -> list[Batch]:
    """Keys of one rank: those that were traced, and of other tables drawn by their popularity.

    Of a traced step that is larger than a rank's, a part is taken; where a sample of the keys was followed, each stands
    for several. Keys of a table of which only a miss curve is known are drawn from a Zipf law.
    """
    draw = np.random.default_rng(seed)
    batches: list[dict[str, tuple[torch.Tensor, torch.Tensor]]] = [{} for _ in range(number)]
    samples = request.step.samples_per_rank
    for table in request.tables:
        cells = samples * table.features
        trace = (traces or {}).get(table.name)
        for step, batch in enumerate(batches):
            wanted = round(table.ids_per_sample * samples)
            keys = _drawn(table, wanted, draw) if trace is None else _replayed(trace, table, wanted, step, draw)
            lengths = np.full(cells, len(keys) // cells)
            lengths[draw.permutation(cells)[: len(keys) % cells]] += 1
            batch[table.name] = torch.from_numpy(keys), torch.from_numpy(lengths)
    return list(batches)


def _drawn(table: Table, count: int, draw: np.random.Generator) -> Any:
    law = popularity(Zipf() if isinstance(table.access, MissCurve) else table.access, table.rows)
    ends = np.cumsum(law.keys)
    bins = draw.choice(len(law.keys), count, p=law.keys * law.probability / (law.keys @ law.probability))
    ranks = (ends[bins] - draw.random(count) * law.keys[bins]).astype(np.int64)
    return np.clip(ranks, 0, table.rows - 1) * _SPREAD % table.rows


def _replayed(trace: KeyTrace, table: Table, count: int, number: int, draw: np.random.Generator) -> Any:
    low, high = np.searchsorted(trace.step, [number % trace.steps, number % trace.steps + 1])
    keys = np.repeat(unhashed(trace.key[low:high]), trace.times[low:high])
    if not len(keys):
        return keys
    keys = draw.permutation(np.resize(keys, max(count, len(keys))))[:count]
    several = draw.integers(0, max(1, round(1 / trace.share)), len(keys))
    return (keys + several * _SPREAD) % table.rows


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
        cuts = [
            (p.mode, p.ratio if 0 < p.ratio < 1 else None, p.sharding, p.column_shards)
            for p in (other.placements if other else ())
        ]
        made[name] = _as_cut(request, cuts) if cuts else None
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


Cut: TypeAlias = tuple[Mode, float | None, Sharding, int]
"""How a table is stored and cut: its mode, the ratio of a cache, and parts of its width."""


def _as_cut(request: PlanRequest, cuts: Sequence[Cut]) -> Plan | None:
    """A plan whose tables are stored and cut as those of another one; this request's profile predicts its times."""
    tables = [
        replace(
            table,
            modes=(mode,),
            ratio=ratio,
            sharding=sharding,
            column_shards=parts if parts > 1 else table.column_shards,
        )
        for table, (mode, ratio, sharding, parts) in zip(request.tables, cuts, strict=True)
    ]
    return _planned(replace(request, tables=tuple(tables)))


def as_cut(request: PlanRequest, parameters: Mapping[str, Any]) -> Plan | None:
    """A plan that cuts and stores tables as another planner does; on which ranks is decided here."""
    cuts: list[Cut] = []
    for table in request.tables:
        given = parameters.get(table.name)
        if given is None or given.sharding_type not in set(Sharding) or given.compute_kernel not in _MODES:
            return None
        mode = _MODES[given.compute_kernel]
        factor = getattr(given.cache_params, "load_factor", None) or _DEFAULT_LOAD_FACTOR
        blocks = {shard.shard_offsets[1] for shard in given.sharding_spec.shards} if given.sharding_spec else {0}
        cuts.append((mode, factor if mode is Mode.CACHING else None, Sharding(given.sharding_type), len(blocks)))
    return _as_cut(request, cuts)


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


def race_of_file(device: torch.device, content: PlanFile, statistics: Sequence[Path], seconds: float) -> PlanFile:
    """The quickest of a file's plan and its contenders, by the keys of files of statistics. Collective."""
    traces: Mapping[str, KeyTrace] = merge(loads(path.read_bytes()) for path in statistics)
    drawn = drawn_batches(content.request, traces=traces, seed=dist.get_rank())
    quickest, measured = run_race(content.request, content.plan, drawn, device, seconds=seconds)
    return replace(content, plan=quickest, measured=measured)
