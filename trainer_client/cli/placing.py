"""What `evenkeel plan` does: makes a request, and has it planned here or by a service."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from evenkeel.credentials import Credentials
from evenkeel.placement import InvalidInputError, Plan, PlanRequest, parse_topology
from evenkeel.placement.codec import decode, encode
from evenkeel.placement.hardware import HardwareProfile, parse_profile
from evenkeel.placement.model import MAX_BYTES
from evenkeel.placement.plan_file import FORMAT
from evenkeel.planner_client import PlannerClient

_POWER = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d{1,2}$")


def build_request(
    content: object,
    topology: str | None,
    hbm_gib: float | None,
    host_gib: float | None,
    runtime: str | None,
    samples: int | None,
    profile: HardwareProfile | None,
) -> PlanRequest:
    """The request of a file's content and of flags, which go before it.

    Raises:
        InvalidInputError: If a field is missing, unknown or impossible.
    """
    value: dict[str, Any] = {"tables": content} if isinstance(content, list) else dict(_object(content))
    if value.get("format") == FORMAT:  # a plan file: its request is planned again
        value = dict(_object(value.get("request")))
    if topology is not None:
        name, machines = parse_topology(topology)
        value["topology"] = encode(machines)
        if profile is None and "hardware" not in value:
            value["hardware"] = name
    if "topology" not in value:
        remedy = "give --topology, such as h200x8, or a topology in the file"
        raise InvalidInputError("topology", None, "is missing", remedy)
    if profile is not None:
        value["hardware"] = encode(profile)
    if runtime is not None:
        value["runtime"] = runtime
    if samples is not None:
        value["step"] = {**value.get("step", {}), "samples_per_rank": samples}
    request = decode(PlanRequest, value)
    machines = request.topology
    if hbm_gib is not None:
        machines = replace(machines, hbm_bytes=_gib("--hbm-gib", hbm_gib))
    if host_gib is not None:
        machines = replace(machines, host_bytes=_gib("--host-gib", host_gib))
    return replace(request, topology=machines)


def _gib(flag: str, gib: float) -> int:
    if not 0 <= gib * 2**30 <= MAX_BYTES:
        raise InvalidInputError(flag, gib, "is out of range", f"give a number from 0 to {MAX_BYTES >> 30}")
    return round(gib * 2**30)


def solve(request: PlanRequest, url: str | None, credentials: Credentials, *, quiet: bool) -> Plan:
    """The plan of a request, made here where `url` is None.

    Raises:
        PlannerError: If the service refused or could not be reached.
        ValueError: If the request, the address or a file of the credentials cannot be used.
    """
    console = Console(stderr=True)
    with console.status("planning", spinner="line") if not quiet else Console(quiet=True).status(""):
        return PlannerClient(url=url, credentials=credentials).plan(request)


def read_profile(path: Path | None) -> HardwareProfile | None:
    """The hardware profile of a file.

    Raises:
        InvalidInputError: If it is none.
    """
    return None if path is None else parse_profile(read(path))


def written(path: Path, text: str) -> str:
    """Writes a file; why it could not be written, if so, and what to do."""
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        return f"{path}: {error.strerror or error}; name a file in a folder that is there and may be written"
    return ""


def _object(content: object) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise InvalidInputError("tables", content, "is neither a list nor an object", "give a list of tables")
    return content


def read(path: Path) -> object:
    """The content of a YAML or JSON file.

    Raises:
        OSError: If it cannot be read.
        InvalidInputError: If it is neither YAML nor JSON.
    """
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        shown = repr(error.object[error.start : error.start + 8])
        raise InvalidInputError(str(path), shown, "is no UTF-8 text", "save the file as UTF-8") from None
    if path.suffix == ".json":
        try:
            return json.loads(text)
        except ValueError as error:
            raise InvalidInputError(str(path), text[:40], f"is no JSON: {error}", "correct the file") from None
    try:
        import yaml
    except ModuleNotFoundError:
        remedy = "install pyyaml, or give a .json file"
        raise InvalidInputError(str(path), path.suffix, "needs pyyaml to be read", remedy) from None

    class Loader(yaml.SafeLoader):
        """Takes 1e8 for a number, as JSON does; for YAML 1.1 it is a text."""

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _POWER, list("-+0123456789"))
    try:
        return _whole(yaml.load(text, Loader))
    except yaml.YAMLError as error:
        raise InvalidInputError(str(path), text[:40], f"is no YAML: {error}", "correct the file") from None


def _whole(value: object) -> object:
    """The same with floats such as 1e8 as the whole numbers that they are."""
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_whole(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
