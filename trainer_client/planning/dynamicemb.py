"""A plan as DynamicEmb's options."""

from __future__ import annotations

import importlib
from typing import Any

from evenkeel.placement import Plan, PlanRequest
from evenkeel.placement.application import DynamicEmbOptions, dynamicemb_options


def dynamicemb_constraints(request: PlanRequest, plan: Plan, **options: Any) -> dict[str, Any]:
    """`DynamicEmbParameterConstraints` by table name, to give to DynamicEmb's planner.

    Without DynamicEmb installed, use `evenkeel.placement.application.dynamicemb_options` for the bare values, or
    `evenkeel.placement.application.lines_to_paste` for source lines.

    Args:
        request: The request.
        plan: Its plan.
        options: Further arguments of every table's `DynamicEmbTableOptions`.

    Raises:
        InvalidInputError: If the plan is for another runtime or for other tables.
        ModuleNotFoundError: If DynamicEmb is not installed.
    """
    library = importlib.import_module("dynamicemb")
    constraints = importlib.import_module("dynamicemb.planner").DynamicEmbParameterConstraints
    return {
        name: constraints(
            sharding_types=["row_wise"],
            use_dynamicemb=True,
            dynamicemb_options=_table_options(library, option, options),
        )
        for name, option in dynamicemb_options(request, plan).items()
    }


def _table_options(library: Any, option: DynamicEmbOptions, more: dict[str, Any]) -> Any:
    return library.DynamicEmbTableOptions(
        caching=option.caching,
        global_hbm_for_values=option.global_hbm_for_values,
        dist_type=option.dist_type,
        bucket_capacity=option.bucket_capacity,
        init_capacity=option.init_capacity,
        score_strategy=getattr(library.DynamicEmbScoreStrategy, option.score_strategy),
        **more,
    )
