"""Plan requests as people write them: short topologies, plan files, no field twice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from evenkeel.placement import InvalidInputError, PlanRequest, parse_topology
from evenkeel.placement.calibration import corrected_profile
from evenkeel.placement.fields import decode, encode, require
from evenkeel.placement.plan_file import FORMAT, MOST_MEASURED, MeasuredPlan

DEFAULT_RESERVE = 0.15
"""Part of the HBM of a topology given by name that is left for the model, as TorchRec's planner leaves it."""


def unpacked(
    content: object, *, topology: str | None = None, reserve: float = DEFAULT_RESERVE
) -> tuple[dict[str, Any], tuple[MeasuredPlan, ...]]:
    """The fields of a request, from a list of tables, a request or a plan file; what was measured in a plan file.

    Args:
        content: What was written, as plain values.
        topology: The machines in short, in place of those that the content has.
        reserve: Part of the HBM that is left for the model where the topology is given in short.

    Raises:
        InvalidInputError: If it is none of these, or a topology in short is not understood.
    """
    value: dict[str, Any] = {"tables": content} if isinstance(content, list) else dict(as_object("tables", content))
    measured: tuple[MeasuredPlan, ...] = ()
    if value.get("format") == FORMAT:  # its request is planned again
        listed = value.get("measured") or []
        require(isinstance(listed, list), "measured", listed, "is no list", "give a list, or leave it out")
        measured = tuple(decode(MeasuredPlan, one, f"measured[{n}]") for n, one in enumerate(listed[:MOST_MEASURED]))
        value = dict(as_object("request", value.get("request")))
    if isinstance(short := topology or value.get("topology"), str):
        name, machines = parse_topology(short)
        value["topology"] = encode(replace(machines, hbm_reserved_fraction=reserve))
        value.setdefault("hardware", name)
    return value, measured


def with_measured(request: PlanRequest, measured: tuple[MeasuredPlan, ...]) -> PlanRequest:
    """The request with its profile corrected by plans that were run on its machines."""
    if not measured:
        return request
    return replace(request, hardware=corrected_profile(request.profile, request.runtime, measured))


def as_object(field: str, content: object) -> Mapping[str, Any]:
    """The content, which must be an object.

    Raises:
        InvalidInputError: If it is none.
    """
    if not isinstance(content, Mapping):
        whole = field == "tables"
        what = "is neither a list nor an object" if whole else "is no object"
        raise InvalidInputError(field, content, what, "give a list of tables" if whole else "give its fields by name")
    return content
