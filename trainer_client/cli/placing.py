"""What `evenkeel plan` does: makes a request of a file and of flags, and has it planned here or by a service."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from evenkeel.credentials import Credentials
from evenkeel.placement import InvalidInputError, Plan, PlanRequest, Runtime
from evenkeel.placement.codec import decode, encode
from evenkeel.placement.hardware import HardwareProfile, parse_profile
from evenkeel.placement.model import MAX_BYTES
from evenkeel.placement.plan_file import PlanFile, dumps, loads
from evenkeel.plan_requests import DEFAULT_RESERVE, as_object, quantity, unpacked, with_measured
from evenkeel.planner_client import PlannerClient
from trainer_client.cli.files import read

if TYPE_CHECKING:
    from evenkeel.key_statistics import MeasuredCurve

_LONGEST_CLOCK = 3600.0
_LEAST_SIZE = 1 << 20
"""Bytes below which a reservation lacks its unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """What the command line says of the request.

    Attributes:
        topology: Machines in short.
        hbm_gib: HBM of a rank that tables may use, but for `reserve` where that is given.
        host_gib: Memory of a host that tables may use.
        reserve: HBM of a rank that tables may not use, in bytes or per cent.
        runtime: Name of the runtime.
        samples: Samples of a batch on one rank.
        profile: File of a hardware profile.
        dense_ms: Time of a step's dense part.
    """

    topology: str | None = None
    hbm_gib: float | None = None
    host_gib: float | None = None
    reserve: str | None = None
    runtime: str | None = None
    samples: int | None = None
    profile: Path | None = None
    dense_ms: float | None = None


def build_request(content: object, flags: Flags, note: Callable[[str], None] = lambda _: None) -> PlanRequest:
    """The request of a file's content and of flags, which go before it; `note` is told what may not be expected."""
    is_whole = flags.hbm_gib is None and flags.reserve is None
    value, measured = unpacked(content, topology=flags.topology, reserve=DEFAULT_RESERVE if is_whole else 0.0)
    profile = None if flags.profile is None else _profile(flags.profile)
    if "topology" not in value:
        remedy = "give --topology, such as h200x8, or a topology in the file"
        raise InvalidInputError("topology", None, "is missing", remedy)
    if profile is not None:
        value["hardware"] = encode(profile)
    if flags.runtime is not None:
        value["runtime"] = flags.runtime
    step = {"samples_per_rank": flags.samples, "dense_ms": flags.dense_ms}
    step = {name: given for name, given in step.items() if given is not None}
    if step:
        value["step"] = {**as_object("step", value.get("step", {})), **step}
    request = decode(PlanRequest, value)
    return _with_memory(request if profile is not None else with_measured(request, measured), flags, note)


def _with_memory(request: PlanRequest, flags: Flags, note: Callable[[str], None]) -> PlanRequest:
    machines, profile = request.topology, request.profile
    if flags.hbm_gib is not None:
        size = _gib("--hbm-gib", flags.hbm_gib)
        if (machines.hbm_reserved_fraction or machines.hbm_reserved_bytes) and flags.reserve is None:
            note("--hbm-gib is what tables may use: what the file reserves of HBM is not taken off; --reserve would be")
        if size > profile.hbm_bytes:
            gpu = f"the {profile.hbm_bytes / 2**30:.4g} GiB of a GPU of {profile.name}"
            note(f"--hbm-gib {flags.hbm_gib:g} is more than {gpu}")
        machines = replace(machines, hbm_bytes=size, hbm_reserved_fraction=0.0, hbm_reserved_bytes=0)
    if flags.host_gib is not None:
        if machines.host_reserved_fraction or machines.host_reserved_bytes:
            note("--host-gib is what tables may use: what the file reserves of host memory is not taken off")
        size = _gib("--host-gib", flags.host_gib)
        machines = replace(machines, host_bytes=size, host_reserved_fraction=0.0, host_reserved_bytes=0)
    if flags.reserve is not None:
        share, size = _reserve(flags.reserve)
        machines = replace(machines, hbm_reserved_fraction=share, hbm_reserved_bytes=size)
    return replace(request, topology=machines)


def _reserve(text: str) -> tuple[float, int]:
    """Part and bytes of the HBM that tables may not use, of a text such as `40%` or `24GiB`."""
    number = quantity(text.removesuffix("%"))
    if text.endswith("%"):
        if number is None or not 0 <= number <= 100:
            raise InvalidInputError("--reserve", text, "is out of range", "give 0% to 100%")
        return float(number) / 100, 0
    if number is None or not 0 <= number <= MAX_BYTES:
        raise InvalidInputError("--reserve", text, "is no size", "give a size such as 24GiB, or a share such as 40%")
    if 0 < number < _LEAST_SIZE:
        remedy = f"write {text}% or {text}GiB"
        raise InvalidInputError("--reserve", text, "is a number of bytes that reserves next to nothing", remedy)
    return 0.0, math.ceil(number)


