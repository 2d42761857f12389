"""Measured whole steps against the model, with what the host launches fitted to every other of them.

python -m benchmarks.placement_gpu_fit --json benchmarks/results/placement_gpu_fit.json
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table as RichTable
from scipy.optimize import least_squares

from benchmarks.placement_gpu_steps import Configuration, Model, Part, request_of
from evenkeel.placement import Optimizer, Plan, PlanRequest, plan
from evenkeel.placement.codec import decode
from evenkeel.placement.whole_step import Launches, whole_step_seconds

STEPS = Path(__file__).parent / "results/placement_gpu_steps_2xh200.json"
ALLOWED, APART = 0.2, 1.15


def configuration_of(record: dict[str, Any]) -> Configuration:
    """The configuration of a measured step."""
    parts = tuple(decode(Part, part) for part in record["parts"])
    optimizer = Optimizer(record["optimizer"])
    return Configuration(name=record["name"], samples=record["samples"], parts=parts, optimizer=optimizer)


def predict(asked: tuple[PlanRequest, Plan], launches: Launches) -> float:
    """Seconds of a step."""
    return whole_step_seconds(*asked, launches) or 0.0


def fitted(asked: list[tuple[PlanRequest, Plan]], measured: list[float]) -> Launches:
    """What predicts these steps best, by relative error."""

    def errors(x: Any) -> Any:
        launches = Launches(exchange_s=float(x[0]), cache_s=float(x[1]))
        return [np.log(predict(each, launches) / seconds) for each, seconds in zip(asked, measured, strict=True)]

    found = least_squares(errors, [3e-3, 3e-4], bounds=([1e-4, 0.0], [1.0, 1.0]), x_scale=[1e-3, 1e-3])
    return Launches(exchange_s=float(found.x[0]), cache_s=float(found.x[1]))


def main(
    steps: Annotated[Path, typer.Option(help="What benchmarks.placement_gpu_steps wrote.")] = STEPS,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    """Print every step as measured and as predicted by constants that were not fitted to it."""
    record = json.loads(steps.read_text("utf-8"))
    rows, ranks = record["rows"], record["ranks"]
    asked = []
    for row in rows:
        configuration = configuration_of(row["configuration"])
        request = request_of(configuration, Model(configuration), ranks)
        asked.append((request, plan(request, split=False)))
    measured = [row["measured_ms"] / 1e3 for row in rows]
    halves = [fitted(asked[half::2], measured[half::2]) for half in (0, 1)]
    out = RichTable(title=f"ms a step on {ranks} {record['device']}")
    for heading in ("configuration", "measured", "GPU alone", "fitted to even", "fitted to odd"):
        out.add_column(heading, justify="left" if heading == "configuration" else "right")
    results: list[dict[str, Any]] = []
    for index, (row, each) in enumerate(zip(rows, asked, strict=True)):
        both = [predict(each, launches) for launches in halves]
        errors = [seconds / measured[index] - 1 for seconds in both]
        results.append(
            {
                "configuration": row["configuration"]["name"],
                "measured_ms": row["measured_ms"],
                "gpu_alone_ms": (each[1].seconds or 0.0) * 1e3,
                "fitted_to_even_ms": both[0] * 1e3,
                "fitted_to_odd_ms": both[1] * 1e3,
                "unseen_error": errors[1 - index % 2],
            }
        )
        cells = [
            f"{s * 1e3:.2f} ({e:+.0%}{' fit' if index % 2 == h else ''})"
            for h, (s, e) in enumerate(zip(both, errors, strict=True))
        ]
        out.add_row(
            row["configuration"]["name"], f"{row['measured_ms']:.2f}", f"{results[-1]['gpu_alone_ms']:.2f}", *cells
        )
    Console(width=120).print(out)
    summary = {}
    for half, name in enumerate(("fitted_to_even", "fitted_to_odd")):
        unseen = results[1 - half :: 2]
        errors = [result[f"{name}_ms"] / result["measured_ms"] - 1 for result in unseen]
        pairs = [
            (a, b)
            for a, b in itertools.combinations(results, 2)
            if max(a["measured_ms"], b["measured_ms"]) > APART * min(a["measured_ms"], b["measured_ms"])
        ]
        right = sum((a["measured_ms"] < b["measured_ms"]) == (a[f"{name}_ms"] < b[f"{name}_ms"]) for a, b in pairs)
        summary[name] = {
            "exchange_ms": halves[half].exchange_s * 1e3,
            "cache_ms": halves[half].cache_s * 1e3,
            "unseen": len(unseen),
            "unseen_within_20_percent": sum(abs(error) <= ALLOWED for error in errors),
            "unseen_worst": max(errors, key=abs),
            "pairs_15_percent_apart": len(pairs),
            "pairs_in_order": right,
        }
        print(name, json.dumps(summary[name]))
    if json_path:
        payload = {"command": "python -m benchmarks.placement_gpu_fit --json FILE", "summary": summary, "rows": results}
        json_path.write_text(json.dumps(payload, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
