"""`evenkeel plan`: where each embedding table should live."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainer_client.cli.connection_options import TokenOption

if TYPE_CHECKING:
    from evenkeel.key_statistics import MeasuredCurve
    from evenkeel.placement.plan_file import PlanFile

INFEASIBLE_EXIT = 3
_DRIFT = 0.1


def plan_command(
    tables: Annotated[
        Path,
        typer.Argument(
            help="YAML or JSON: a list of tables, a whole request, or a plan file.", exists=True, dir_okay=False
        ),
    ],
    topology: Annotated[
        str | None, typer.Option(help="Machines in short, such as h200x8 or h100x64/8 (8 ranks a host).")
    ] = None,
    hbm_gib: Annotated[
        float | None,
        typer.Option(help="HBM of one rank for tables, in GiB, whatever the file reserves; --reserve is taken off it."),
    ] = None,
    host_gib: Annotated[float | None, typer.Option(help="Memory of one host for tables, in GiB.")] = None,
    reserve: Annotated[
        str | None,
        typer.Option(
            help="HBM of one rank that the model and its activations need, such as 24GiB or 40%. By default 15% of a "
            "topology that is given by name, unless --hbm-gib says what tables may use."
        ),
    ] = None,
    runtime: Annotated[str | None, typer.Option(help="dynamicemb or torchrec.")] = None,
    samples: Annotated[int | None, typer.Option(help="Samples of a batch on one rank.")] = None,
    profile: Annotated[Path | None, typer.Option(help="Hardware profile written by `evenkeel calibrate`.")] = None,
    statistics: Annotated[
        list[Path] | None,
        typer.Option(help="Key statistics that KeyStatistics.save wrote; once for the file of each rank."),
    ] = None,
    clock: Annotated[
        float | None,
        typer.Option(
            help="Seconds for which the plan and its contenders are each trained on this machine's GPUs, as many as "
            "the topology has ranks; the quickest is taken."
        ),
    ] = None,
    dense_ms: Annotated[
        float | None,
        typer.Option(min=0, help="Milliseconds that a step's dense part takes on the GPU."),
    ] = None,
    device: Annotated[str, typer.Option(help="cuda, or cpu to try --clock without GPUs.")] = "cuda",
    planner: Annotated[
        str | None,
        typer.Option(
            "--planner",
            "--url",
            envvar="EVENKEEL_PLANNER",
            help="URL of a planner to ask instead of planning here; embedded plans here.",
        ),
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option(
            envvar="EVENKEEL_PLAN_CACHE",
            file_okay=False,
            help="Folder in which proved plans are kept: the same request gets its plan again.",
        ),
    ] = None,
    tls_ca: Annotated[Path | None, typer.Option(help="Authorities of the planner; EVENKEEL_TLS_CA.")] = None,
    token_file: TokenOption = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the plan file here.")] = None,
    report: Annotated[
        Path | None, typer.Option(help="Write what each rank, host and table takes here, as JSON.")
    ] = None,
    sharding_plan: Annotated[
        Path | None,
        typer.Option(help="Write TorchRec's whole ShardingPlan here, as a Python module that needs only TorchRec."),
    ] = None,
    code: Annotated[bool, typer.Option("--code", help="Print the lines to paste into a job.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan file instead of tables.")] = False,
) -> None:
    """Choose where each embedding table should live: HBM, host memory, or both.

    Exits with 3 where nothing fits, and says what would.
    """
    from rich.console import Console

    from evenkeel.credentials import read_credentials
    from evenkeel.placement import InvalidInputError, Runtime, Status, whole_step_seconds
    from evenkeel.placement.measured_plans import measured_line
    from evenkeel.placement.pasted_lines import lines_to_paste
    from evenkeel.placement.plan_file import PlanFile
    from evenkeel.placement.plan_text import PlanText
    from evenkeel.placement.report import make_report
    from trainer_client.cli.files import read, write
    from trainer_client.cli.placing import Flags, build_request, check_sharding_plan, measured, race, solve

    flags = Flags(
        topology=topology,
        hbm_gib=hbm_gib,
        host_gib=host_gib,
        reserve=reserve,
        runtime=runtime,
        samples=samples,
        profile=profile,
        dense_ms=dense_ms,
    )
    wanted = {"--output": output, "--report": report, "--sharding-plan": sharding_plan}
    try:
        for flag, path in wanted.items():
            if path is not None and path.exists() and path.samefile(tables):
                raise InvalidInputError(flag, str(path), "is the file that is read", "name another")
            twins = [other for other, its in wanted.items() if path is not None and its == path and other != flag]
            if twins:
                raise InvalidInputError(flag, str(path), f"is the file of {twins[0]} too", "name another")
        request = build_request(read(tables), flags, _note)
        curves: dict[str, MeasuredCurve] = {}
        if statistics:
            request, curves = measured(request, statistics, _note)
        check_sharding_plan(sharding_plan, request)
        quiet = as_json or code
        found = solve(request, planner, read_credentials(tls_ca, token_file), cache, quiet=quiet)
        content = PlanFile(request=request, plan=found)
        if clock is not None and found.placements:
            content = race(request, found, clock, statistics=statistics or (), device=device, quiet=quiet)
            found = content.plan
    except (InvalidInputError, OSError, RuntimeError, ValueError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    texts = _texts(content, sharding_plan)
    troubles = {
        flag: why
        for flag, path in wanted.items()
        if path is not None and flag in texts and (why := write(flag, path, texts[flag]))
    }
    shown = PlanText(found, make_report(request, found))
    if as_json:
        typer.echo(texts["--output"], nl=False)
    elif code:
        typer.echo(lines_to_paste(request, found), nl=False)
        if not found.placements:
            Console(stderr=True).print(shown)
    else:
        Console().print(shown)
        whole = whole_step_seconds(request, found)
        if whole is not None and request.runtime is Runtime.TORCHREC:
            typer.echo(f"a whole step of these tables, with what the host launches: about {whole * 1e3:.3g} ms")
        for name, curve in curves.items():
            moved = f"; {curve.drift:.0%} of its lookups went over to other keys" if curve.drift > _DRIFT else ""
            typer.echo(f"misses of {name} within {curve.error:.3f}, from {curve.sampled_keys} sampled keys{moved}")
        for line in map(measured_line, content.measured):
            typer.echo(line)
        for flag, path in wanted.items():
            if path is not None and flag in texts and flag not in troubles:
                typer.echo(f"{flag[2:].replace('output', 'plan').replace('-', ' ')} written to {path}")
    for why in troubles.values():
        typer.echo(f"error: {why}", err=True)
    if troubles:
        raise typer.Exit(2)
    if found.status in (Status.INFEASIBLE, Status.UNKNOWN):
        raise typer.Exit(INFEASIBLE_EXIT)


def _note(text: str) -> None:
    typer.echo(f"note: {text}", err=True)


def _texts(content: PlanFile, sharding_plan: Path | None) -> dict[str, str]:
    """What goes into the files, by flag."""
    import json

    from evenkeel.placement.codec import encode
    from evenkeel.placement.pasted_lines import sharding_plan_module
    from evenkeel.placement.plan_file import dumps
    from evenkeel.placement.report import make_report

    request, found = content.request, content.plan
    texts = {"--output": dumps(content), "--report": json.dumps(encode(make_report(request, found)), indent=1) + "\n"}
    if sharding_plan is not None and found.placements:
        texts["--sharding-plan"] = sharding_plan_module(request, found, sharding_plan.stem)
    return texts