def _gib(flag: str, gib: float) -> int:
    if not 0 <= gib * 2**30 <= MAX_BYTES:
        raise InvalidInputError(flag, gib, "is out of range", f"give a number from 0 to {MAX_BYTES >> 30}")
    return round(gib * 2**30)


def measured(
    request: PlanRequest, files: Sequence[Path], note: Callable[[str], None]
) -> tuple[PlanRequest, dict[str, MeasuredCurve]]:
    """The request with the key statistics of files, and their curves; `note` is told of names that do not meet."""
    from evenkeel.key_statistics import loads, merge, with_statistics

    contents: dict[bytes, Path] = {}
    every = []
    for path in files:
        try:
            content = path.read_bytes()
        except OSError as error:
            remedy = "name a file that KeyStatistics.save wrote"
            raise InvalidInputError(f"--statistics {path}", error.strerror, "cannot be read", remedy) from None
        if content in contents:
            what = f"holds the same as {contents[content]}"
            raise InvalidInputError("--statistics", str(path), what, "give the file of each rank once")
        contents[content] = path
        try:
            every.append(loads(content))
        except InvalidInputError as error:
            raise InvalidInputError(f"--statistics {path}", error.value, error.problem, error.remedy) from None
    traces = merge(every)
    names = [table.name for table in request.tables]
    strange, without = [name for name in traces if name not in names], [name for name in names if name not in traces]
    if len(strange) == len(traces):
        remedy = f"name tables as the statistics do: {', '.join(strange[:5])}"
        raise InvalidInputError("--statistics", names[:5], "are tables of which no statistics tell", remedy)
    if strange:
        note(f"statistics of tables that are not in the request: {', '.join(strange)}")
    if without:
        note(f"tables without statistics, planned with the access that they are given: {', '.join(without)}")
    return with_statistics(request, traces)


def check_sharding_plan(path: Path | None, request: PlanRequest) -> None:
    """Refuses a sharding plan that could not be written, before anything is planned."""
    if path is None:
        return
    flag = "--sharding-plan"
    if request.runtime is not Runtime.TORCHREC:
        what = f"is TorchRec's, and the runtime is {request.runtime.value}"
        raise InvalidInputError(flag, str(path), what, "add --runtime torchrec, or leave it out for --code")
    if not path.stem.isidentifier() or path.suffix != ".py":
        remedy = "name it like sharding.py"
        raise InvalidInputError(flag, str(path), "is no name of a Python module", remedy)
    for index, table in enumerate(request.tables):
        if not table.group:
            remedy = "give the path of the module that owns the table, or load the plan file with load_sharding_plan"
            raise InvalidInputError(f"tables[{index}].group", table.group, f"is empty, and {flag} needs it", remedy)


def solve(
    request: PlanRequest, planner: str | None, credentials: Credentials, cache: Path | None, *, quiet: bool
) -> Plan:
    """The plan of a request, made here where no planner is named."""
    console = Console(stderr=True)
    with console.status("planning", spinner="line") if not quiet else Console(quiet=True).status(""):
        return PlannerClient.of(planner, credentials=credentials, cache=cache).plan(request)


def race(
    request: PlanRequest,
    found: Plan,
    seconds: float,
    *,
    statistics: Sequence[Path],
    device: str,
    quiet: bool,
) -> PlanFile:
    """The quickest of a plan and its contenders, trained on as many ranks of this machine as the plan is for."""
    try:
        import torch

        from trainer_client.planning.clock import check_request
        from trainer_client.planning.collective import run_on_ranks
    except ModuleNotFoundError as error:
        raise RuntimeError(f"--clock needs torch and TorchRec: {error}; install them, or leave it out") from None
    if not 0 < seconds <= _LONGEST_CLOCK:
        remedy = f"give the seconds that each plan is trained, up to {_LONGEST_CLOCK:g}"
        raise InvalidInputError("--clock", seconds, "is no time", remedy)
    ranks = request.topology.ranks if device == "cpu" else torch.cuda.device_count()
    check_request(request, ranks)
    console = Console(stderr=True)
    waiting = console.status("running plans", spinner="line") if not quiet else Console(quiet=True).status("")
    with tempfile.TemporaryDirectory() as folder, waiting:
        path = Path(folder) / "plan.json"
        path.write_text(dumps(PlanFile(request=request, plan=found)), "utf-8")
        flags: list[object] = ["--plan", path, "--seconds", seconds, "--device", device]
        flags += [part for file in statistics for part in ("--statistics", file)]
        run_on_ranks("trainer_client.planning.clock", ranks, *flags)
        return loads(path.read_text("utf-8"))


def _profile(path: Path) -> HardwareProfile:
    return parse_profile(read(path, "a hardware profile, as `evenkeel calibrate` writes it,"))
