"""`evenkeel plan`: where each embedding table should live."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainer_client.cli.common import CaOption, TokenOption, errors_in_a_sentence, waiting, write

INFEASIBLE_EXIT = 3
_TABLES_HELP = "YAML or JSON: a list of tables, a whole request, or a plan file."
_PROFILE_HELP = "Hardware profile written by `evenkeel calibrate`."
_HBM_HELP = "HBM of one rank for tables, in GiB, whatever the file reserves; --reserve is taken off it."
_RESERVE_HELP = (
    "HBM of one rank that the model and its activations need, such as 24GiB or 40%. By default 15% of a topology that "
    "is given by name, unless --hbm-gib says what tables may use."
)
_STATISTICS_HELP = "Key statistics that KeyStatistics.save wrote; once for the file of each rank."
_CLOCK_HELP = (
    "Seconds for which the plan and its contenders are each trained on this machine's GPUs, as many as the topology "
    "has ranks; the quickest is taken."
)
_HOT_HELP = (
    "HBM of one rank, in GiB at most, for hot rows: those that all ranks of a RoutedEmbeddingCollection hold in a step."
)
_DENSE_HELP = "Milliseconds that a step's dense part takes on the GPU."
_PLANNER_HELP = "URL of a planner to ask instead of planning here; embedded plans here."
_CACHE_HELP = "Folder in which proved plans are kept: the same request gets its plan again."
_SHARDING_HELP = "Write TorchRec's whole ShardingPlan here, as a Python module that needs only TorchRec."


def plan(
    tables: Annotated[Path, typer.Argument(help=_TABLES_HELP, exists=True, dir_okay=False)],
    topology: Annotated[str | None, typer.Option(help="Machines, such as h200x8 or h100x64/8 (8 a host).")] = None,
    hbm_gib: Annotated[float | None, typer.Option(help=_HBM_HELP)] = None,
    host_gib: Annotated[float | None, typer.Option(help="Memory of one host for tables, in GiB.")] = None,
    reserve: Annotated[str | None, typer.Option(help=_RESERVE_HELP)] = None,
    runtime: Annotated[str | None, typer.Option(help="dynamicemb or torchrec.")] = None,
    samples: Annotated[int | None, typer.Option(help="Samples of a batch on one rank.")] = None,
    profile: Annotated[Path | None, typer.Option(help=_PROFILE_HELP, exists=True, dir_okay=False)] = None,
    statistics: Annotated[list[Path] | None, typer.Option(help=_STATISTICS_HELP, exists=True, dir_okay=False)] = None,
    clock: Annotated[float | None, typer.Option(help=_CLOCK_HELP)] = None,
    dense_ms: Annotated[float | None, typer.Option(min=0, help=_DENSE_HELP)] = None,
    hot_rows_gib: Annotated[float | None, typer.Option(help=_HOT_HELP)] = None,
    device: Annotated[str, typer.Option(help="cuda, or cpu to try --clock without GPUs.")] = "cuda",
    planner: Annotated[
        str | None, typer.Option("--planner", "--url", envvar="EVENKEEL_PLANNER", help=_PLANNER_HELP)
    ] = None,
    cache: Annotated[Path | None, typer.Option(envvar="EVENKEEL_PLAN_CACHE", file_okay=False, help=_CACHE_HELP)] = None,
    tls_ca: CaOption = None,
    token_file: TokenOption = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the plan file here.")] = None,
    report: Annotated[
        Path | None, typer.Option(help="Write what each rank, host and table takes here, as JSON.")
    ] = None,
    sharding_plan: Annotated[Path | None, typer.Option(help=_SHARDING_HELP)] = None,
    code: Annotated[bool, typer.Option("--code", help="Print the lines to paste into a job.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan file instead of tables.")] = False,
) -> None:
    """Choose where each embedding table should live: HBM, host memory, or both.

    Exits with 3 where nothing fits, and says what would.
    """
    from evenkeel.credentials import read_credentials
    from evenkeel.placement.plan_file import PlanFile
    from evenkeel.planner_client import PlannerClient
    from trainer_client.cli import plan_io
    from trainer_client.cli.files import read

    paths = {"--output": output, "--report": report, "--sharding-plan": sharding_plan}
    outputs = {flag: path for flag, path in paths.items() if path is not None}
    quiet = as_json or code
    lines: list[str] = []
    with errors_in_a_sentence():
        request = plan_io.build_request(
            read(tables),
            topology=topology,
            hbm_gib=hbm_gib,
            host_gib=host_gib,
            reserve=reserve,
            profile=None if profile is None else read(profile, "a hardware profile"),
            runtime=runtime,
            step={"samples_per_rank": samples, "dense_ms": dense_ms},
        )
        plan_io.check_outputs(outputs, tables, request)
        traces = plan_io.read_statistics(statistics or ())
        if statistics:
            request, lines = plan_io.with_traces(traces, request)
        if hot_rows_gib is not None:
            request, hot = plan_io.with_room_for_hot_rows(hot_rows_gib, request)
            lines += hot
        client = PlannerClient.of(planner, credentials=read_credentials(tls_ca, token_file), cache=cache)
        with waiting("planning", quiet=quiet):
            content = PlanFile(request=request, plan=client.plan(request))
        if clock is not None and content.plan.placements:
            with waiting("running plans", quiet=quiet):
                content = plan_io.race(content, clock, traces, device)
        texts = plan_io.texts(content, sharding_plan)
    written = {flag: write(flag, path, texts[flag]) for flag, path in outputs.items() if flag in texts}
    if as_json:
        typer.echo(texts["--output"], nl=False)
    elif code:
        plan_io.show_code(content)
    else:
        plan_io.show(content, lines)
        for flag, is_there in written.items():
            if is_there:
                typer.echo(f"{flag[2:].replace('output', 'plan').replace('-', ' ')} written to {outputs[flag]}")
    if not all(written.values()):
        raise typer.Exit(2)
    if content.plan.seconds is None:
        raise typer.Exit(INFEASIBLE_EXIT)
