"""`evenkeel doctor`: what is wrong between this machine and the services, and what to do about it."""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.util
import json
import os
import platform
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from evenkeel import __version__
from evenkeel.variables import misspelt
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


_TIME_ERROR = 5  # adjtimex(2): the clock is not synchronised
_TIMEX_BYTES = 512  # more than struct timex has on any architecture
_WANTED = {
    "grpcio": "a balancer service needs it: pip install 'evenkeel[trainer]'",
    "torch": "training needs it: install the build for your CUDA version",
}
_OPTIONAL = ("torchrec", "fbgemm-gpu", "prometheus-client", "dynamicemb")
_MAX_SKEW_SECONDS = 30.0
_COLORS = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "red", Status.SKIP: "dim"}


def doctor(
    balancer: BalancerOption = None,
    planner: Annotated[
        str | None, typer.Option("--planner", envvar="EVENKEEL_PLANNER", help="URL of a planner.")
    ] = None,
    job: Annotated[
        str | None, typer.Option(envvar="EVENKEEL_JOB", help="A training job: may it be planned with this token?")
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
    yield "variables", check_variables
    if balancer in ("embedded", "off"):
        yield "balancer", lambda: [Finding("balancer", Status.SKIP, f"EVENKEEL_BALANCER is {balancer!r}: none is used")]
    elif balancer:
        from trainer_client.cli.balancer_checks import check_balancers

        yield "balancer", lambda: check_balancers(balancer, job, tls_ca, token_file, timeout)
    else:
        yield "balancer", lambda: [Finding("balancer", Status.SKIP, "no address given", "pass --balancer host:port")]
    if planner and planner != "embedded":
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


def check_variables() -> list[Finding]:
    """Variables that are likely misspelt, which nothing reads."""
    return [
        Finding("variables", Status.WARN, f"{name} is set, and nothing reads it", f"did you mean {meant}?")
        for name, meant in sorted(misspelt(os.environ).items())
    ]


def check_clock() -> list[Finding]:
    """Whether the kernel thinks that its clock is right; tokens and certificates expire by it."""
    try:
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    except (OSError, AttributeError):
        return [Finding("clock", Status.SKIP, "this system does not tell whether its clock is synchronised")]
    if state == _TIME_ERROR:
        return [Finding("clock", Status.WARN, "the kernel's clock is not synchronised",
                        "run chrony or systemd-timesyncd; certificates and tokens expire by the clock")]  # fmt: skip
    if state < 0:
        return [Finding("clock", Status.SKIP, "the state of the clock cannot be read")]
    return [Finding("clock", Status.OK, "synchronised")]


def check_packages() -> list[Finding]:
    """Versions of what Evenkeel works with."""
    findings = [Finding("evenkeel", Status.OK, f"{__version__}, Python {platform.python_version()}, {sys.platform}")]
    for name in ("numpy", "numba", *_WANTED, *_OPTIONAL):
        try:
            findings.append(Finding(name, Status.OK, version(name)))
        except PackageNotFoundError:
            if name in _WANTED:
                findings.append(Finding(name, Status.WARN, "not installed", _WANTED[name]))
    return findings


def check_gpus() -> list[Finding]:
    """Whether PyTorch sees the GPUs and can talk between them."""
    if importlib.util.find_spec("torch") is None:
        return [Finding("GPUs", Status.SKIP, "PyTorch is not installed")]
    import torch
    import torch.distributed as dist

    if not torch.cuda.is_available():
        built = torch.version.cuda
        remedy = "" if built is None else "nvidia-smi tells whether the driver sees a GPU, and which CUDA it supports"
        kind = "a CPU build of PyTorch" if built is None else f"PyTorch for CUDA {built} finds no GPU"
        return [Finding("GPUs", Status.WARN if built else Status.SKIP, kind, remedy)]
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    counted = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    findings = [Finding("GPUs", Status.OK, f"{counted}, CUDA {torch.version.cuda}")]
    if not dist.is_nccl_available():
        findings.append(Finding("NCCL", Status.FAIL, "this PyTorch has none", "install an official CUDA build"))
        return findings
    numbers = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    findings.append(Finding("NCCL", Status.OK, ".".join(map(str, numbers))))
    try:
        assert float(torch.ones(8, device="cuda").sum()) == 8
    except (RuntimeError, AssertionError) as error:
        first = str(error).partition("\n")[0]
        findings.append(Finding("CUDA", Status.FAIL, first, "the driver is older than this PyTorch's CUDA: update it"))
    return findings


def check_planner(planner: str, ca: Path | None, timeout: float, *, now: Callable[[], float]) -> list[Finding]:
    """Whether a planner is ready, and whether its clock and ours agree."""
    url = planner.rstrip("/") + "/readyz"
    try:
        context = ssl.create_default_context(cafile=None if ca is None else str(ca))
        with urllib.request.urlopen(url, timeout=timeout, context=context) as response:
            date = response.headers.get("date")
    except urllib.error.HTTPError as error:
        remedy = "it starts or drains: try again in a while" if error.code == 503 else "is this a planner's address?"
        return [Finding("planner", Status.FAIL, f"{url} answers {error.code}", remedy)]
    except (OSError, ValueError) as error:
        return [Finding("planner", Status.FAIL, f"{url}: {error}", "check the URL, the network and EVENKEEL_TLS_CA")]
    findings = [Finding("planner", Status.OK, "ready")]
    if date is not None:
        skew = now() - parsedate_to_datetime(date).timestamp()
        if abs(skew) > _MAX_SKEW_SECONDS:
            findings.append(Finding("clocks", Status.WARN, f"ours is {skew:+.0f} s off the planner's",
                                    "synchronise both: certificates and tokens expire by them"))  # fmt: skip
        else:
            findings.append(Finding("clocks", Status.OK, "agree with the planner's"))
    return findings
