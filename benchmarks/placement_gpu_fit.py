"""Measured whole steps against what a profile that never saw them predicts.

python -m benchmarks.placement_gpu_fit --steps STEPS --json benchmarks/results/placement_gpu_fit_h200.json

The profile's constants may have been fitted to these steps, or not; so what a step takes beside its tables is also
fitted to each half of them (every other one), and the other half predicted.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table as RichTable

from evenkeel.placement import plan, whole_step_seconds
from evenkeel.placement.calibration import measured_samples, with_whole_steps
from evenkeel.placement.codec import encode
from evenkeel.placement.hardware import HardwareProfile, builtin_profile, parse_profile
from evenkeel.placement.step_samples import StepSample, request_of
from evenkeel.placement.whole_step import step_costs

STEPS = Path(__file__).parent / "results/placement_gpu_steps_2xh200.json"
ALLOWED, APART = 0.2, 1.15


def main(
    steps: Annotated[Path, typer.Option(help="What benchmarks.placement_gpu_steps wrote.")] = STEPS,
    profile: Annotated[
        Path | None, typer.Option(help="Written there by `evenkeel calibrate`; or the device's built-in.")
    ] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    """Print every step as measured and as predicted."""
    record = json.loads(steps.read_text("utf-8"))
    builtin = "h100" if "H100" in record["device"] else "h200"
    hardware = builtin_profile(builtin) if profile is None else parse_profile(json.loads(profile.read_text("utf-8")))
    samples = measured_samples(record["rows"])
    out = RichTable(title=f"ms a step on {record['ranks']} {record['device']}, predicted by profile {hardware.name}")
    for heading in ("configuration", "measured", "tables alone", "predicted", "error"):
        out.add_column(heading, justify="left" if heading == "configuration" else "right")
    results = predicted(samples, hardware)
    for result in results:
        figures = (f"{result[name]:.2f}" for name in ("measured_ms", "tables_alone_ms", "predicted_ms"))
        out.add_row(result["configuration"], *figures, f"{result['error']:+.0%}")
    Console(width=120).print(out)
    summary = summarize(results)
    halves = []
    for first in (0, 1):
        fitted, _ = with_whole_steps(hardware, samples[first::2])
        halves.append(summarize(predicted(samples[1 - first :: 2], fitted)))
    print(json.dumps(summary), *(f"half: {json.dumps(half)}" for half in halves), sep="\n")
    if json_path:
        costs = step_costs(request_of(samples[0], hardware))
        payload: dict[str, Any] = {
            "command": f"python -m benchmarks.placement_gpu_fit --steps {steps.name} --json FILE"
        }
        payload |= {"profile": hardware.name, "costs": encode(costs), "summary": summary}
        payload |= {"other_halves": halves, "rows": results}
        json_path.write_text(json.dumps(payload, indent=1) + "\n")


def predicted(samples: Sequence[StepSample], hardware: HardwareProfile) -> list[dict[str, Any]]:
    """Each step as measured and as predicted."""
    results = []
    for sample in samples:
        request = request_of(sample, hardware)
        found = plan(request, split=False)
        seconds = whole_step_seconds(request, found) or 0.0
        results.append(
            {
                "configuration": sample.name,
                "measured_ms": sample.seconds * 1e3,
                "tables_alone_ms": (found.seconds or 0.0) * 1e3,
                "predicted_ms": seconds * 1e3,
                "error": seconds / sample.seconds - 1,
            }
        )
    return results


def summarize(results: list[dict[str, Any]]) -> dict[str, Any]:
    """How many steps are within what is allowed, and how many pairs in order."""
    errors = [result["error"] for result in results]
    pairs = [
        (a, b)
        for a, b in itertools.combinations(results, 2)
        if max(a["measured_ms"], b["measured_ms"]) > APART * min(a["measured_ms"], b["measured_ms"])
    ]
    right = sum((a["measured_ms"] < b["measured_ms"]) == (a["predicted_ms"] < b["predicted_ms"]) for a, b in pairs)
    return {
        "steps": len(results),
        "within_20_percent": sum(abs(error) <= ALLOWED for error in errors),
        "worst": max(errors, key=abs),
        "pairs_15_percent_apart": len(pairs),
        "pairs_in_order": right,
    }


if __name__ == "__main__":
    typer.run(main)
