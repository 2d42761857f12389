"""`evenkeel doctor`: what is wrong between this machine and the services, and what to do about it."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trainer_client.cli.connection_options import BalancerOption, CaOption, TokenOption


class Status(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        check: What was looked at.
        status: How bad it is.
        text: What was found.
        remedy: What to do; empty when there is nothing to do.
    """

    check: str
    status: Status
    text: str
    remedy: str = ""


_COLORS = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "red", Status.SKIP: "dim"}


def doctor(
    balancer: BalancerOption = None,
    planner: Annotated[
        str | None, typer.Option("--planner", envvar="EVENKEEL_PLANNER", help="URL of a planner.")
    ] = None,
    job: Annotated[
        str | None, typer.Option(envvar="EVENKEEL_JOB", help="A training job: which balancer does it belong to?")
    ] = None,
    tls_ca: CaOption = None,
    token_file: TokenOption = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that each check may wait.")] = 5.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check address, TLS, token, versions, clock and GPU stack, and say what to do.

    Exit code: 0 if nothing is broken (there may be warnings), 1 if something is, 2 if the command line is wrong.
    """
    findings: list[Finding] = []
    console = Console(stderr=True)
    with console.status("checking") as status:
        for title, check in _checks(balancer, planner, job, tls_ca, token_file, timeout):
            status.update(f"checking {title}")
            findings.extend(check())
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        _show(findings)
    raise typer.Exit(1 if any(finding.status is Status.FAIL for finding in findings) else 0)


def _checks(
    balancer: str | None,
    planner: str | None,
    job: str | None,
    tls_ca: Path | None,
    token_file: Path | None,
    timeout: float,
) -> Iterator[tuple[str, Callable[[], list[Finding]]]]:
    from trainer_client.cli.machine_checks import check_clock, check_gpus, check_packages, check_variables

    yield "variables", check_variables
    if balancer in ("embedded", "off"):
        yield "balancer", lambda: [Finding("balancer", Status.SKIP, f"EVENKEEL_BALANCER is {balancer!r}: none is used")]
    elif balancer:
        from trainer_client.cli.balancer_checks import check_balancers

        yield "balancer", lambda: check_balancers(balancer, job, tls_ca, token_file, timeout)
    else:
        yield "balancer", lambda: [Finding("balancer", Status.SKIP, "no address given", "pass --balancer host:port")]
    if planner and planner != "embedded":
        from trainer_client.cli.machine_checks import check_planner

        yield "planner", lambda: check_planner(planner, tls_ca, timeout, now=time.time)
    yield "clock", check_clock
    yield "packages", check_packages
    yield "GPUs", check_gpus


def _show(findings: list[Finding]) -> None:
    table = Table(show_edge=False, pad_edge=False)
    for column in ("", "check", "finding", "what to do"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        color = _COLORS[finding.status]
        table.add_row(
            f"[{color}]{finding.status.value}[/]", *map(escape, (finding.check, finding.text, finding.remedy))
        )
    Console().print(table)
