"""Plan files: a request, its plan and what plans took when they were run."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Annotated

from evenkeel.placement.fields import Checked, InvalidInputError, Length, Range, decode, encode, parse_json, require
from evenkeel.placement.plan import Plan
from evenkeel.placement.request import PlanRequest

FORMAT = "evenkeel-plan"
VERSION = 1
MOST_MEASURED = 64

Time = Annotated[float, Range(0, 3600)]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPlan(Checked):
    """A plan that was trained for some steps.

    Attributes:
        name: What it is: `plan`, or one of the plans that it was compared with.
        step_s: Median time of a step on the slowest rank, beside `dense_ms` of other work.
        kernels_s: Time of its kernels on the slowest rank, exchanges apart; None where there is no GPU.
        dense_ms: Time of the work that the GPU did beside the tables.
        predicted: Predicted seconds of its tables by mode.
        chosen: Whether it was the quickest.
    """

    name: Annotated[str, Length(1, 512)]
    step_s: Time
    kernels_s: Time | None = None
    dense_ms: Annotated[float, Range(0, 3.6e6)] = 0.0
    predicted: dict[str, float] = field(default_factory=dict)
    chosen: bool = False


def seconds_by_mode(plan: Plan) -> dict[str, float]:
    """Predicted seconds of the tables of a step, by their mode."""
    found: dict[str, float] = {}
    for part in plan.placements:
        found[part.mode.value] = found.get(part.mode.value, 0.0) + part.seconds
    return found


def measured_line(measured: MeasuredPlan) -> str:
    """What the clock says of a plan, in a line."""
    kernels = "" if measured.kernels_s is None else f", kernels {measured.kernels_s * 1e3:.3f}"
    mark = "*" if measured.chosen else " "
    return f"{mark} {measured.name:22} {measured.step_s * 1e3:8.3f} ms a step{kernels}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFile:
    """A request and the plan that was made for it.

    Attributes:
        request: The request.
        plan: Its plan.
        measured: Plans that were run, where the clock had the last word; the plan is the quickest of them.
    """

    request: PlanRequest
    plan: Plan
    measured: tuple[MeasuredPlan, ...] = ()


def dumps(content: PlanFile) -> str:
    """The text of a plan file."""
    return json.dumps({"format": FORMAT, "version": VERSION, **encode(content)}, indent=1, allow_nan=False) + "\n"


def loads(text: str) -> PlanFile:
    """A plan file from its text.

    Raises:
        InvalidInputError: If it is no plan file, of another version, or a field is wrong or there twice.
    """
    try:
        value = parse_json(text, "plan file")
    except InvalidInputError:
        raise
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(
            "plan file", text[:40], f"is no JSON ({error})", "write one with evenkeel plan"
        ) from None
    require(isinstance(value, dict), "plan file", text[:40], "is no object", "write one with evenkeel plan")
    kind, version = value.pop("format", None), value.pop("version", None)
    require(kind == FORMAT, "format", kind, "is no plan file", f"give a file with format {FORMAT!r}")
    require(version == VERSION, "version", version, "is of another version", f"this one reads version {VERSION}")
    return decode(PlanFile, value)
