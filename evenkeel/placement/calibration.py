"""What was measured on a machine, and its hardware profile: fitted to steps, or corrected by plans that were run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, TypeVar, cast

import numpy as np
from scipy.optimize import least_squares

from evenkeel.placement.access import Access, FloatArray, power_law
from evenkeel.placement.fields import Checked, Length, Range, Share, decode, require
from evenkeel.placement.hardware import HardwareProfile, Runtime, RuntimeCosts, StepCosts, profile_of
from evenkeel.placement.options import RankLoad, fixed_seconds, mode_seconds
from evenkeel.placement.plan_file import MOST_MEASURED, MeasuredPlan
from evenkeel.placement.planner import plan
from evenkeel.placement.request import (
    MAX_DIM,
    MAX_RANKS,
    MAX_ROWS,
    Mode,
    Optimizer,
    PlanRequest,
    Sharding,
    Step,
    Table,
    Topology,
)
from evenkeel.placement.whole_step import StepWork, exchange_kernel_seconds, measured_costs, seconds_of, step_work

T = TypeVar("T")

EXPONENT = 1.05
"""Of the power law of keys in steps that are measured."""
_PRIOR_WEIGHT = 0.03
_OF_ANOTHER_GPU, _OF_THIS_GPU = 0.15, 2.0
"""What it costs a fit to leave a prior of round figures or of another GPU, and that of the same kind of GPU. The latter
was fitted to more shapes than `evenkeel calibrate` measures, each of which is off by as much as machines differ."""
_CORRECTION_WEIGHT = 0.3
"""Of the expectation that the profile is right, beside a plan that was run."""
_FARTHEST = 10.0
"""A correction is at most this factor either way: a figure that is further off was taken of something else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep(Checked):
    """A step of a module of equal tables on one GPU, as `trainer_client.planning.measuring` writes it.

    Attributes:
        mode: Mode of the tables.
        ratio: Fraction of the rows in HBM.
        seconds: Forward and backward, in steady state.
        tables: Number of tables.
        rows: Rows of a table.
        dim: Width of an embedding.
        ids: Lookups of a table and step, from a power law of exponent 1.05 unless `access` says otherwise.
        optimizer: Optimizer of the tables.
        access: Access statistics, where the keys were others.
    """

    mode: Mode
    ratio: Share
    seconds: Annotated[float, Range(0, 3600, above=True)]
    tables: int
    rows: int
    dim: int
    ids: int
    optimizer: Optimizer = Optimizer.ADAM
    access: Access | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TablePart(Checked):
    """Equal tables of a step.

    Attributes:
        count: Number of tables.
        rows: Rows of each.
        mode: Their mode.
        ratio: Fraction of the rows in HBM, of a cached table.
        dim: Width of an embedding.
        ids: Lookups of a sample and table, from a power law of exponent 1.05.
        pooled: Whether lookups of a sample are added up.
        sharding: How they are spread over the ranks.
    """

    count: Annotated[int, Range(1, 10_000)]
    rows: Annotated[int, Range(1, MAX_ROWS)]
    mode: Mode = Mode.HBM_ONLY
    ratio: float = 0.0
    dim: Annotated[int, Range(1, MAX_DIM)] = 128
    ids: Annotated[int, Range(1, 1_000_000)] = 1
    pooled: bool = True
    sharding: Sharding = Sharding.ROW_WISE


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSample(Checked):
    """A step that is measured: pooled tables are in one module, those of sequences in another.

    Attributes:
        name: What it is called.
        samples: Samples of a batch on a rank.
        parts: Its tables.
        optimizer: Fused optimizer of all tables.
        ranks: Ranks that it was measured on.
        seconds: Forward and backward of one step, in steady state; 0 where it is not measured yet.
        kernels_s: Its kernels alone, exchanges apart; None where they are not known.
    """

    name: Annotated[str, Length(1, 512)]
    samples: Annotated[int, Range(1, 10**9)]
    parts: Annotated[tuple[TablePart, ...], Length(1, 1_000)]
    optimizer: Optimizer = Optimizer.ROWWISE_ADAGRAD
    ranks: Annotated[int, Range(1, MAX_RANKS)] = 2
    seconds: Annotated[float, Range(0, 3600)] = 0.0
    kernels_s: Annotated[float, Range(0, 3600)] | None = None


