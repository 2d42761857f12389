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
    from evenkeel.placement.step_samples import StepSample


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
    ranks: Annotated[
        int | None,
        typer.Option(min=0, max=1024, help="GPUs to measure whole steps of TorchRec on; all by default, 0 for none."),
    ] = None,
    keep_raw: Annotated[Path | None, typer.Option(help="Write the raw measurements here, for --raw.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the profile instead of tables.")] = False,
) -> None:
    """Measure this machine and write its hardware profile.

    Measures random gathers from HBM and host memory by row width, the link, launches, and FBGEMM's kernels where they
    are installed, whole steps of TorchRec too, and fits the constants of the cost model to them.
    """
    from evenkeel.placement import InvalidInputError, Runtime, builtin_profile
    from evenkeel.placement.calibration import (
        calibrated_profile,
        measured_samples,
        measured_steps,
        with_whole_steps,
    )
    from evenkeel.placement.hardware import profile_json
    from trainer_client.cli.files import write

    console = Console(stderr=True)
    try:
        values = _measure(console, device, table_gib, ranks) if raw is None else _object(raw)
        records = {runtime: values.get("kernels", {}).get(runtime.value, []) for runtime in Runtime}
        if dynamicemb_steps is not None:
            records[Runtime.DYNAMICEMB] = _steps(dynamicemb_steps)
        steps = {runtime: measured_steps(own) for runtime, own in records.items()}
        profile, errors = calibrated_profile(builtin_profile(base), values, name, dict(steps))
        whole: tuple[tuple[StepSample, float], ...] = ()
        if samples := measured_samples(values.get("whole_steps") or ()):
            profile, whole = with_whole_steps(profile, samples)
    except (InvalidInputError, OSError, RuntimeError, ValueError, AssertionError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    text = json.dumps(profile_json(profile), indent=2) + "\n"
    kept = "" if keep_raw is None else write("--keep-raw", keep_raw, json.dumps(values, indent=1) + "\n")
    trouble = write("--output", output, text)
    if as_json or trouble:
        typer.echo(text, nl=False)
    for why in [kept] * bool(kept) + [f"{trouble}; the profile is above"] * bool(trouble):
        typer.echo(f"error: {why}", err=True)
    if kept or trouble:
        raise typer.Exit(2)
    if as_json:
        return
    _show(Console(), values, errors, whole)
    typer.echo(f"profile {name!r} written to {output}; use it with: evenkeel plan tables.yaml --profile {output} ...")


def _steps(path: Path) -> list[Any]:
    from trainer_client.cli.files import read

    found = read(path, "a list of measured steps")
    if not isinstance(found, list):
        raise ValueError(f"--dynamicemb-steps {path}: this is no list; give one of measured steps of DynamicEmb")
    return found


def _object(raw: Path) -> dict[str, Any]:
    from trainer_client.cli.files import read

    values = read(raw, "measurements of a machine")
    if not isinstance(values, dict):
        remedy = "give what `python trainer_client/planning/measuring.py --json FILE` wrote"
        raise ValueError(f"--raw {raw}: these are no measurements of a machine; {remedy}")
    return values


def _measure(console: Console, device: str, table_gib: float, ranks: int | None) -> dict[str, Any]:
    try:
        from trainer_client.planning import measuring, whole_steps
    except ModuleNotFoundError as error:
        raise RuntimeError(f"measuring needs torch: {error}; install it, or give --raw") from None
    import torch

    if device.startswith("cuda") and not torch.cuda.is_available():
        remedy = "run this where the job will run, or give --device cpu to try it, or --raw"
        raise RuntimeError(f"--device {device}: PyTorch finds no GPU here; {remedy}")
    cuda = device.startswith("cuda")
    if ranks is None:
        ranks = torch.cuda.device_count() if cuda and whole_steps.can_measure() else 0
    elif cuda and ranks > torch.cuda.device_count():
        raise RuntimeError(f"--ranks {ranks}: PyTorch finds {torch.cuda.device_count()} GPUs here; give fewer")
    with console.status("measuring", spinner="line") as status:
        found = measuring.measure(
            device,
            table_bytes=int(table_gib * 2**30),
            gathered_rows=min(1 << 20, max(256, int(table_gib * 2**30) >> 13)),
            progress=status.update,
        )
        if ranks > 0:
            status.update(f"whole steps, GPUs: {ranks}")
            if cuda:
                torch.cuda.empty_cache()
            scale = min(1.0, table_gib / 4)
            try:
                found["whole_steps"] = whole_steps.measure_on_ranks(ranks, device.partition(":")[0], scale=scale)
            except RuntimeError as error:  # the rest is worth having
                console.print(f"warning: {error}; the profile has no whole steps", markup=False)
    return found


def _show(
    console: Console,
    values: dict[str, Any],
    errors: dict[Runtime, tuple[FitError, ...]],
    whole: tuple[tuple[StepSample, float], ...],
) -> None:
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
    if whole:
        steps = RichTable(title=f"whole steps of torchrec, GPUs: {whole[0][0].ranks}, ms")
        for heading in ("tables", "measured", "predicted", "error"):
            steps.add_column(heading, justify="left" if heading == "tables" else "right")
        for sample, predicted in whole:
            off = predicted / sample.seconds - 1
            steps.add_row(sample.name, f"{sample.seconds * 1e3:.3f}", f"{predicted * 1e3:.3f}", f"{off:+.0%}")
        console.print(steps)
