"""What `evenkeel plan` does: makes a request of a file and of flags, and has it planned here or by a service."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from evenkeel.credentials import Credentials
from evenkeel.placement import InvalidInputError, Plan, PlanRequest, Runtime, parse_topology
from evenkeel.placement.codec import decode, encode
from evenkeel.placement.hardware import HardwareProfile, parse_profile
from evenkeel.placement.model import MAX_BYTES
from evenkeel.placement.plan_file import FORMAT
from evenkeel.planner_client import PlannerClient
from trainer_client.cli.files import quantity, read

if TYPE_CHECKING:
    from evenkeel.key_statistics import MeasuredCurve

_LEAST_SIZE = 1 << 20
"""Bytes below which a reservation lacks its unit."""
DEFAULT_RESERVE = 0.15
"""Part of the HBM of a topology given by name that is left for the model, as TorchRec's planner leaves it."""


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
    """

    topology: str | None = None
    hbm_gib: float | None = None
    host_gib: float | None = None
    reserve: str | None = None
    runtime: str | None = None
    samples: int | None = None
    profile: Path | None = None


def build_request(content: object, flags: Flags, note: Callable[[str], None] = lambda _: None) -> PlanRequest:
    """The request of a file's content and of flags, which go before it; `note` is told what may not be expected.

    Raises:
        InvalidInputError: If a field is missing, unknown or impossible.
    """
    value: dict[str, Any] = {"tables": content} if isinstance(content, list) else dict(_object("tables", content))
    if value.get("format") == FORMAT:  # a plan file: its request is planned again
        value = dict(_object("request", value.get("request")))
    profile = None if flags.profile is None else _profile(flags.profile)
    named = flags.topology or value.get("topology")
    if isinstance(named, str):
        name, machines = parse_topology(named)
        if flags.hbm_gib is None and flags.reserve is None:
            machines = replace(machines, hbm_reserved_fraction=DEFAULT_RESERVE)
        value["topology"] = encode(machines)
        if profile is None and "hardware" not in value:
            value["hardware"] = name
    if "topology" not in value:
        remedy = "give --topology, such as h200x8, or a topology in the file"
        raise InvalidInputError("topology", None, "is missing", remedy)
    if profile is not None:
        value["hardware"] = encode(profile)
    if flags.runtime is not None:
        value["runtime"] = flags.runtime
    if flags.samples is not None:
        value["step"] = {**_object("step", value.get("step", {})), "samples_per_rank": flags.samples}
    return _with_memory(decode(PlanRequest, value), flags, note)


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
    """The request with the key statistics of files, and their curves; `note` is told of names that do not meet.

    Raises:
        InvalidInputError: If a file is there twice, is none of statistics, or none is of a table of the request.
    """
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
    """Refuses a sharding plan that could not be written, before anything is planned.

    Raises:
        InvalidInputError: If the runtime has none, or a table does not name its module.
    """
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
    """The plan of a request, made here where no planner is named.

    Raises:
        PlannerError: If the service refused or could not be reached.
        ValueError: If the request, the address or a file of the credentials cannot be used.
    """
    console = Console(stderr=True)
    with console.status("planning", spinner="line") if not quiet else Console(quiet=True).status(""):
        return PlannerClient.of(planner, credentials=credentials, cache=cache).plan(request)


def _profile(path: Path) -> HardwareProfile:
    return parse_profile(read(path, "a hardware profile, as `evenkeel calibrate` writes it,"))


def _object(field: str, content: object) -> dict[str, Any]:
    if not isinstance(content, dict):
        whole = field == "tables"
        what = "is neither a list nor an object" if whole else "is no object"
        remedy = "give a list of tables" if whole else "give its fields by name"
        raise InvalidInputError(field, content, what, remedy)
    return content