def request_of(sample: StepSample, hardware: str | HardwareProfile = "h200") -> PlanRequest:
    """The request that describes the step, every table pinned to its mode."""
    tables = [
        Table(
            name=f"t{number}_{index}",
            rows=part.rows,
            dim=part.dim,
            ids_per_sample=float(part.ids),
            optimizer=sample.optimizer,
            access=power_law(EXPONENT, part.rows),
            pooled=part.pooled,
            group="bags" if part.pooled else "rows",
            sharding=part.sharding,
            modes=(part.mode,),
            ratio=part.ratio if part.mode is Mode.CACHING else None,
        )
        for number, part in enumerate(sample.parts)
        for index in range(part.count)
    ]
    return PlanRequest(
        tables=tuple(tables),
        topology=Topology(ranks=sample.ranks, hbm_bytes=1 << 45, host_bytes=None),
        hardware=hardware,
        runtime=Runtime.TORCHREC,
        step=Step(samples_per_rank=sample.samples),
    )


def measured_steps(records: Sequence[Any]) -> tuple[MeasuredStep, ...]:
    """Steps from raw records, whose other fields are ignored."""
    return _read(MeasuredStep, records, "steps")


def measured_samples(records: Sequence[Any]) -> tuple[StepSample, ...]:
    """Whole steps from raw records, whose other fields are ignored."""
    samples = _read(StepSample, records, "whole_steps")
    for index, sample in enumerate(samples):
        field = f"whole_steps[{index}].seconds"
        require(sample.seconds > 0, field, sample.seconds, "is none", "give a positive number")
    return samples


def _read(kind: type[T], records: Sequence[Any], where: str) -> tuple[T, ...]:
    known, found = {field.name for field in fields(cast(Any, kind))}, []
    for index, record in enumerate(records):
        each = f"{where}[{index}]"
        require(isinstance(record, dict), each, record, "is no object", "give the fields of a step")
        found.append(decode(kind, {name: value for name, value in record.items() if name in known}, each))
    return tuple(found)


def fit_step_costs(samples: Sequence[tuple[StepWork, float, float]], prior: StepCosts) -> StepCosts:
    """The costs that predict measured steps best, by relative error; what they do not tell stays near `prior`.

    Args:
        samples: What each step consisted of, its seconds, and those of its kernels alone; 0 where they are not known.
            Without them steps that wait for the host tell little of what the GPU does.
        prior: What is expected.
    """
    names = [field.name for field in fields(StepCosts)]
    scale = np.array([5e-4, 3e-3, 1e-5, 5e-4, 5e-4, 3e-4, 3.0])
    start = np.array([getattr(prior, name) for name in names]) / scale

    def costs_of(x: Any) -> StepCosts:
        return replace(prior, **dict(zip(names, (x * scale).tolist(), strict=True)))

    def residuals(x: Any) -> Any:
        costs = costs_of(x)
        pairs = [(seconds_of(work, costs), seconds) for work, seconds, _ in samples]
        pairs += [(work.kernels + exchange_kernel_seconds(work, costs), alone) for work, _, alone in samples if alone]
        errors = [math.log(max(predicted, 1e-12) / seconds) for predicted, seconds in pairs]
        return np.concatenate([errors, _PRIOR_WEIGHT * (x - start)])

    found = least_squares(residuals, np.maximum(start, 1e-3), bounds=(0.0, 1e3), loss="soft_l1", f_scale=0.1)
    return costs_of(found.x)


def with_whole_steps(
    profile: HardwareProfile, samples: Sequence[StepSample]
) -> tuple[HardwareProfile, tuple[tuple[StepSample, float], ...]]:
    """The profile with what TorchRec's steps take beside their tables, fitted to samples, all on as many ranks.

    Beside it the samples with the seconds that it predicts for each.
    """
    asked = [request_of(sample, profile) for sample in samples]
    plans = [plan(request) for request in asked]
    works = [step_work(*each) for each in zip(asked, plans, strict=True)]
    alone = samples[0].ranks == 1  # elsewhere the tables' time has exchanges in it
    kernels = [(sample.kernels_s or 0.0) if alone else 0.0 for sample in samples]
    measured = list(zip(works, [sample.seconds for sample in samples], kernels, strict=True))
    costs = fit_step_costs(measured, measured_costs(one_rank=alone))
    known = profile.costs(Runtime.TORCHREC)
    torchrec = replace(known, step_one_rank=costs) if alone else replace(known, step=costs)
    fitted = replace(profile, runtimes={**profile.runtimes, Runtime.TORCHREC.value: torchrec})
    predicted = [seconds_of(work, costs) for work in works]
    return fitted, tuple(zip(samples, predicted, strict=True))


