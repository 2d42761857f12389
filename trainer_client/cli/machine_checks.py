"""What `evenkeel doctor` looks at on this machine, and at the planner."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from evenkeel import __version__
from evenkeel.variables import misspelt
from trainer_client.cli.doctor import Finding, Status

_TIME_ERROR = 5  # adjtimex(2): the clock is not synchronised
_TIMEX_BYTES = 512  # more than struct timex has on any architecture
_WANTED = {
    "grpcio": "a balancer service needs it: pip install 'evenkeel[trainer]'",
    "torch": "training needs it: install the build for your CUDA version",
}
_OPTIONAL = ("torchrec", "fbgemm-gpu", "prometheus-client", "dynamicemb")


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


_MAX_SKEW_SECONDS = 30.0


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
