"""A plan as DynamicEmb's options, as TorchRec's constraints, or as a complete sharding plan."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from evenkeel.placement import InvalidInputError, Plan, PlanRequest
from evenkeel.placement.application import (
    dynamicemb_lines,
    fused_params_lines,
    sharding_plan_module,
    torchrec_lines,
)
from evenkeel.placement.plan_file import loads
from trainer_client.planning.describe import check_same, embedding_modules, module_configs, naming

if TYPE_CHECKING:
    from torchrec.distributed.types import ShardingPlan


def _run(lines: Iterable[str], **names: Any) -> dict[str, Any]:
    """What lines make that could as well be pasted: a plan is written in one place."""
    exec("\n".join(lines), names)
    return names


def dynamicemb_constraints(request: PlanRequest, plan: Plan, **options: Any) -> dict[str, Any]:
    """`DynamicEmbParameterConstraints` by table name, to give to DynamicEmb's planner.

    Without DynamicEmb installed, use `evenkeel.placement.application.lines_to_paste` for source lines.

    Args:
        request: The request.
        plan: Its plan.
        options: Further arguments of every table's `DynamicEmbTableOptions`; they go before those of the plan.

    Raises:
        InvalidInputError: If the plan is for another runtime or for other tables.
        ModuleNotFoundError: If DynamicEmb is not installed.
    """
    result: dict[str, Any] = _run(dynamicemb_lines(request, plan, options), options=options)["constraints"]
    return result


def fused_params(request: PlanRequest) -> dict[str, Any]:
    """What the sharder of the tables is told: the optimizer, and whether batches are prefetched.

    The learning rate is yours to add. Where optimizers are applied in backward, nothing of this is needed.

    Raises:
        InvalidInputError: If tables have different optimizers: a sharder takes one.
    """
    used = list(dict.fromkeys(table.optimizer.value for table in request.tables))
    if len(used) > 1:
        remedy = "apply optimizers in backward, or give each optimizer's tables a sharder of their own"
        raise InvalidInputError("tables.optimizer", used, "differs between tables, and a sharder takes one", remedy)
    result: dict[str, Any] = _run(fused_params_lines(request))["fused_params"]
    return result


def parameter_constraints(request: PlanRequest, plan: Plan) -> dict[str, Any]:
    """`ParameterConstraints` by table name, for TorchRec's own planner.

    They say how each table is cut and stored. On which ranks shards are that are not on all, TorchRec's planner decides
    again: where that should stay as planned, use `sharding_plan`.

    Raises:
        InvalidInputError: If the plan is for another runtime or for other tables.
    """
    result: dict[str, Any] = _run(torchrec_lines(request, plan))["constraints"]
    return result


def sharding_plan(model: nn.Module, request: PlanRequest, plan: Plan, *, device: str = "cuda") -> ShardingPlan:
    """A complete `ShardingPlan` that `DistributedModelParallel` accepts, without TorchRec's planner.

    On `cpu` every sharded table is `fused`: there is no other memory to choose.

    Args:
        model: The model that the plan's tables are in, before sharding.
        request: The request.
        plan: Its plan.
        device: Type of the devices of the job.

    Raises:
        InvalidInputError: If the plan is for another runtime or other tables, or does not place a table of the model.
    """
    tables = {table.name: table for table in request.tables}
    paths: dict[str, str] = {}
    for path, module in embedding_modules(model):
        for config in module_configs(module):
            if config.name not in tables:
                remedy = "describe the whole model to the planner"
                raise InvalidInputError("plan", config.name, "does not place this table of the model", remedy)
            check_same(config, tables[config.name])
            paths[config.name] = path
    result: ShardingPlan = _run([sharding_plan_module(request, plan, "plan", paths=paths, device=device)])["plan"]
    return result


def load_sharding_plan(path: str | Path, model: nn.Module | None = None, *, device: str = "cuda") -> ShardingPlan:
    """The complete `ShardingPlan` of a plan file, as `evenkeel plan --output` writes it.

    Args:
        path: The plan file.
        model: The model before sharding, to check the plan against; without it, tables are where their `group` says.
        device: As for `sharding_plan`.

    Raises:
        OSError: If the file cannot be read.
        InvalidInputError: If it is no plan file, as for `sharding_plan`, or a table names no group and no model is
            given.
    """
    content = loads(Path(path).read_text("utf-8"))
    if model is not None:
        return sharding_plan(model, content.request, content.plan, device=device)
    with naming(content.request.tables):
        module = sharding_plan_module(content.request, content.plan, "plan", device=device)
    result: ShardingPlan = _run([module])["plan"]
    return result
