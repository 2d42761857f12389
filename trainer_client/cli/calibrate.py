"""`evenkeel calibrate`: a hardware profile of this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table as RichTable

if TYPE_CHECKING:  # what solves and measures is imported when the command runs
    from evenkeel.placement import Runtime
    from evenkeel.placement.calibration import FitError


def calibrate_command(
    output: Annotated[Path, typer.Option("--output", "-o", help="Write the profile here.")] = Path("profile.json"),
    name: Annotated[str, typer.Option(help="Name of the profile.")] = "calibrated",
    base: Annotated[str, typer.Option(help="Built-in profile that gives what is not measured.")] = "h200",
    device: Annotated[str, typer.Option(help="Device to measure.")] = "cuda",
    raw: Annotated[Path | None, typer.Option(help="Raw measurements taken earlier, instead of measuring.")] = None,
    dynamicemb_steps: Annotated[
        Path | None, typer.Option(help="JSON list of measured DynamicEmb steps to fit its constants to.")
    ] = None,
    table_gib: Annotated[
        float, typer.Option(min=0.001, max=1024, help="Size of the table to gather from, in GiB.")
    ] = 4.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the profile instead of tables.")] = False,
) -> None:
    """Measure this machine and write its hardware profile.

    Measures random gathers from HBM and host memory by row width, the link, launches, and FBGEMM's kernels where they
    are installed, and fits the constants of the cost model to them.
    """
    from evenkeel.placement import InvalidInputError, Runtime, builtin_profile
    from evenkeel.placement.calibration import calibrated_profile, measured_steps
    from evenkeel.placement.hardware import profile_json
    from trainer_client.cli.files import write

    console = Console(stderr=True)
    try:
        values = _measure(console, device, table_gib) if raw is None else _object(raw)
        records = {runtime: values.get("kernels", {}).get(runtime.value, []) for runtime in Runtime}
        if dynamicemb_steps is not None:
            records[Runtime.DYNAMICEMB] = json.loads(dynamicemb_steps.read_text("utf-8"))
        steps = {runtime: measured_steps(own) for runtime, own in records.items()}
        profile, errors = calibrated_profile(builtin_profile(base), values, name, dict(steps))
    except (InvalidInputError, OSError, RuntimeError, ValueError, AssertionError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    text = json.dumps(profile_json(profile), indent=2) + "\n"
    trouble = write("--output", output, text)
    if as_json or trouble:
        typer.echo(text, nl=False)
    if trouble:
        typer.echo(f"error: {trouble}; the profile is above", err=True)
        raise typer.Exit(2)
    if as_json:
        return
    _show(Console(), values, errors)
    typer.echo(f"profile {name!r} written to {output}; use it with: evenkeel plan tables.yaml --profile {output} ...")


def _object(raw: Path) -> dict[str, Any]:
    values = json.loads(raw.read_text("utf-8"))
    if not isinstance(values, dict):
        remedy = "give what `python trainer_client/planning/measuring.py --json FILE` wrote"
        raise ValueError(f"--raw {raw}: these are no measurements of a machine; {remedy}")
    return values


def _measure(console: Console, device: str, table_gib: float) -> dict[str, Any]:
    try:
        from trainer_client.planning import measuring
    except ModuleNotFoundError as error:
        raise RuntimeError(f"measuring needs torch: {error}; install it, or give --raw") from None
    import torch

    if device.startswith("cuda") and not torch.cuda.is_available():
        remedy = "run this where the job will run, or give --device cpu to try it, or --raw"
        raise RuntimeError(f"--device {device}: PyTorch finds no GPU here; {remedy}")
    with console.status("measuring", spinner="line") as status:
        return measuring.measure(
            device,
            table_bytes=int(table_gib * 2**30),
            gathered_rows=min(1 << 20, max(256, int(table_gib * 2**30) >> 13)),
            progress=status.update,
        )


def _show(console: Console, values: dict[str, Any], errors: dict[Runtime, tuple[FitError, ...]]) -> None:
    out = RichTable(title=f"{values.get('device', 'measured')}: random gathers, GB/s")
    for heading in ("row bytes", "HBM", "host memory"):
        out.add_column(heading, justify="right")
    for (width, hbm), (_, host) in zip(values["hbm_gather"], values["host_gather"], strict=True):
        out.add_row(f"{width:.0f}", f"{hbm / 1e9:.0f}", f"{host / 1e9:.1f}")
    console.print(out)
    for runtime, rows in errors.items():
        fit = RichTable(title=f"{runtime.value}: ms a step")
        for heading in ("mode", "ratio", "measured", "predicted", "error"):
            fit.add_column(heading, justify="right")
        for row in rows:
            off = row.predicted_s / row.measured_s - 1
            cells = (f"{row.measured_s * 1e3:.3f}", f"{row.predicted_s * 1e3:.3f}", f"{off:+.0%}")
            fit.add_row(row.mode.value, f"{row.ratio:g}", *cells)
        console.print(fit)
