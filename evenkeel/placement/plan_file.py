"""Plans as text: a request and its plan in one versioned JSON document, lossless both ways."""

from __future__ import annotations

import json
from dataclasses import dataclass

from evenkeel.placement.codec import decode, encode
from evenkeel.placement.invalid_input import InvalidInputError, require
from evenkeel.placement.measured_plans import MeasuredPlan
from evenkeel.placement.plan import Plan
from evenkeel.placement.request import PlanRequest

FORMAT = "evenkeel-plan"
VERSION = 1


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
        InvalidInputError: If it is no plan file, of another version, or a field is wrong.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(
            "plan file", text[:40], f"is no JSON ({error})", "write one with evenkeel plan"
        ) from None
    require(isinstance(value, dict), "plan file", text[:40], "is no object", "write one with evenkeel plan")
    kind, version = value.pop("format", None), value.pop("version", None)
    require(kind == FORMAT, "format", kind, "is no plan file", f"give a file with format {FORMAT!r}")
    require(version == VERSION, "version", version, "is of another version", f"this one reads version {VERSION}")
    return decode(PlanFile, value)
