"""The machines of a job as the planner wants them, found from where the program runs."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from evenkeel.placement import HardwareProfile, InvalidInputError, Topology, parse_topology
from evenkeel.placement.hardware import FALLBACK, profile_of
from trainer_client.planning.collective import group_size

_HOST_RESERVE = 0.2
"""Part of a host's memory that is left for loaders, pinned buffers and the system."""
_CGROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def find_machines(
    *,
    topology: Topology | str | None,
    hardware: str | HardwareProfile | None,
    device: torch.device,
    group: dist.ProcessGroup | None,
    reserved_bytes: int,
    reserved_fraction: float,
) -> tuple[Topology, str | HardwareProfile, tuple[str, ...]]:
    """Ranks of the process group, HBM of this rank's device and memory of this host.

    Returns:
        The machines, their profile or the name of a built-in one, and what was assumed, in sentences.
    """
    notes: list[str] = []
    if isinstance(topology, Topology):
        return topology, hardware or _named(device, notes), tuple(notes)
    if topology is not None:
        name, machines = parse_topology(topology)
        hardware = hardware or name
    else:
        ranks = group_size(group)
        machines = Topology(
            ranks=ranks,
            ranks_per_host=_local_ranks(ranks),
            hbm_bytes=hbm_bytes(device),
            host_bytes=host_bytes(),
            host_reserved_fraction=_HOST_RESERVE,
        )
        if device.type == "cpu":
            notes.append("there is no GPU here: all tables are planned for the memory of the host")
    machines = replace(machines, hbm_reserved_fraction=reserved_fraction, hbm_reserved_bytes=reserved_bytes)
    return machines, hardware or _named(device, notes), tuple(notes)


def hbm_bytes(device: torch.device) -> int:
    """Memory of a GPU; 0 of what is none."""
    return int(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else 0


def host_bytes() -> int:
    """Memory that processes of this host may use: all there is, or what the container may have of it."""
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in _CGROUPS:
        try:
            text = Path(path).read_text("ascii").strip()
        except OSError:
            continue
        if text.isdigit():
            size = min(size, int(text))
    return size


def _local_ranks(ranks: int) -> int:
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    local = int(text) if text.isdigit() and int(text) else ranks
    if ranks % local:
        remedy = "give topology, or a group with as many ranks on each host"
        raise InvalidInputError("LOCAL_WORLD_SIZE", local, f"does not divide the {ranks} ranks of the group", remedy)
    return local


def _named(device: torch.device, notes: list[str]) -> str:
    if device.type != "cuda":
        return FALLBACK
    shown = torch.cuda.get_device_name(device)
    if (name := profile_of(shown)) is not None:
        return name
    notes.append(f"there is no profile of {shown!r}: times are those of {FALLBACK}; `evenkeel calibrate` measures it")
    return FALLBACK
