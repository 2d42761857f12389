"""`evenkeel doctor`: what is wrong between this machine and the services, and what to do about it."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import platform
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from evenkeel import __version__
from evenkeel.credentials import read_credentials
from evenkeel.variables import misspelt
from trainer_client.cli.common import CaOption, Finding, Status, TokenOption, waiting

_NOT_SYNCHRONISED = 5  # TIME_ERROR of adjtimex(2)
_TIMEX_BYTES = 512  # more than struct timex has on any architecture
_WANTED = {
    "grpcio": "a balancer service needs it: pip install 'evenkeel[trainer]'",
    "torch": "training needs it: install the build for your CUDA version",
}
_OPTIONAL = ("torchrec", "fbgemm-gpu", "prometheus-client", "dynamicemb")
_MAX_SKEW_SECONDS = 30.0
_BALANCER_HELP = "host:port of a balancer or of several behind one name, or IP:port,IP:port."


def doctor(
    balancer: Annotated[str | None, typer.Option(envvar="EVENKEEL_BALANCER", help=_BALANCER_HELP)] = None,
    planner: Annotated[str | None, typer.Option(envvar="EVENKEEL_PLANNER", help="URL of a planner.")] = None,
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
    with waiting("checking") as status:
        for finding in _checks(balancer, planner, job, tls_ca, token_file, timeout):
            status.update(f"checking; {finding.check}: {finding.status.name.lower()}")
            findings.append(finding)
    if as_json:
        typer.echo(json.dumps([each._asdict() | {"status": each.status.name.lower()} for each in findings], indent=2))
    else:
        table = Table("", "check", "finding", "what to do", show_edge=False, pad_edge=False)
        for each in findings:
            cells = map(escape, (each.check, each.text, each.remedy))
            table.add_row(f"[{each.status}]{each.status.name.lower()}[/]", *cells)
        Console().print(table)
    raise typer.Exit(1 if any(finding.status is Status.FAIL for finding in findings) else 0)


def _checks(
    balancer: str | None,
    planner: str | None,
    job: str | None,
    ca: Path | None,
    token_file: Path | None,
    timeout: float,
) -> Iterator[Finding]:
    yield from _check_variables()
    if balancer in ("embedded", "off"):
        yield Finding("balancer", Status.SKIP, f"EVENKEEL_BALANCER is {balancer!r}: none is used")
    elif balancer:
        from trainer_client.cli.balancer_checks import check_balancers

        yield from check_balancers(balancer, job, ca, token_file, timeout)
    else:
        yield Finding("balancer", Status.SKIP, "no address given", "pass --balancer host:port")
    if planner and planner != "embedded":
        yield from _check_planner(planner.rstrip("/") + "/readyz", ca, timeout)
    yield from _check_clock()
    yield from _check_packages()
    yield from _check_gpus()


def _check_variables() -> Iterator[Finding]:
    for name, meant in sorted(misspelt(os.environ).items()):
        yield Finding("variables", Status.WARN, f"{name} is set, and nothing reads it", f"did you mean {meant}?")


def _check_clock() -> Iterator[Finding]:
    """Whether the kernel thinks that its clock is right; tokens and certificates expire by it."""
    try:
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    except (OSError, AttributeError):
        state = -1
    if state == _NOT_SYNCHRONISED:
        remedy = "run chrony or systemd-timesyncd; certificates and tokens expire by the clock"
        yield Finding("clock", Status.WARN, "the kernel's clock is not synchronised", remedy)
    elif state < 0:
        yield Finding("clock", Status.SKIP, "this system does not tell whether its clock is synchronised")
    else:
        yield Finding("clock", Status.OK, "synchronised")


def _check_packages() -> Iterator[Finding]:
    yield Finding("evenkeel", Status.OK, f"{__version__}, Python {platform.python_version()}, {sys.platform}")
    for name in ("numpy", "numba", *_WANTED, *_OPTIONAL):
        try:
            yield Finding(name, Status.OK, version(name))
        except PackageNotFoundError:
            if name in _WANTED:
                yield Finding(name, Status.WARN, "not installed", _WANTED[name])


def _check_gpus() -> Iterator[Finding]:
    """Whether PyTorch sees the GPUs and can talk between them."""
    if importlib.util.find_spec("torch") is None:
        yield Finding("GPUs", Status.SKIP, "PyTorch is not installed")
        return
    import torch
    import torch.distributed as dist

    built = torch.version.cuda
    if not torch.cuda.is_available() and built is None:
        yield Finding("GPUs", Status.SKIP, "a CPU build of PyTorch")
        return
    if not torch.cuda.is_available():
        remedy = "nvidia-smi tells whether the driver sees a GPU, and which CUDA it supports"
        yield Finding("GPUs", Status.WARN, f"PyTorch for CUDA {built} finds no GPU", remedy)
        return
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    counted = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    yield Finding("GPUs", Status.OK, f"{counted}, CUDA {built}")
    if not dist.is_nccl_available():
        yield Finding("NCCL", Status.FAIL, "this PyTorch has none", "install an official CUDA build")
        return
    numbers = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    yield Finding("NCCL", Status.OK, ".".join(map(str, numbers)))
    try:
        torch.ones(8, device="cuda").sum().item()
    except RuntimeError as error:
        remedy = "the driver is older than this PyTorch's CUDA: update it"
        yield Finding("CUDA", Status.FAIL, str(error).partition("\n")[0], remedy)


def _check_planner(url: str, ca: Path | None, timeout: float) -> Iterator[Finding]:
    """Whether a planner is ready, and whether its clock and ours agree."""
    try:
        context = read_credentials(ca, None).ssl_context()
        with urllib.request.urlopen(url, timeout=timeout, context=context) as response:
            date = response.headers.get("date")
    except urllib.error.HTTPError as error:
        remedy = "it starts or drains: try again in a while" if error.code == 503 else "is this a planner's address?"
        yield Finding("planner", Status.FAIL, f"{url} answers {error.code}", remedy)
        return
    except (OSError, ValueError) as error:
        yield Finding("planner", Status.FAIL, f"{url}: {error}", "check the URL, the network and EVENKEEL_TLS_CA")
        return
    yield Finding("planner", Status.OK, "ready")
    skew = 0.0 if date is None else time.time() - parsedate_to_datetime(date).timestamp()
    if abs(skew) > _MAX_SKEW_SECONDS:
        remedy = "synchronise both: certificates and tokens expire by them"
        yield Finding("clocks", Status.WARN, f"ours is {skew:+.0f} s off the planner's", remedy)