def calibrated_profile(
    base: HardwareProfile, raw: dict[str, Any], name: str, steps: dict[Runtime, Sequence[MeasuredStep]]
) -> tuple[HardwareProfile, dict[Runtime, tuple[tuple[MeasuredStep, float], ...]]]:
    """A profile from what `trainer_client.planning.measuring.measure` returned, with constants fitted to steps.

    All that was not measured is as in `base`. Beside it, by runtime, the steps with the seconds that it predicts.

    Raises:
        InvalidInputError: If the measurements are incomplete or impossible.
    """
    for field in ("hbm_gather", "host_gather", "device", "date"):
        require(field in raw, field, None, "is missing", "give the output of the measurement")
    measured = [f"gathers measured with torch {raw.get('torch', '?')}"]
    measured += [f"{runtime.value} fitted to {len(own)} measured steps" for runtime, own in steps.items() if own]
    kept = [key for key in base.runtimes if not steps.get(Runtime(key))]
    if kept:
        measured.append(f"{', '.join(kept)} as in profile {base.name}")
    profile = replace(
        base,
        name=name,
        device=str(raw["device"]),
        date=str(raw["date"]),
        source=f"evenkeel calibrate: {'; '.join(measured)}; network as in profile {base.name}",
        hbm_bytes=int(raw.get("hbm_bytes") or base.hbm_bytes),
        hbm_gather=_reached(raw["hbm_gather"], base.hbm_gather),
        host_gather=tuple((float(width), float(rate)) for width, rate in raw["host_gather"]),
    )
    runtimes, errors = dict(profile.runtimes), {}
    weight = _OF_THIS_GPU if profile_of(profile.device) == base.name else _OF_ANOTHER_GPU
    for runtime, own in steps.items():
        if own:
            runtimes[runtime.value], errors[runtime] = fit_runtime(profile, runtime, own, weight=weight)
    return replace(profile, runtimes=runtimes), errors


def _reached(
    measured: Sequence[Sequence[float]], base: Sequence[tuple[float, float]]
) -> tuple[tuple[float, float], ...]:
    """Rates of gathers from HBM that kernels of embeddings reach, by row bytes.

    PyTorch's own gather, which was measured, is bound by its work for each row where rows are narrow, and tells a third
    of what FBGEMM's and DynamicEmb's kernels reach there. So the widest row tells the memory's rate, and `base` how it
    falls with narrower ones.
    """
    widths, rates = zip(*base, strict=True)
    widest, most = max((width, rate) for width, rate in measured)
    scale = most / np.interp(widest, widths, rates)
    return tuple((float(width), float(max(rate, scale * np.interp(width, widths, rates)))) for width, rate in measured)


def predictor(profile: HardwareProfile, runtime: Runtime, step: MeasuredStep) -> Callable[[RuntimeCosts], float]:
    """What the model says of a measured step, by the constants of its runtime."""
    access = step.access or power_law(EXPONENT, step.rows)
    table = Table(name="table", rows=step.rows, dim=step.dim, optimizer=step.optimizer, access=access)
    request = PlanRequest(
        tables=(table,),
        topology=Topology(ranks=1, hbm_bytes=max(1, profile.hbm_bytes)),
        hardware=profile,
        runtime=runtime,
        step=Step(samples_per_rank=step.ids),
    )
    load, ratio = RankLoad(request, table), np.array([step.ratio])

    def seconds(costs: RuntimeCosts) -> float:
        of_rows = mode_seconds(load.but(costs=costs), step.mode, ratio, step.rows * ratio)
        return fixed_seconds(costs, step.mode) + step.tables * float(of_rows[0])

    return seconds


