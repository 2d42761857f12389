"""What `evenkeel plan` does: makes a request of a file and of flags, and has plans raced."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import typer
from rich.console import Console

from evenkeel import key_statistics
from evenkeel.key_statistics import KeyTrace
from evenkeel.placement import InvalidInputError, PlanRequest, Runtime, whole_step_seconds
from evenkeel.placement.application import lines_to_paste, module_paths, sharding_plan_module
from evenkeel.placement.fields import decode, encode, quantity, require
from evenkeel.placement.hardware import MAX_BYTES
from evenkeel.placement.hot_rows import with_hot_rows
from evenkeel.placement.plan_file import PlanFile, dumps, measured_line
from evenkeel.placement.plan_text import PlanText
from evenkeel.placement.report import make_report
from evenkeel.plan_requests import DEFAULT_RESERVE, as_object, unpacked, with_measured

_LEAST_SIZE = 1 << 20
"""Bytes below which a reservation lacks its unit."""


def _note(text: str) -> None:
    typer.echo(f"note: {text}", err=True)


def build_request(
    content: object,
    *,
    topology: str | None,
    hbm_gib: float | None,
    host_gib: float | None,
    reserve: str | None,
    profile: object,
    runtime: str | None,
    step: Mapping[str, object],
) -> PlanRequest:
    """The request of a file's content and of flags, which go before it; notes say what may not be expected.

    Args:
        content: Of the file.
        topology: Machines in short.
        hbm_gib: HBM of a rank that tables may use, but for `reserve` where that is given.
        host_gib: Memory of a host that tables may use.
        reserve: HBM of a rank that tables may not use, in bytes or per cent.
        profile: Content of a hardware profile's file; None: as the request says.
        runtime: The library that will hold the tables.
        step: Fields of the step, where they are not None.
    """
    is_whole = hbm_gib is None and reserve is None
    value, measured = unpacked(content, topology=topology, reserve=DEFAULT_RESERVE if is_whole else 0.0)
    remedy = "give --topology, such as h200x8, or a topology in the file"
    require("topology" in value, "topology", None, "is missing", remedy)
    if profile is not None:
        value["hardware"], measured = profile, ()
    if runtime is not None:
        value["runtime"] = runtime
    if given := {name: field for name, field in step.items() if field is not None}:
        value["step"] = {**as_object("step", value.get("step", {})), **given}
    request = with_measured(decode(PlanRequest, value), measured)
    machines = request.topology
    if hbm_gib is not None:
        size = _bytes("--hbm-gib", hbm_gib)
        if (machines.hbm_reserved_fraction or machines.hbm_reserved_bytes) and reserve is None:
            _note(
                "--hbm-gib is what tables may use: what the file reserves of HBM is not taken off; --reserve would be"
            )
        if size > request.profile.hbm_bytes:
            gpu = f"the {request.profile.hbm_bytes / 2**30:.4g} GiB of a GPU of {request.profile.name}"
            _note(f"--hbm-gib {hbm_gib:g} is more than {gpu}")
        machines = replace(machines, hbm_bytes=size, hbm_reserved_fraction=0.0, hbm_reserved_bytes=0)
    if host_gib is not None:
        size = _bytes("--host-gib", host_gib)
        if machines.host_reserved_fraction or machines.host_reserved_bytes:
            _note("--host-gib is what tables may use: what the file reserves of host memory is not taken off")
        machines = replace(machines, host_bytes=size, host_reserved_fraction=0.0, host_reserved_bytes=0)
    if reserve is not None:
        share, size = _reserved(reserve)
        machines = replace(machines, hbm_reserved_fraction=share, hbm_reserved_bytes=size)
    return replace(request, topology=machines)


def _bytes(flag: str, gib: float) -> int:
    most = MAX_BYTES >> 30
    require(0 <= gib <= most, flag, gib, "is out of range", f"give a number from 0 to {most}")
    return round(gib * 2**30)


def _reserved(text: str) -> tuple[float, int]:
    """Part and bytes of the HBM that tables may not use, of a text such as `40%` or `24GiB`."""
    number, is_share = quantity(text.removesuffix("%")), text.endswith("%")
    if number is None or not 0 <= number <= (100 if is_share else MAX_BYTES):
        remedy = "give a size such as 24GiB, or a share from 0% to 100%"
        raise InvalidInputError("--reserve", text, "is no part of a rank's HBM", remedy)
    if is_share:
        return float(number) / 100, 0
    what, remedy = "is a number of bytes that reserves next to nothing", f"write {text}% or {text}GiB"
    require(not 0 < number < _LEAST_SIZE, "--reserve", text, what, remedy)
    return 0.0, math.ceil(number)


def read_statistics(files: Sequence[Path]) -> dict[str, KeyTrace]:
    """The key statistics of all ranks, by table."""
    contents: dict[bytes, Path] = {}
    every = []
    for path in files:
        content = path.read_bytes()
        if content in contents:
            what = f"holds the same as {contents[content]}"
            raise InvalidInputError("--statistics", str(path), what, "give the file of each rank once")
        contents[content] = path
        try:
            every.append(key_statistics.loads(content))
        except InvalidInputError as error:
            raise InvalidInputError(f"--statistics {path}", error.value, error.problem, error.remedy) from None
    return key_statistics.merge(every)


def with_traces(traces: Mapping[str, KeyTrace], request: PlanRequest) -> tuple[PlanRequest, list[str]]:
    """The request with key statistics, and a line on each; notes name tables that do not meet."""
    names = [table.name for table in request.tables]
    strange, without = [name for name in traces if name not in names], [name for name in names if name not in traces]
    if len(strange) == len(traces):
        remedy = f"name tables as the statistics do: {', '.join(strange[:5])}"
        raise InvalidInputError("--statistics", names[:5], "are tables of which no statistics tell", remedy)
    if strange:
        _note(f"statistics of tables that are not in the request: {', '.join(strange)}")
    if without:
        _note(f"tables without statistics, planned with the access that they are given: {', '.join(without)}")
    request, curves = key_statistics.with_statistics(request, traces)
    lines = []
    for name, curve in curves.items():
        moved = f"; {curve.drift:.0%} of its lookups went over to other keys" if curve.is_drifting else ""
        lines.append(f"misses of {name} within {curve.error:.3f}, from {curve.sampled_keys} sampled keys{moved}")
    return request, lines


def with_room_for_hot_rows(gib: float, request: PlanRequest) -> tuple[PlanRequest, list[str]]:
    """The request with less HBM for tables, by what hot rows take of it, and a line on those of each table."""
    request, hot = with_hot_rows(request, _bytes("--hot-rows-gib", gib))
    return request, [
        f"{each.table}: {each.rows:,} hot rows in {each.hbm_bytes / 2**20:.1f} MiB of HBM; a rank sends "
        f"{each.all_to_all_bytes / 1e6:.1f} MB by All2All, {each.without_bytes / 1e6:.1f} MB without"
        for each in hot
    ]


def check_outputs(outputs: Mapping[str, Path], tables: Path, request: PlanRequest) -> None:
    """Refuses files, by flag, that could not be made or written, or would be lost: before anything is planned."""
    by_path: dict[Path, str] = {}
    for flag, path in outputs.items():
        its = by_path.setdefault(path, flag)
        require(its == flag, flag, str(path), f"is the file of {its} too", "name another")
        lost = path.exists() and path.samefile(tables)
        require(not lost, flag, str(path), "is the file that is read", "name another")
    flag = "--sharding-plan"
    if module := outputs.get(flag):
        is_module = module.stem.isidentifier() and module.suffix == ".py"
        require(is_module, flag, str(module), "is no name of a Python module", "name it like sharding.py")
        what = f"is TorchRec's, and the runtime is {request.runtime.value}"
        remedy = "add --runtime torchrec, or leave it out for --code"
        require(request.runtime is Runtime.TORCHREC, flag, str(module), what, remedy)
        module_paths(request)


def race(content: PlanFile, seconds: float, traces: Mapping[str, KeyTrace], device: str) -> PlanFile:
    """The quickest of a plan and its contenders, trained on as many ranks of this machine as the plan is for."""
    import torch

    from trainer_client.planning.clock import check_race, race_of_file
    from trainer_client.planning.collective import run_on_ranks

    ranks = content.request.topology.ranks if device == "cpu" else torch.cuda.device_count()
    check_race(content.request, ranks, seconds)
    return run_on_ranks(race_of_file, ranks, device, content, traces, seconds)


def texts(content: PlanFile, sharding_plan: Path | None) -> dict[str, str]:
    """What can be written, by the flag that names its file."""
    report = encode(make_report(content.request, content.plan))
    result = {"--output": dumps(content), "--report": json.dumps(report, indent=1) + "\n"}
    if sharding_plan is not None and content.plan.placements:
        result["--sharding-plan"] = sharding_plan_module(content.request, content.plan, sharding_plan.stem)
    return result


def show_code(content: PlanFile) -> None:
    """Prints lines to paste, or why there are none."""
    typer.echo(lines_to_paste(content.request, content.plan), nl=False)
    if not content.plan.placements:
        Console(stderr=True).print(PlanText(content.plan, None))


def show(content: PlanFile, lines: Sequence[str]) -> None:
    """Prints a plan with its report, what was measured, and further lines."""
    request, chosen = content.request, content.plan
    Console().print(PlanText(chosen, make_report(request, chosen)))
    whole = whole_step_seconds(request, chosen)
    if whole is not None and request.runtime is Runtime.TORCHREC:
        typer.echo(f"a whole step of these tables, with what the host launches: about {whole * 1e3:.3g} ms")
    for line in (*map(measured_line, content.measured), *lines):
        typer.echo(line)
