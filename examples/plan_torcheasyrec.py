"""A plan for the planner of TorchEasyRec: kernels, cache sizes and sharding types of its tables.

Nothing of TorchEasyRec is imported before `plan_training` is called.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from evenkeel.placement import InvalidInputError, Mode, Plan, PlanRequest, Runtime, Sharding
from evenkeel.placement.plan_file import loads
from trainer_client.planning.applying import parameter_constraints
from trainer_client.planning.describe import check_same, embedding_modules, module_configs
from trainer_client.planning.model import plan_model

_FIELD, _METHOD = "_fqn_constraints", "enumerate"


def plan_training(plan: str | Path | None = None, **options: Any) -> None:
    """Lets the training of `tzrec.main` in this process place its tables by a plan.

    Call it before `train_and_evaluate`. TorchEasyRec's planner still runs: it checks the memory of the plan by its own
    model, and chooses the ranks of shards that are not on all.

    Args:
        plan: A plan file, as `evenkeel plan --output` and `PlannedModel.save` write it. Without one, each job plans
            for itself when its model is there (`plan_model`), for TorchRec's tables.
        options: Arguments of `plan_model`, where there is no file.

    Raises:
        ModuleNotFoundError: If TorchEasyRec is not installed.
        OSError: If the file cannot be read.
        InvalidInputError: If it is no plan file. From `train_and_evaluate`: as for `apply_plan` and `plan_model`.
        ValueError: If options are given beside a file.
    """
    if plan is not None and options:
        raise ValueError(f"{', '.join(options)} given beside a plan file, which is made already; give one of them")
    content = None if plan is None else loads(Path(plan).read_text("utf-8"))
    main: Any = importlib.import_module("tzrec.main")
    theirs: Callable[..., Any] = inspect.unwrap(main.create_planner)
    arguments = inspect.signature(theirs)

    @functools.wraps(theirs)
    def create_planner(*args: Any, **kwargs: Any) -> Any:
        given = arguments.bind(*args, **kwargs)
        given.apply_defaults()
        planner, model = theirs(*args, **kwargs), given.arguments["model"]
        if content is not None:
            apply_plan(planner, model, content.request, content.plan)
            return planner
        made = plan_model(
            model, **{"samples_per_rank": given.arguments["batch_size"], "device": given.arguments["device"], **options}
        )
        apply_plan(planner, model, made.request, made.plan)
        return planner

    main.create_planner = create_planner


def apply_plan(planner: Any, model: nn.Module, request: PlanRequest, plan: Plan) -> None:
    """Constrains a planner of TorchEasyRec's `create_planner` to a plan; tables that are not in the plan stay free.

    A plan for TorchRec says sharding type, kernel and cache of each table; on CPUs a sharding type at most. A plan for
    DynamicEmb says for tables with `dynamicemb {…}` in their feature how much of them HBM holds, and whether as a
    cache; everything else stays as that says.

    Args:
        planner: Has not planned yet.
        model: The model that it will plan for.
        request: The request.
        plan: Its plan.

    Raises:
        InvalidInputError: If the plan has no placements, none of its tables is in the model or one is another there,
            or a table that DynamicEmb shall hold has no `dynamicemb {…}`.
    """
    enumerator = planner._enumerator
    places = _places(model, request)
    constraints: dict[str, Any] = dict(getattr(enumerator, _FIELD) or {})
    if plan.runtime is Runtime.TORCHREC:
        on_cpu = enumerator._compute_device == "cpu"
        for name, constraint in parameter_constraints(request, plan).items():
            if on_cpu:  # one memory, and TorchRec cuts no tables by rows there
                replicated = constraint.sharding_types == [Sharding.DATA_PARALLEL.value]
                constraint.compute_kernels, constraint.cache_params = ["dense" if replicated else "fused"], None
                if constraint.sharding_types == [Sharding.ROW_WISE.value]:
                    constraint.sharding_types = constraint.compute_kernels = None
            for place in places[name]:
                if getattr(constraints.get(place), "use_dynamicemb", False):
                    remedy = "plan it with runtime=dynamicemb, or take dynamicemb {…} out of its feature"
                    raise InvalidInputError(
                        name, "torchrec", "is planned for TorchRec, and DynamicEmb holds it", remedy
                    )
                constraints[place] = constraint
    else:
        cached: dict[str, bool] = {}
        for placed in plan.placements:
            for place in places[placed.table]:
                own: Any = constraints.get(place)
                if not getattr(own, "use_dynamicemb", False):
                    remedy = "put dynamicemb {…} into its feature, or plan it with runtime=torchrec"
                    raise InvalidInputError(placed.table, "dynamicemb", "has no dynamicemb {…} in its feature", remedy)
                own.cache_params = _share(placed.ratio)
                cached[place] = placed.mode is Mode.CACHING
        _choose(enumerator, cached)
    setattr(enumerator, _FIELD, constraints)


def _places(model: nn.Module, request: PlanRequest) -> dict[str, list[str]]:
    """By table of the request, its names in the model: module paths, and the table's name there."""
    found: dict[str, list[str]] = {table.name: [] for table in request.tables}
    tables = {table.name: table for table in request.tables}
    for path, module in embedding_modules(model):
        for config in module_configs(module):
            if config.name not in found:
                continue
            check_same(config, tables[config.name])
            found[config.name].append(f"{path}.{config.name}")
    if not any(found.values()):
        remedy = "plan for this model: plan_training() without a file does"
        raise InvalidInputError("plan.tables", list(found)[:3], "are not in the model", remedy)
    return found


def _share(ratio: float) -> Any:
    from torchrec.distributed.types import CacheParams

    return CacheParams(load_factor=ratio)


def _choose(enumerator: Any, cached: dict[str, bool]) -> None:
    """Leaves, of the two options that its enumerator makes of such a table, the one with or without a cache."""
    theirs = getattr(enumerator, _METHOD)

    def enumerate_options(*args: Any, **kwargs: Any) -> list[Any]:
        def fits(option: Any) -> bool:
            wanted = cached.get(f"{option.path}.{option.name}")
            return wanted is None or bool(option.dynamicemb_options.caching) == wanted

        return [option for option in theirs(*args, **kwargs) if fits(option)]

    setattr(enumerator, _METHOD, enumerate_options)
