"""Plan files: a request, its plan and what plans took when they were run; and what that says of a machine's profile."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

import numpy as np
from scipy.optimize import least_squares

from evenkeel.placement.access import FloatArray
from evenkeel.placement.fields import Checked, InvalidInputError, Length, Range, decode, encode, require
from evenkeel.placement.hardware import HardwareProfile, Runtime
from evenkeel.placement.plan import Plan
from evenkeel.placement.request import Mode, PlanRequest

FORMAT = "evenkeel-plan"
VERSION = 1
MOST_MEASURED = 64
_PRIOR = 0.3
"""Weight, beside a measured plan, of the expectation that the profile is right."""
_FARTHEST = 10.0
"""A correction is at most this factor either way: a figure that is further off was taken of something else."""

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


def correction_factors(measured: Sequence[MeasuredPlan]) -> dict[str, float]:
    """By mode, what the profile's seconds are to be multiplied by.

    Least squares over the logarithms of the factors: each measured plan should take what it took, and each factor
    should be one. Plans without kernels' time count by their whole step only where nothing else was measured.
    """
    timed = [(m, m.kernels_s) for m in measured if m.kernels_s] or [(m, m.step_s) for m in measured if m.step_s]
    modes = sorted({mode for m, _ in timed for mode, seconds in m.predicted.items() if seconds > 0})
    if not modes:
        return {}
    parts = np.array([[m.predicted.get(mode, 0.0) for mode in modes] for m, _ in timed])
    kept = parts.sum(axis=1) > 0
    parts, times = parts[kept], np.array([seconds for _, seconds in timed])[kept]
    farthest = np.log(_FARTHEST)

    def residuals(logs: FloatArray) -> FloatArray:
        return np.concatenate([np.log(parts @ np.exp(logs) / times), _PRIOR * logs])

    logs = least_squares(residuals, np.zeros(len(modes)), bounds=(-farthest, farthest)).x
    return dict(zip(modes, np.exp(logs).tolist(), strict=True))


def corrected_profile(profile: HardwareProfile, runtime: Runtime, measured: Sequence[MeasuredPlan]) -> HardwareProfile:
    """The profile with the constants of a runtime corrected by plans that it predicted and its machine has run."""
    factors = correction_factors(measured[:MOST_MEASURED])
    if not factors:
        return profile
    costs = profile.costs(runtime)
    hbm, host, cached = (factors.get(mode.value, 1.0) for mode in (Mode.HBM_ONLY, Mode.HOST_ONLY, Mode.CACHING))
    costs = replace(
        costs,
        hbm_gather=tuple((width, rate / hbm) for width, rate in costs.hbm_gather or profile.hbm_gather),
        host_factor=costs.host_factor * host,
        miss_factor=costs.miss_factor * cached,
    )
    return replace(profile, runtimes={**profile.runtimes, runtime.value: costs})


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