def fit_costs(
    profile: HardwareProfile,
    runtime: Runtime,
    steps: Sequence[MeasuredStep],
    prior: RuntimeCosts,
    *,
    weight: float = _OF_ANOTHER_GPU,
) -> RuntimeCosts:
    """The constants that predict `steps` best, by relative error, none of them far from `prior` for nothing.

    Modes share launches and index, so what is expected beforehand are ratios: the fixed costs of CACHING and of tables
    in host memory over that of HBM_ONLY as in `prior`, and the factors of a row as they are there. Each costs the fit
    what it is off by, `weight` times as much as a measurement that is off by the same factor: measurements decide
    where they tell anything, and the rest follows. What no measurement bears on keeps its ratio to the others. With
    TorchRec tables in host memory cost a factor on their rows instead of a fixed time of their own.
    """
    predicted, scale_host = [predictor(profile, runtime, step) for step in steps], runtime is Runtime.TORCHREC
    ratios = ["caching_fixed_s", *([] if scale_host else ["host_fixed_s"])]
    names = ["hbm_fixed_s", *ratios, "miss_factor", "contention_rows", "hybrid_hit"] + ["host_factor"] * scale_host
    launch, is_ratio = max(prior.hbm_fixed_s, 1e-9), np.isin(names, ratios)
    expected = np.log([max(getattr(prior, name), 1e-9) / (launch if name in ratios else 1) for name in names])
    # How fast the machine launches is what the measurements are for.
    weights = np.array([0.1 * weight] + [weight] * (len(expected) - 1))

    def costs_of(logs: FloatArray) -> RuntimeCosts:
        values = np.exp(logs)
        values[is_ratio] *= values[0]
        found: dict[str, Any] = dict(zip(names, values.tolist(), strict=True))
        return replace(prior, **({"host_fixed_s": found["hbm_fixed_s"]} if scale_host else {}) | found)

    def residuals(logs: FloatArray) -> FloatArray:
        costs = costs_of(logs)
        errors = [math.log(seconds(costs) / step.seconds) for seconds, step in zip(predicted, steps, strict=True)]
        return np.concatenate([errors, weights * (logs - expected)])

    upper = np.log([{"hbm_fixed_s": 10.0, "hybrid_hit": 1.0}.get(name, 1e3) for name in names])
    # Nothing launches less than HBM alone: few keys are no reason to leave it.
    lower = np.where(is_ratio, 0.0, np.log(1e-9))
    start = np.clip(expected, lower + 1e-6, upper - 1e-6)
    fit = least_squares(residuals, start, bounds=(lower, upper), x_scale=1.0)
    return costs_of(fit.x)


def fit_runtime(
    profile: HardwareProfile, runtime: Runtime, steps: Sequence[MeasuredStep], *, weight: float = _OF_ANOTHER_GPU
) -> tuple[RuntimeCosts, tuple[tuple[MeasuredStep, float], ...]]:
    """Constants of `runtime` that predict `steps` best, and what they predict.

    Of steps whose time is that of their kernels, as TorchRec's are, what kernels take in every mode alike is of the
    exchanges; what they take more with a cache, whatever it misses, is of the lookups in it. The host's time for a
    module is not in them: it stays as it is known, and a cache is expected to have no more.
    """
    known, of_kernels = profile.costs(runtime), runtime is Runtime.TORCHREC
    prior = replace(known, caching_fixed_s=known.hbm_fixed_s) if of_kernels else known
    fitted = fit_costs(profile, runtime, steps, prior, weight=weight)
    predicted = tuple((step, predictor(profile, runtime, step)(fitted)) for step in steps)
    if of_kernels:
        cached = [step.tables * step.ids for step in steps if step.mode is Mode.CACHING]
        more = (fitted.caching_fixed_s - fitted.hbm_fixed_s) * len(cached) / sum(cached) if cached else 0.0
        host = {name: getattr(known, name) for name in ("hbm_fixed_s", "caching_fixed_s", "host_fixed_s")}
        fitted = replace(fitted, cache_lookup_s=known.cache_lookup_s + more, **host)
    return fitted, predicted


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
        return np.concatenate([np.log(parts @ np.exp(logs) / times), _CORRECTION_WEIGHT * logs])

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
