"""From a model to a plan that runs, in one call."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from evenkeel.key_statistics import KeyTrace, with_statistics
from evenkeel.placement import (
    HardwareProfile,
    InvalidInputError,
    Optimizer,
    Plan,
    PlanRequest,
    Runtime,
    Step,
    Table,
    Topology,
    parse_topology,
)
from evenkeel.placement.access import Access
from evenkeel.placement.invalid_input import require
from evenkeel.placement.plan_file import PlanFile, dumps, loads
from evenkeel.placement.plan_text import PlanText
from evenkeel.placement.report import Report, make_report
from evenkeel.planner_client import PlannerClient
from trainer_client.checks import is_whole
from trainer_client.planning.applying import dynamicemb_constraints, parameter_constraints, sharding_plan
from trainer_client.planning.describe import describe_model, embedding_modules, module_configs, naming
from trainer_client.planning.machine import find_machines
from trainer_client.planning.statistics import KeyStatistics

if TYPE_CHECKING:
    from torchrec.distributed.types import ShardingPlan

T = TypeVar("T")

RESERVE = 0.15
"""Part of the HBM that is left for activations and communication, as TorchRec's planner leaves it."""
_OPTIMIZERS = {
    "SGD": Optimizer.SGD,
    "Adam": Optimizer.ADAM,
    "AdamW": Optimizer.ADAM,
    "Adagrad": Optimizer.ADAGRAD,
    "RowWiseAdagrad": Optimizer.ROWWISE_ADAGRAD,
}
_DENSE_COPIES = 4
"""Of the dense parameters: themselves, their gradients and two moments of Adam."""
_DEPTH = 6
_BATCHES, _STEPS = 200, 16
"""To observe: batches of each rank, and steps of all ranks of the job, at least."""


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
    """

    request: PlanRequest
    plan: Plan
    report: Report
    sharding_plan: ShardingPlan | None
    constraints: dict[str, Any] | None
    notes: tuple[str, ...]

    def save(self, path: str | Path) -> None:
        """Write the plan file, for `evenkeel plan` and `load_sharding_plan`.

        Raises:
            OSError: If it cannot be written.
        """
        Path(path).write_text(dumps(PlanFile(request=self.request, plan=self.plan)), "utf-8")

    def __str__(self) -> str:
        """Plan, report and notes."""
        return str(PlanText(self.plan, self.report)) + "".join(f"note: {note}\n" for note in self.notes)


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
    reserve: float = RESERVE,
    prefetch_depth: int = 1,
    max_batches: int | None = None,
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
            statistics that observed some. Without any, keys are assumed to be as `access` says, or Zipf.
        samples_per_rank: Samples of a batch on one rank, if other than in `batches`.
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
        planner: Whom to ask; the planner that `EVENKEEL_PLANNER` names, or none, by default.
        device: Device of this rank; the current GPU by default, or the CPU where there is none.
        group: The ranks; all by default.
        tables: Fields of `evenkeel.placement.Table` that all tables share, such as `modes`.

    Returns:
        The plan, as TorchRec or DynamicEmb takes it, and its report.

    Raises:
        InvalidInputError: If nothing fits, there is no table or no `KeyedJaggedTensor` in a batch, or a value cannot
            be used. All ranks raise it alike.
        PlannerError: If the service refused or could not be reached, on rank 0; the other ranks raise `RuntimeError`.
    """
    most = _batches_to_read(topology, group) if max_batches is None else max_batches
    if not is_whole(most) or most < 1:
        raise InvalidInputError("max_batches", max_batches, "is no number of batches", "use 1 or more")
    place = _device(device)
    statistics, seen = _all_or_none(lambda: _observe(model, batches, most), group)
    traces: dict[str, KeyTrace] = {} if statistics is None else statistics.gather(group)
    found: int | None = seen or _samples(traces, group) or None
    samples: int | None = found if samples_per_rank is None else _whole(samples_per_rank)

    def make() -> tuple[PlanFile, tuple[str, ...]]:
        described, notes = _describe(model, optimizer, ids_per_sample, access, traces, tables)
        dense = _dense_bytes(model, place) if dense_bytes is None else dense_bytes
        machines = find_machines(
            topology=topology,
            hardware=hardware,
            device=place,
            group=group,
            reserved_bytes=dense,
            reserved_fraction=reserve,
        )
        with naming(described):
            request = PlanRequest(
                tables=described,
                topology=machines.topology,
                hardware=machines.hardware,
                runtime=runtime,
                step=Step(
                    samples_per_rank=Step().samples_per_rank if samples is None else samples,
                    prefetch_depth=prefetch_depth,
                ),
            )
            if traces:
                request, _ = with_statistics(request, traces)
            notes += machines.notes
            if samples is None:
                notes += (f"samples of a batch on one rank are assumed to be {request.step.samples_per_rank}",)
            plan = (planner or PlannerClient.from_env()).plan(request)
        return PlanFile(request=request, plan=plan), notes

    content, notes = _same_on_all(make, group)
    request, plan = content.request, content.plan
    _check_ranks(request, group)
    whole, constraints = None, None
    if runtime is Runtime.TORCHREC:
        ahead = device is None and not _in_group() and request.topology.hbm_bytes > 0
        whole = sharding_plan(model, request, plan, device="cuda" if ahead else place.type)
        constraints = parameter_constraints(request, plan)
    else:
        try:
            constraints = dynamicemb_constraints(request, plan)
        except ModuleNotFoundError:
            notes += ("DynamicEmb is not installed here: evenkeel plan --code prints its constraints",)
    report = make_report(request, plan)
    assert report is not None, "a plan without placements was refused"
    return PlannedModel(
        request=request, plan=plan, report=report, sharding_plan=whole, constraints=constraints, notes=notes
    )


