"""How well the cost model predicts measured steps and memory of DynamicEmb, fitted on half of the measurements.

python -m benchmarks.placement_model --json benchmarks/results/placement_model.json
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table as RichTable

from benchmarks.harness.results import write
from evenkeel.placement.access import power_law
from evenkeel.placement.fitted_costs import Measurement, fit_costs, predict_seconds
from evenkeel.placement.hardware import RuntimeCosts, builtin_profile
from evenkeel.placement.model import Mode, Optimizer, Runtime, Step, Table, Topology
from evenkeel.placement.options import rank_load, table_options
from evenkeel.placement.request import PlanRequest

ROWS = 8_000_000
EXPONENT = 1.05
LATER = Path(__file__).parent / "results" / "placement_gpu_dynamicemb_h200.json"
IDS = 262_144
AMPLE_ROWS = 8


@dataclass(frozen=True, slots=True)
class Row:
    """One measured configuration: ms a step and device MiB in use."""

    mode: Mode
    ratio: float
    milliseconds: float
    device_mib: float
    cache_per_unique: float | None


# DynamicEmb on one H200: 2 tables x 8 M rows, width 128, fp32, Adam, 262,144 ids a table and step from a power law of
# 1.05.
MEASURED = (
    Row(Mode.HBM_ONLY, 1.0, 2.15, 25_010, None),
    Row(Mode.CACHING, 0.5, 5.63, 13_624, 46),
    Row(Mode.CACHING, 0.25, 8.81, 7_684, 23),
    Row(Mode.CACHING, 0.1, 12.40, 4_138, 9.2),
    Row(Mode.CACHING, 0.05, 22.80, 2_928, 4.6),
    Row(Mode.CACHING, 0.02, 75.83, 2_236, 1.8),
    Row(Mode.HYBRID, 0.5, 15.96, 14_412, None),
    Row(Mode.HYBRID, 0.1, 16.59, 5_086, None),
    Row(Mode.HOST_ONLY, 0.0, 15.31, 2_284, None),
)


def measured_request() -> PlanRequest:
    """The request that describes the measured job."""
    access = power_law(1.05, ROWS)
    tables = tuple(
        Table(name=f"t{i}", rows=ROWS, dim=128, ids_per_sample=1.0, optimizer=Optimizer.ADAM, access=access)
        for i in range(2)
    )
    topology = Topology(ranks=1, hbm_bytes=141 << 30)
    return PlanRequest(tables=tables, topology=topology, hardware="h200", step=Step(samples_per_rank=IDS))


def measurement(request: PlanRequest, row: Row) -> Measurement:
    """A measured row in the form that the fit takes."""
    loads = tuple(rank_load(request, table) for table in request.tables)
    rows = tuple(ROWS * row.ratio for _ in request.tables)
    return Measurement(mode=row.mode, ratio=row.ratio, seconds=row.milliseconds / 1e3, loads=loads, cache_rows=rows)


def predicted_mib(request: PlanRequest, row: Row) -> float:
    """Predicted device MiB of a measured row, workspace included."""
    total = float(request.profile.costs(request.runtime).workspace_bytes)
    for table in request.tables:
        options = table_options(request, replace(table, ratio=row.ratio, modes=(row.mode,)), np.array([0.5]))
        total += float(options.hbm[0])
    return total / 2**20


def _order(values: list[float]) -> list[int]:
    return list(np.argsort(values, kind="stable"))


def halves_error(samples: list[Measurement]) -> dict[str, float | int]:
    """What fits on every half of the rows (four or five of nine) say of the rows that they have not seen."""
    profile = builtin_profile("h200")
    order = _order([row.milliseconds for row in MEASURED])
    ample: list[float] = []
    crowded: list[float] = []
    same = count = 0
    for size in (len(samples) // 2, len(samples) - len(samples) // 2):
        for half in itertools.combinations(range(len(samples)), size):
            costs = fit_costs(profile, [samples[index] for index in half])
            predicted = [predict_seconds(profile, costs, sample) * 1e3 for sample in samples]
            errors = {i: abs(predicted[i] / MEASURED[i].milliseconds - 1) for i in range(len(samples)) if i not in half}
            small = [i for i in errors if (MEASURED[i].cache_per_unique or np.inf) < AMPLE_ROWS]
            ample.append(max((errors[i] for i in errors if i not in small), default=0.0))
            crowded.append(max((errors[i] for i in small), default=0.0))
            same += _order(predicted) == order
            count += 1
    return {
        "halves": count,
        "order_as_measured": same,
        "ample_median": float(np.median(ample)),
        "ample_worst": max(ample),
        "ample_above_20_percent": sum(error > 0.2 for error in ample),
        "crowded_median": float(np.median(crowded)),
        "crowded_worst": max(crowded),
        "crowded_above_50_percent": sum(error > 0.5 for error in crowded),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """A module of equal tables.

    Attributes:
        mode: Mode of the tables.
        ratio: Fraction of the rows in HBM.
        tables: Number of tables.
        rows: Rows of each.
        dim: Width of an embedding.
        ids: Lookups of a table and step.
        optimizer: Optimizer of the tables.
    """

    mode: Mode
    ratio: float
    tables: int = 2
    rows: int = 4 << 20
    dim: int = 128
    ids: int = 131_072
    optimizer: Optimizer = Optimizer.ADAM


def sample_of(configuration: Configuration, seconds: float) -> Measurement:
    """A measured step in the form that the fit takes."""
    c = configuration
    table = Table(name="table", rows=c.rows, dim=c.dim, optimizer=c.optimizer, access=power_law(EXPONENT, c.rows))
    request = PlanRequest(
        tables=(table,),
        topology=Topology(ranks=1, hbm_bytes=1 << 40),
        hardware="h200",
        step=Step(samples_per_rank=c.ids),
    )
    return Measurement(
        mode=c.mode,
        ratio=c.ratio,
        seconds=seconds,
        loads=(rank_load(request, table),) * c.tables,
        cache_rows=(c.rows * c.ratio,) * c.tables,
    )


def later_steps(old: list[Measurement]) -> dict[str, object]:
    """What fits to all rows above and to every other of the later steps say of the steps that they have not seen.

    Args:
        old: The rows above.
    """
    profile = builtin_profile("h200")
    rows = json.loads(LATER.read_text(encoding="utf-8"))["rows"]
    samples = [
        sample_of(
            Configuration(**{
                **row["configuration"], "mode": Mode(row["configuration"]["mode"]),
                "optimizer": Optimizer(row["configuration"]["optimizer"]),
            }),
            row["measured_ms"] / 1e3,
        )
        for row in rows
    ]  # fmt: skip
    told: dict[str, object] = {"steps": len(samples)}
    halves = {"odd": range(0, len(samples), 2), "even": range(1, len(samples), 2)}
    for name, seen in halves.items():
        costs = fit_costs(profile, old + [samples[index] for index in seen])
        errors = [
            predict_seconds(profile, costs, sample) / sample.seconds - 1
            for index, sample in enumerate(samples)
            if index not in seen
        ]
        within = sum(abs(error) <= 0.2 for error in errors)
        told[f"fitted_to_{name}"] = {"unseen": len(errors), "within_20_percent": within, "errors": errors}
    costs = profile.costs(Runtime.DYNAMICEMB)
    times = [(predict_seconds(profile, costs, sample), sample.seconds) for sample in samples]
    apart = [(a, b) for a, b in itertools.combinations(times, 2) if max(a[1], b[1]) > 1.15 * min(a[1], b[1])]
    told["pairs_15_percent_apart"] = len(apart)
    told["pairs_in_order"] = sum((a[0] < b[0]) == (a[1] < b[1]) for a, b in apart)
    return told


def main(
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    """Print measured and predicted times and bytes, with every row predicted by a fit that may not have seen it."""
    console = Console()
    request, profile = measured_request(), builtin_profile("h200")
    samples = [measurement(request, row) for row in MEASURED]
    halves = {"odd rows": samples[0::2], "even rows": samples[1::2], "all rows": samples}
    out = RichTable(title="DynamicEmb on one H200: measured, and predicted by constants fitted on ...")
    for heading in ("mode", "ratio", "ms", *halves, "MiB in use", "MiB predicted"):
        out.add_column(heading, justify="right")
    fits: dict[str, RuntimeCosts] = {name: fit_costs(profile, half) for name, half in halves.items()}
    records: list[dict[str, object]] = []
    for row, sample in zip(MEASURED, samples, strict=True):
        errors = {}
        cells = []
        for name, costs in fits.items():
            predicted = predict_seconds(profile, costs, sample) * 1e3
            seen = any(sample is other for other in halves[name])
            errors[name] = {"ms": predicted, "error": predicted / row.milliseconds - 1, "fitted": seen}
            cells.append(f"{predicted:.2f} ({errors[name]['error']:+.0%}{' fit' if seen else ''})")
        mib = predicted_mib(request, row)
        out.add_row(
            row.mode,
            f"{row.ratio:g}",
            f"{row.milliseconds:.2f}",
            *cells,
            f"{row.device_mib:,.0f}",
            f"{mib:,.0f} ({mib / row.device_mib - 1:+.1%})",
        )
        records.append(
            {
                "mode": row.mode.value,
                "ratio": row.ratio,
                "measured_ms": row.milliseconds,
                "predicted": errors,
                "measured_mib": row.device_mib,
                "predicted_mib": mib,
                "cache_rows_per_unique_key": row.cache_per_unique,
            }
        )
    console.print(out)
    measured_order = _order([row.milliseconds for row in MEASURED])
    for name, costs in fits.items():
        same = _order([predict_seconds(profile, costs, sample) for sample in samples]) == measured_order
        console.print(f"order of the modes, fitted on {name}: {'as measured' if same else 'DIFFERENT'}")
    halves_seen = halves_error(samples)
    console.print(
        f"worst row unseen by a fit on one of {halves_seen['halves']} halves, median and worst of the halves: "
        f"{halves_seen['ample_median']:.0%} and {halves_seen['ample_worst']:.0%} with {AMPLE_ROWS} cache rows per "
        f"unique key or no cache, {halves_seen['crowded_median']:.0%} and {halves_seen['crowded_worst']:.0%} below; "
        f"order as measured in {halves_seen['order_as_measured']}"
    )
    later = later_steps(samples)
    console.print("later steps of DynamicEmb:", later)
    if json_path:
        constants = {name: {f: getattr(c, f) for f in c.__dataclass_fields__} for name, c in fits.items()}
        payload = {
            "source": "DynamicEmb on one H200",
            "rows": records,
            "halves": halves_seen,
            "later_steps": later,
            "constants": constants,
        }
        write(json_path, payload)


if __name__ == "__main__":
    typer.run(main)
