"""From a model to a plan that runs, in one call, or as TorchRec's planners are called."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from evenkeel.key_statistics import with_statistics
from evenkeel.placement import (
    HardwareProfile,
    InvalidInputError,
    Optimizer,
    Plan,
    PlanRequest,
    Runtime,
    Sharding,
    Step,
    Table,
    Topology,
    parse_topology,
)
from evenkeel.placement.access import Access
from evenkeel.placement.fields import require
from evenkeel.placement.plan_file import MeasuredPlan, PlanFile, dumps, measured_line
from evenkeel.placement.plan_text import PlanText
from evenkeel.placement.report import Report, make_report
from evenkeel.plan_requests import DEFAULT_RESERVE
from evenkeel.planner_client import PlannerClient
from trainer_client.checks import is_whole
from trainer_client.planning.applying import dynamicemb_constraints, parameter_constraints, sharding_plan
from trainer_client.planning.clock import run_race
from trainer_client.planning.collective import all_or_none, from_first, group_size, in_group, process_group
from trainer_client.planning.describe import (
    describe_model,
    embedding_modules,
    in_short,
    module_configs,
    naming,
)
from trainer_client.planning.machine import find_machines
from trainer_client.planning.statistics import KeyStatistics, Observed, observe
from trainer_client.planning.trial import drawn_batches

if TYPE_CHECKING:
    from torchrec.distributed.types import ShardingPlan

_OPTIMIZERS = {
    "SGD": Optimizer.SGD,
    "Adam": Optimizer.ADAM,
    "AdamW": Optimizer.ADAM,
    "Adagrad": Optimizer.ADAGRAD,
    "RowWiseAdagrad": Optimizer.ROWWISE_ADAGRAD,
}
_DENSE_COPIES = 4
"""Of the dense parameters: themselves, their gradients and two moments of Adam."""
_DENSE_PARAMETERS = "an optimizer of in_backward_optimizer_filter(parallel.named_parameters())"
"""What trains data-parallel tables: TorchRec forgets the optimizers that were applied to them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModel:
    """A model's plan, the same on all ranks. `print` shows plan and report.

    Attributes:
        request: What was planned for.
        plan: The plan.
        report: What each rank, host and table takes.
        sharding_plan: TorchRec's plan, for `DistributedModelParallel`; `None` for DynamicEmb.
        constraints: Constraints by table name, for the planner of TorchRec or of DynamicEmb; `None` where DynamicEmb is
            not installed.
        notes: What was assumed where nothing said it.
        measured: Plans that the clock has run; the plan is the quickest of them.
    """

    request: PlanRequest
    plan: Plan
    report: Report
    sharding_plan: ShardingPlan | None
    constraints: dict[str, Any] | None
    notes: tuple[str, ...]
    measured: tuple[MeasuredPlan, ...] = ()

    def save(self, path: str | Path) -> None:
        """Write the plan file, for `evenkeel plan` and `load_sharding_plan`.

        Raises:
            OSError: If it cannot be written.
        """
        Path(path).write_text(dumps(PlanFile(request=self.request, plan=self.plan, measured=self.measured)), "utf-8")

    def __str__(self) -> str:
        """Plan, report, what was measured, and notes."""
        lines = [*map(measured_line, self.measured), *(f"note: {note}" for note in self.notes)]
        return str(PlanText(self.plan, self.report)) + "".join(f"{line}\n" for line in lines)


