"""`evenkeel plan`: where each embedding table should live."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainer_client.cli.connection_options import TokenOption

INFEASIBLE_EXIT = 3


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
    hbm_gib: Annotated[float | None, typer.Option(help="HBM of one rank, in GiB, instead of the profile's.")] = None,
    host_gib: Annotated[
        float | None, typer.Option(help="Memory of one host, in GiB, instead of the profile's.")
    ] = None,
    runtime: Annotated[str | None, typer.Option(help="dynamicemb or torchrec.")] = None,
    samples: Annotated[int | None, typer.Option(help="Samples of a batch on one rank.")] = None,
    profile: Annotated[Path | None, typer.Option(help="Hardware profile written by `evenkeel calibrate`.")] = None,
    url: Annotated[str | None, typer.Option(help="Ask the planner at this address instead of planning here.")] = None,
    tls_ca: Annotated[Path | None, typer.Option(help="Authorities of the planner; EVENKEEL_TLS_CA.")] = None,
    token_file: TokenOption = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the plan file here.")] = None,
    report: Annotated[
        Path | None, typer.Option(help="Write what each rank, host and table takes here, as JSON.")
    ] = None,
    code: Annotated[bool, typer.Option("--code", help="Print the lines to paste into a job.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan file instead of tables.")] = False,
) -> None:
    """Choose where each embedding table should live: HBM, host memory, or both.

    Exits with 3 where nothing fits, and says what would.
    """
    import json

    from rich.console import Console

    from evenkeel.credentials import read_credentials
    from evenkeel.placement import InvalidInputError, Status
    from evenkeel.placement.application import lines_to_paste
    from evenkeel.placement.codec import encode
    from evenkeel.placement.plan_file import PlanFile, dumps
    from evenkeel.placement.plan_text import PlanText
    from evenkeel.placement.report import make_report
    from trainer_client.cli.placing import build_request, read, read_profile, solve, written

    try:
        request = build_request(read(tables), topology, hbm_gib, host_gib, runtime, samples, read_profile(profile))
        found = solve(request, url, read_credentials(tls_ca, token_file), quiet=as_json or code)
    except (InvalidInputError, OSError, RuntimeError, ValueError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    text, parts = dumps(PlanFile(request=request, plan=found)), make_report(request, found)
    files = {"--output": (output, text), "--report": (report, json.dumps(encode(parts), indent=1) + "\n")}
    troubles = [f"{flag}: {why}" for flag, (path, content) in files.items() if path and (why := written(path, content))]
    if as_json:
        typer.echo(text, nl=False)
    elif code:
        typer.echo(lines_to_paste(request, found), nl=False)
    else:
        Console().print(PlanText(found, parts))
        if output is not None and not any(trouble.startswith("--output") for trouble in troubles):
            typer.echo(f"plan written to {output}")
    for trouble in troubles:
        typer.echo(f"error: {trouble}", err=True)
    if troubles:
        raise typer.Exit(2)
    if found.status in (Status.INFEASIBLE, Status.UNKNOWN):
        raise typer.Exit(INFEASIBLE_EXIT)
