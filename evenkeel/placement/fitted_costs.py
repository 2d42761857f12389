"""Constants of a runtime from measured steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from evenkeel.placement.hardware import HardwareProfile, RuntimeCosts
from evenkeel.placement.invalid_input import require
from evenkeel.placement.model import Mode
from evenkeel.placement.timing import RankLoad, fixed_seconds, mode_seconds

FloatArray = npt.NDArray[np.float64]

PRIOR = RuntimeCosts(
    hbm_fixed_s=1e-3, caching_fixed_s=2e-3, host_fixed_s=2e-3, miss_factor=1.5, contention_rows=3.0, hybrid_hit=0.1
)
"""Where a fit starts, and what it keeps of what the measurements do not tell: round figures, a cache or host memory
launching about twice what HBM alone does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The steady-state time of a step of one module.

    Attributes:
        mode: Mode of the module.
        ratio: Fraction of the rows in HBM.
        seconds: Forward and backward of one step.
        loads: What the step asks of each table of the module on this rank.
        cache_rows: Rows of each table that HBM holds.
    """

    mode: Mode
    ratio: float
    seconds: float
    loads: tuple[RankLoad, ...]
    cache_rows: tuple[float, ...]


def predict_seconds(profile: HardwareProfile, costs: RuntimeCosts, measurement: Measurement) -> float:
    """What the model says of the step that `measurement` measured."""
    total = fixed_seconds(costs, measurement.mode)
    ratio = np.array([measurement.ratio])
    for load, rows in zip(measurement.loads, measurement.cache_rows, strict=True):
        total += float(mode_seconds(profile, costs, load, measurement.mode, ratio, np.array([rows]))[0])
    return total


def fit_costs(
    profile: HardwareProfile,
    measurements: Sequence[Measurement],
    prior: RuntimeCosts = PRIOR,
    *,
    scale_host: bool = False,
    weight: float = 0.15,
) -> RuntimeCosts:
    """The constants that predict `measurements` best, by relative error, none of them far from `prior` for nothing.

    Modes share launches and index, so what is expected beforehand are ratios: the fixed costs of CACHING and of tables
    in host memory over that of HBM_ONLY as in `prior`, and the factors of a row as they are there. Each costs the fit
    what it is off by, `weight` times as much as a measurement that is off by the same factor: measurements decide
    where they tell anything, and the rest follows. What no measurement bears on keeps its ratio to the others.

    Args:
        profile: The machine.
        measurements: Measured steps.
        prior: What is expected.
        scale_host: Whether tables in host memory cost a factor on their rows instead of a fixed time of their own.
        weight: Weight of what is expected.

    Raises:
        InvalidInputError: If there is no measurement, or one is not positive.
    """
    require(len(measurements) > 0, "measurements", 0, "are none", "measure at least one mode")
    for index, measurement in enumerate(measurements):
        ok = math.isfinite(measurement.seconds) and measurement.seconds > 0
        require(ok, f"measurements[{index}].seconds", measurement.seconds, "is no time", "give a positive number")
    factors = ["miss_factor", "contention_rows", "hybrid_hit", *(["host_factor"] if scale_host else [])]
    ratios = ["caching_fixed_s", *([] if scale_host else ["host_fixed_s"])]
    launch = max(prior.hbm_fixed_s, 1e-9)
    expected = np.log([launch, *(max(getattr(prior, n), 1e-9) / launch for n in ratios)])
    expected = np.append(expected, np.log([max(getattr(prior, name), 1e-9) for name in factors]))
    # How fast the machine launches is what the measurements are for.
    weights = np.array([0.1 * weight] + [weight] * (len(expected) - 1))

    def costs_of(logs: FloatArray) -> RuntimeCosts:
        fixed, *others = np.exp(logs).tolist()
        values = {"hbm_fixed_s": fixed}
        values |= {name: fixed * value for name, value in zip(ratios, others, strict=False)}
        values |= dict(zip(factors, others[len(ratios) :], strict=True))
        if scale_host:
            values["host_fixed_s"] = fixed
        return replace(prior, **values)

    def residuals(logs: FloatArray) -> FloatArray:
        costs = costs_of(logs)
        errors = [math.log(predict_seconds(profile, costs, m) / m.seconds) for m in measurements]
        return np.concatenate([errors, weights * (logs - expected)])

    upper = np.log([10.0, *([1e3] * len(ratios)), *(1.0 if name == "hybrid_hit" else 1e3 for name in factors)])
    lower = np.full(len(expected), np.log(1e-9))
    lower[1 : 1 + len(ratios)] = 0.0  # nothing launches less than HBM alone: few keys are no reason to leave it
    start = np.clip(expected, lower + 1e-6, upper - 1e-6)
    fit = least_squares(residuals, start, bounds=(lower, upper), x_scale=1.0)
    return costs_of(fit.x)