def plan_model(
    model: nn.Module,
    batches: Iterable[Any] | KeyStatistics | None = None,
    *,
    samples_per_rank: int | None = None,
    ids_per_sample: Mapping[str, float] | None = None,
    access: Mapping[str, Access] | None = None,
    optimizer: Optimizer | None = None,
    runtime: Runtime = Runtime.TORCHREC,
    topology: Topology | str | None = None,
    hardware: str | HardwareProfile | None = None,
    dense_bytes: int | None = None,
    reserve: float = DEFAULT_RESERVE,
    prefetch_depth: int = 1,
    max_batches: int | None = None,
    clock: float | None = None,
    dense_ms: float | None = None,
    planner: PlannerClient | None = None,
    device: torch.device | str | None = None,
    group: dist.ProcessGroup | None = None,
    **tables: Any,
) -> PlannedModel:
    """Plan where the tables of a model live, from the model and its batches. Collective where there is a group.

    What is not said is found: tables, their modules and pooling in the model; optimizers where they are applied in
    backward; how often keys are looked up, and the size of a batch, in the batches; ranks in the process group; HBM,
    host memory and profile on this machine. Rank 0 plans, and all ranks get the same.

    Args:
        model: The model before it is sharded; its tables may be on the `meta` device.
        batches: Batches of this rank, in the order of training, with `KeyedJaggedTensor`s anywhere in them; or
            statistics that observed some. Ranks may give none, if only some read the data. Without any on all ranks,
            keys are assumed to be as `access` says, or Zipf.
        samples_per_rank: Samples of a batch on one rank, if other than in the largest of `batches` on any rank.
        ids_per_sample: Mean lookups of a sample by table name, where `batches` do not tell.
        access: Access statistics by table name, where `batches` do not tell.
        optimizer: Optimizer of tables to which none is applied in backward.
        runtime: The library that will hold the tables.
        topology: The machines: a whole `Topology`, taken as it is, or in short, such as `h200x8`.
        hardware: A profile, or the name of a built-in one.
        dense_bytes: HBM of a rank that everything but the tables takes, as measured by
            `torch.cuda.max_memory_allocated` of a step without tables. By default four times the parameters outside of
            tables (themselves, gradients and two moments), or what the process took so far where that is more.
        reserve: Part of the HBM that is left for activations and communication, on top of `dense_bytes`.
        prefetch_depth: Batches whose rows a cache holds at once.
        max_batches: Most batches to read on a rank; by default 200, or those of 16 steps where the job will have more
            ranks than plan for it.
        clock: Seconds for which each of the best few plans and of the trivial ones trains on all ranks, with the keys
            that were counted; the quickest is taken. Making their tables takes its time on top. None asks the model.
        dense_ms: Milliseconds of a step that the GPU works beside the tables. Where they are not known, the time of the
            tables' kernels decides.
        planner: Whom to ask; the planner that `EVENKEEL_PLANNER` names, or none, by default.
        device: Device of this rank; the current GPU by default, or the CPU where there is none.
        group: The ranks; all by default.
        tables: Fields of `evenkeel.placement.Table` that all tables share, such as `modes`.

    Returns:
        The plan, as TorchRec or DynamicEmb takes it, and its report.

    Raises:
        InvalidInputError: If nothing fits, there is no table or no `KeyedJaggedTensor` in a batch, or a value cannot
            be used, or models differ between ranks. All ranks raise it alike.
        PlannerError: If the service refused or could not be reached, on rank 0; the other ranks raise `RuntimeError`.
    """
    _check_models(model, group)

    def settle() -> tuple[torch.device, int]:
        if max_batches is not None and (not is_whole(max_batches) or max_batches < 1):
            raise InvalidInputError("max_batches", max_batches, "is no number of batches", "use 1 or more")
        return _device(device), _ranks(topology, group)

    place, ranks = all_or_none(settle, group)
    observed = observe(
        model,
        batches,
        ranks=ranks,
        most=max_batches,
        samples=samples_per_rank,
        known=access or (),
        group=group,
    )
    samples = observed.samples if samples_per_rank is None else samples_per_rank

    def make() -> tuple[PlanRequest, Plan, tuple[str, ...]]:
        described, notes = _describe(model, optimizer, ids_per_sample, access, observed, tables)
        reserved = _dense_bytes(model, place) if dense_bytes is None else dense_bytes
        machines, profile, assumed = find_machines(
            topology=topology,
            hardware=hardware,
            device=place,
            group=group,
            reserved_bytes=reserved,
            reserved_fraction=reserve,
        )
        with naming(described):
            request = PlanRequest(
                tables=described,
                topology=machines,
                hardware=profile,
                runtime=runtime,
                step=Step(
                    samples_per_rank=Step().samples_per_rank if samples is None else samples,
                    prefetch_depth=prefetch_depth,
                    dense_ms=dense_ms,
                ),
            )
            if observed.traces:
                request, curves = with_statistics(request, observed.traces)
                moving = [name for name, curve in curves.items() if curve.is_drifting]
                if moving:
                    notes += (f"popular keys of {in_short(moving)} changed while they were observed: the plan may age",)
            notes += assumed
            if samples is None:
                notes += (f"samples of a batch on one rank are assumed to be {request.step.samples_per_rank}",)
            if in_group():
                given, there = request.topology.ranks, group_size(group)
                remedy = "leave topology out, or plan in a program without a process group"
                require(given == there, "topology.ranks", given, f"is not that of the group, which has {there}", remedy)
            plan = (planner or PlannerClient.from_env()).plan(request)
        dense = [placed.table for placed in plan.placements if placed.sharding is Sharding.DATA_PARALLEL]
        if dense:
            notes += (f"{in_short(dense)}: data-parallel, so not trained in backward, but by {_DENSE_PARAMETERS}",)
        return request, plan, notes

    request, plan, notes = from_first(make, group)
    measured: tuple[MeasuredPlan, ...] = ()
    if clock is not None:
        with process_group(place):
            drawn = drawn_batches(request, traces=observed.traces, seed=dist.get_rank(group))
            plan, measured = run_race(request, plan, drawn, place, seconds=clock, group=group)
    whole, constraints = None, None
    if request.runtime is Runtime.TORCHREC:
        ahead = device is None and not in_group() and request.topology.hbm_bytes > 0
        whole = all_or_none(lambda: sharding_plan(model, request, plan, device="cuda" if ahead else place.type), group)
        constraints = parameter_constraints(request, plan)
    else:
        try:
            constraints = dynamicemb_constraints(request, plan)
        except ModuleNotFoundError:
            notes += ("DynamicEmb is not installed here: evenkeel plan --code prints its constraints",)
    report = make_report(request, plan)
    assert report is not None, "a plan without placements was refused"
    return PlannedModel(
        request=request,
        plan=plan,
        report=report,
        sharding_plan=whole,
        constraints=constraints,
        notes=notes,
        measured=measured,
    )


