"""`evenkeel calibrate`: a hardware profile of this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from trainer_client.cli.common import errors_in_a_sentence, show, waiting, write

_RAW_HELP = "Raw measurements taken earlier, instead of measuring."
_STEPS_HELP = "JSON list of measured DynamicEmb steps to fit its constants to."
_BASE_HELP = "Built-in profile that gives what is not measured; that of the GPU's name by default, or h200."
_RANKS_HELP = "GPUs to measure whole steps of TorchRec on; all by default, 0 for none."


def calibrate(
    output: Annotated[Path, typer.Option("--output", "-o", help="Write the profile here.")] = Path("profile.json"),
    name: Annotated[str, typer.Option(help="Name of the profile.")] = "calibrated",
    base: Annotated[str | None, typer.Option(help=_BASE_HELP)] = None,
    device: Annotated[str, typer.Option(help="Device to measure.")] = "cuda",
    raw: Annotated[Path | None, typer.Option(help=_RAW_HELP, exists=True, dir_okay=False)] = None,
    dynamicemb_steps: Annotated[Path | None, typer.Option(help=_STEPS_HELP, exists=True, dir_okay=False)] = None,
    table_gib: Annotated[float, typer.Option(min=0.001, max=1024, help="GiB of the table to gather from.")] = 4.0,
    ranks: Annotated[int | None, typer.Option(min=0, max=1024, help=_RANKS_HELP)] = None,
    keep_raw: Annotated[Path | None, typer.Option(help="Write the raw measurements here, for --raw.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the profile instead of tables.")] = False,
) -> None:
    """Measure this machine and write its hardware profile.

    Measures random gathers from HBM and host memory by row width, TorchRec's kernels by themselves and whole
    steps with the host's part where it is installed, and fits the constants of the cost model to them.
    """
    from evenkeel.placement import Runtime, builtin_profile
    from evenkeel.placement.calibration import calibrated_profile, measured_samples, measured_steps, with_whole_steps
    from evenkeel.placement.fields import encode
    from evenkeel.placement.hardware import FALLBACK, profile_of

    with errors_in_a_sentence():
        values = _measure(device, table_gib, ranks) if raw is None else _read("--raw", raw, dict)
        records = {runtime: values.get("kernels", {}).get(runtime.value, []) for runtime in Runtime}
        if dynamicemb_steps is not None:
            records[Runtime.DYNAMICEMB] = _read("--dynamicemb-steps", dynamicemb_steps, list)
        steps = {runtime: measured_steps(each) for runtime, each in records.items()}
        known = builtin_profile(base or profile_of(str(values.get("device"))) or FALLBACK)
        profile, errors = calibrated_profile(known, values, name, dict(steps))
        whole: Any = ()
        if samples := measured_samples(values.get("whole_steps") or ()):
            profile, whole = with_whole_steps(profile, samples)
    text = json.dumps(encode(profile), indent=2) + "\n"
    kept = keep_raw is None or write("--keep-raw", keep_raw, json.dumps(values, indent=1) + "\n")
    written = write("--output", output, text)
    if as_json or not written:
        typer.echo(text, nl=False)
    if not (kept and written):
        raise typer.Exit(2)
    if as_json:
        return
    gathers = zip(values["hbm_gather"], values["host_gather"], strict=True)
    rates = [(f"{width:.0f}", f"{hbm / 1e9:.0f}", f"{host / 1e9:.1f}") for (width, hbm), (_, host) in gathers]
    show(f"{values.get('device', 'measured')}: random gathers, GB/s", ("row bytes", "HBM", "host memory"), rates)
    for runtime, rows in errors.items():
        fits = [(f"{step.mode.value} {step.ratio:g}", *_beside(step.seconds, predicted)) for step, predicted in rows]
        show(f"kernels of {runtime.value}, ms", ("mode and ratio", "measured", "predicted", "error"), fits)
    if whole:
        fits = [(sample.name, *_beside(sample.seconds, predicted)) for sample, predicted in whole]
        title = f"whole steps of torchrec, GPUs: {whole[0][0].ranks}, ms"
        show(title, ("tables", "measured", "predicted", "error"), fits)
    typer.echo(f"profile {name!r} written to {output}; use it with: evenkeel plan tables.yaml --profile {output} ...")


def _read(flag: str, path: Path, kind: type) -> Any:
    from trainer_client.cli.files import read

    content = read(path, "measurements of a machine")
    if not isinstance(content, kind):
        remedy = "give what --keep-raw wrote, or a list of measured steps"
        raise ValueError(f"{flag} {path}: these are no measurements of a machine; {remedy}")
    return content


def _measure(device: str, table_gib: float, ranks: int | None) -> dict[str, Any]:
    import torch

    from trainer_client.planning import measuring
    from trainer_client.planning.collective import run_on_ranks

    cuda = device.startswith("cuda")
    if cuda and not torch.cuda.is_available():
        remedy = "run this where the job will run, or give --device cpu to try it, or --raw"
        raise RuntimeError(f"--device {device}: PyTorch finds no GPU here; {remedy}")
    if ranks is None:
        ranks = torch.cuda.device_count() if cuda and measuring.can_measure_steps() else 0
    elif cuda and ranks > torch.cuda.device_count():
        raise RuntimeError(f"--ranks {ranks}: PyTorch finds {torch.cuda.device_count()} GPUs here; give fewer")
    with waiting("measuring") as status:
        values = measuring.measure(torch.device(device), table_bytes=int(table_gib * 2**30), progress=status.update)
        if ranks > 0:
            status.update(f"whole steps, GPUs: {ranks}")
            try:
                kind, scale = device.partition(":")[0], min(1.0, table_gib / 4)
                values["whole_steps"] = run_on_ranks(measuring.measure_whole_steps, ranks, kind, scale)
            except RuntimeError as error:  # the rest is worth having
                typer.echo(f"warning: {error}; the profile has no whole steps", err=True)
    return values


def _beside(measured: float, predicted: float) -> tuple[str, str, str]:
    return f"{measured * 1e3:.3f}", f"{predicted * 1e3:.3f}", f"{predicted / measured - 1:+.0%}"