def _batches_to_read(topology: Topology | str | None, group: dist.ProcessGroup | None) -> int:
    """Batches of each rank here: so many, or those of so many steps of all ranks of the job."""
    here = dist.get_world_size(group) if _in_group() else 1
    machines = parse_topology(topology)[1] if isinstance(topology, str) else topology
    ranks = here if machines is None else machines.ranks
    return max(_BATCHES, -(-_STEPS * ranks // here))


def _device(device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _observe(
    model: nn.Module, batches: Iterable[Any] | KeyStatistics | None, most: int
) -> tuple[KeyStatistics | None, int]:
    """What batches tell of keys, and the samples of the largest one."""
    if batches is None or isinstance(batches, KeyStatistics):
        return batches, 0
    statistics, samples = KeyStatistics(model), 0
    for batch in itertools.islice(batches, most):
        found = list(_keyed_jagged(batch, _DEPTH))
        if not found:
            remedy = "give batches that hold one, or statistics: KeyStatistics, ids_per_sample and access"
            raise InvalidInputError("batches", type(batch).__name__, "holds no KeyedJaggedTensor", remedy)
        statistics.observe(*found)
        samples = max(samples, *(int(keys.stride()) for keys in found))
    if not samples:
        raise InvalidInputError("batches", 0, "has no batch", "give some hundred, or none at all")
    return statistics, samples


def _keyed_jagged(value: Any, depth: int) -> Iterator[Any]:
    """Every `KeyedJaggedTensor` in a batch, through containers, dataclasses and plain objects."""
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    if isinstance(value, KeyedJaggedTensor):
        yield value
        return
    if depth == 0 or isinstance(value, torch.Tensor | str | bytes):
        return
    parts: Iterable[Any] = ()
    if isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, list | tuple):
        parts = value
    elif is_dataclass(value):
        parts = [getattr(value, field.name) for field in fields(value)]
    elif hasattr(value, "__dict__"):
        parts = vars(value).values()
    for part in parts:
        yield from _keyed_jagged(part, depth - 1)


def _whole(value: float) -> Any:
    """4e8 is a whole number too; what is none is refused with the request."""
    return int(value) if float(value).is_integer() else value


def _samples(traces: Mapping[str, KeyTrace], group: dist.ProcessGroup | None) -> int:
    """Samples of a batch on one rank, as statistics of all ranks tell them."""
    ranks = dist.get_world_size(group) if _in_group() else 1
    steps = [trace.samples / trace.steps for trace in traces.values() if trace.steps]
    return round(max(steps) / ranks) if steps else 0


def _describe(
    model: nn.Module,
    optimizer: Optimizer | None,
    ids_per_sample: Mapping[str, float] | None,
    access: Mapping[str, Access] | None,
    traces: Mapping[str, KeyTrace],
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
        notes += (f"the optimizer of {_shown(unknown)} is assumed to be adam: no other takes more memory",)
    told = {name for name, trace in traces.items() if trace.steps} | set(access or ())
    blind = [table.name for table in tables if table.name not in told]
    if blind:
        notes += (f"nothing tells how keys of {_shown(blind)} are looked up: Zipf with exponent 1.05 is assumed",)
    return tuple(replace(table, optimizer=applied.get(table.name, assumed)) for table in tables), notes


def _shown(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more tables" if len(names) > 3 else "")


def _applied_optimizers(model: nn.Module) -> dict[str, Optimizer]:
    """Optimizers that `apply_optimizer_in_backward` gave to tables, by table name."""
    found = {}
    for _, module in embedding_modules(model):
        parameters = dict(module.named_parameters())
        for config in module_configs(module):
            own = [parameter for path, parameter in parameters.items() if f".{config.name}." in f".{path}"]
            for kind in {kind for parameter in own for kind in getattr(parameter, "_optimizer_classes", ())}:
                if kind.__name__ not in _OPTIMIZERS:
                    remedy = f"use one of: {', '.join(_OPTIMIZERS)}"
                    raise InvalidInputError(f"{config.name}.optimizer", kind.__name__, "is not planned for", remedy)
                found[config.name] = _OPTIMIZERS[kind.__name__]
    return found


def _dense_bytes(model: nn.Module, device: torch.device) -> int:
    """HBM of everything but the tables: an estimate, or what was in use at most where that is more."""
    tables = {id(parameter): parameter for _, module in embedding_modules(model) for parameter in module.parameters()}
    own = [parameter for parameter in model.parameters() if id(parameter) not in tables]
    estimate = _DENSE_COPIES * _size(own) + _size(model.buffers())
    if device.type != "cuda":
        return estimate
    there = _size(parameter for parameter in tables.values() if parameter.device == device)
    return max(estimate, int(torch.cuda.max_memory_allocated(device)) - there)


def _size(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _in_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def _all_or_none(make: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """What `make` gives on this rank; where it fails on one, all ranks raise."""
    if not _in_group():
        return make()
    failure: Exception | None = None
    try:
        made = make()
    except Exception as error:
        failure = error
    told: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, None if failure is None else _told(failure), group=group)
    if failure is not None:
        raise failure
    for rank, what in enumerate(told):
        if what is not None:
            raise _raised(what, rank)
    return made


def _same_on_all(
    make: Callable[[], tuple[PlanFile, tuple[str, ...]]], group: dist.ProcessGroup | None
) -> tuple[PlanFile, tuple[str, ...]]:
    """What rank 0 makes, or its error, on all ranks."""
    if not _in_group():
        return make()
    box: list[Any] = [None]
    failure: Exception | None = None
    if dist.get_rank(group) == 0:
        try:
            content, notes = make()
            box = [(dumps(content), notes)]
        except Exception as error:
            failure = error
            box = [_told(error)]
    dist.broadcast_object_list(box, group=group, group_src=0)
    if failure is not None:
        raise failure
    if not isinstance(box[0], tuple):
        raise _raised(box[0], 0)
    text, notes = box[0]
    return loads(text), notes


def _told(error: Exception) -> InvalidInputError | str:
    """An error as other ranks are told of it."""
    return error if isinstance(error, InvalidInputError) else f"{type(error).__name__}: {error}"


def _raised(told: InvalidInputError | str, rank: int) -> Exception:
    return told if isinstance(told, InvalidInputError) else RuntimeError(f"planning failed on rank {rank}: {told}")


def _check_ranks(request: PlanRequest, group: dist.ProcessGroup | None) -> None:
    if _in_group():
        ranks = dist.get_world_size(group)
        remedy = "leave topology out, or plan in a program without a process group"
        what = f"is not that of the group, which has {ranks}"
        require(request.topology.ranks == ranks, "topology.ranks", request.topology.ranks, what, remedy)