def _check_models(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Raises on all ranks where the tables of a rank are not those of rank 0."""
    described = {
        config.name: f"{config.num_embeddings} by {config.embedding_dim} in {path!r}, of {config.feature_names}"
        for path, module in embedding_modules(model)
        for config in module_configs(module)
    }
    first, lacking = from_first(lambda: described, group), "no such table"

    def compare() -> None:
        for name in sorted(first.keys() | described.keys()):
            if first.get(name) != described.get(name):
                rank, theirs = dist.get_rank(group), first.get(name, lacking)
                what = f"of rank {rank} of the group is not that of rank 0, which has {theirs}"
                raise InvalidInputError(name, described.get(name, lacking), what, "give all ranks the same model")

    all_or_none(compare, group)


def _ranks(topology: Topology | str | None, group: dist.ProcessGroup | None) -> int:
    machines = parse_topology(topology)[1] if isinstance(topology, str) else topology
    return group_size(group) if machines is None else machines.ranks


def _device(device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _describe(
    model: nn.Module,
    optimizer: Optimizer | None,
    ids_per_sample: Mapping[str, float] | None,
    access: Mapping[str, Access] | None,
    observed: Observed,
    same: dict[str, Any],
) -> tuple[tuple[Table, ...], tuple[str, ...]]:
    """The tables of the model with their optimizers, and what was assumed."""
    assumed = optimizer or Optimizer.ADAM
    tables = describe_model(model, optimizer=assumed, ids_per_sample=ids_per_sample, access=access, **same)
    if not tables:
        remedy = "give the model before it is sharded, with its EmbeddingBagCollection or EmbeddingCollection in it"
        raise InvalidInputError("model", type(model).__name__, "has no embedding collection of TorchRec", remedy)
    applied = _applied_optimizers(model)
    unknown = [table.name for table in tables if table.name not in applied]
    notes: tuple[str, ...] = ()
    if unknown and optimizer is None:
        notes += (f"the optimizer of {in_short(unknown)} is assumed to be adam: no other takes more memory",)
    notes += observed.notes
    if blind := [table.name for table in tables if table.name not in observed.traces.keys() | (access or {}).keys()]:
        notes += (f"nothing tells how keys of {in_short(blind)} are looked up: Zipf with exponent 1.05 is assumed",)
    return tuple(replace(table, optimizer=applied.get(table.name, assumed)) for table in tables), notes


def _applied_optimizers(model: nn.Module) -> dict[str, Optimizer]:
    """Optimizers that `apply_optimizer_in_backward` gave to tables, by table name."""
    result = {}
    for _, module in embedding_modules(model):
        parameters = dict(module.named_parameters())
        for config in module_configs(module):
            of_table = [parameter for path, parameter in parameters.items() if f".{config.name}." in f".{path}"]
            for kind in [kind for parameter in of_table for kind in getattr(parameter, "_optimizer_classes", ())]:
                if kind.__name__ not in _OPTIMIZERS:
                    remedy = f"use one of: {', '.join(_OPTIMIZERS)}"
                    raise InvalidInputError(f"{config.name}.optimizer", kind.__name__, "is not planned for", remedy)
                result[config.name] = _OPTIMIZERS[kind.__name__]
    return result


def _dense_bytes(model: nn.Module, device: torch.device) -> int:
    """HBM of everything but the tables: an estimate, or what was in use at most where that is more."""
    tables = {id(parameter): parameter for _, module in embedding_modules(model) for parameter in module.parameters()}
    dense = [parameter for parameter in model.parameters() if id(parameter) not in tables]
    estimate = _DENSE_COPIES * _size(dense) + _size(model.buffers())
    if device.type != "cuda":
        return estimate
    there = _size(parameter for parameter in tables.values() if parameter.device == device)
    return max(estimate, int(torch.cuda.max_memory_allocated(device)) - there)


def _size(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class TorchRecPlanner:
    """`plan_model` with the methods of TorchRec's planners and, for TorchRec 1.9, of its `PlannerExecutor`.

        plan = TorchRecPlanner(batches).collective_plan(model, sharders, group)
        results = ProductionPlannerOrchestrator(TorchRecPlanner(batches), sku="H100").plan(request, context)

    Attributes:
        planned: All about the latest plan; None before there is one.
    """

    def __init__(self, batches: Iterable[Any] | KeyStatistics | None = None, **options: Any) -> None:
        """Nothing is planned yet.

        Args:
            batches: As for `plan_model`.
            options: Its others, such as `clock` and `sharding`.
        """
        self._batches, self._options = batches, options
        self.planned: PlannedModel | None = None

    def plan(self, module: nn.Module, sharders: Sequence[Any] | None = None) -> ShardingPlan:
        """The plan of a model's tables. Where there is a process group, all ranks call it together.

        Args:
            module: The model before it is sharded.
            sharders: Not looked at: what they do not shard, they leave as it is.

        Raises:
            InvalidInputError: As `plan_model`.
        """
        return self.collective_plan(module, sharders)

    def collective_plan(
        self,
        module: nn.Module,
        sharders: Sequence[Any] | None = None,  # noqa: ARG002  (of TorchRec's protocol)
        pg: dist.ProcessGroup | None = None,
    ) -> ShardingPlan:
        """The same, of the ranks of a group, by default of all."""
        self.planned = plan_model(module, self._batches, **{"group": pg} | self._options)
        plan = self.planned.sharding_plan
        if plan is None:
            runtime = self.planned.request.runtime.value
            raise InvalidInputError("runtime", runtime, "has no sharding plan", "leave it out: TorchRec asks")
        return plan

    def run(self, sku: str, ctx: Any, pg: dist.ProcessGroup | None = None) -> Any:
        """TorchRec's `ShardingPlanResult` for a `PlannerSessionContext`, whether there is a plan or not.

        Args:
            sku: The GPUs; a profile's name where no process group has any, such as `H100`.
            ctx: Its request names the model, ranks, and samples of a batch on a rank.
            pg: The ranks that plan together; without, the plan is for the ranks of the request.
        """
        from torchrec.distributed.planner.types import ShardingPlanResult

        request, (hbm_bytes, host_bytes), plan, why = ctx.request, (0, 0), None, None
        model = request.model if isinstance(request.model, nn.Module) else request.model()
        ahead = {"topology": f"{sku.lower()}x{request.world_size}"} if pg is None else {}
        planner = TorchRecPlanner(self._batches, **{"samples_per_rank": request.batch_size} | ahead | self._options)
        try:
            plan = planner.collective_plan(model, request.sharders, pg)
        except InvalidInputError as error:
            why = str(error)
        self.planned = planner.planned
        if plan is not None and self.planned is not None:
            report = self.planned.report
            hbm_bytes = max(part.hbm_bytes for part in report.ranks)
            host_bytes = max((part.host_bytes // max(1, part.ranks) for part in report.hosts), default=0)
        return ShardingPlanResult(
            sku=sku,
            success=why is None,
            sharding_plan=plan,
            planner_failure_reason=why,
            estimated_max_hbm_bytes=hbm_bytes,
            estimated_max_ddr_bytes=host_bytes,
            request_hash=request.request_hash,
            request_id=request.request_id,
        )
