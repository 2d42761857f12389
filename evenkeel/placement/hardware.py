"""Hardware profiles: what a machine and a runtime on it cost per row, per launch and per byte."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib import resources
from itertools import pairwise
from typing import Annotated, TypeAlias

import numpy as np

from evenkeel.placement.fields import Checked, Length, OneOf, Range, Share, check_fields, decode, require

PROFILE_VERSION = 1
MAX_BYTES = 2**53
NARROW = 32
"""Elements of the widest rows that FBGEMM reads with kernels for small ones, where they are not pooled."""

Bytes: TypeAlias = Annotated[int, Range(0, MAX_BYTES)]
Fixed: TypeAlias = Annotated[float, Range(0, 60)]
Factor: TypeAlias = Annotated[float, Range(0, 1e4)]
Rate: TypeAlias = Annotated[float, Range(1, 1e18)]
Gather: TypeAlias = Annotated[tuple[tuple[Annotated[float, Range(0, 1e9, above=True)], Rate], ...], Length(1, 10_000)]


class Runtime(StrEnum):
    """The library that holds the tables: its storage formulas, its modes and its fusing of tables."""

    DYNAMICEMB = "dynamicemb"
    TORCHREC = "torchrec"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts(Checked):
    """What a step takes beside the work of its tables, fitted to measured steps.

    An exchange is that of the tables of one module that are sharded alike: their keys, then rows and gradients.

    Attributes:
        host_s: Time that the host takes to launch a step, however many exchanges there are.
        exchange_host_s: More for each exchange.
        table_host_s: More for each of its tables.
        cache_host_s: More for each exchange with a cached table in it.
        rows_host_s: More for each exchange of rows that are not pooled.
        exchange_gpu_s: Time of the GPU for the kernels of an exchange, however little is exchanged.
        copies: Times that an exchanged byte is read or written in HBM on its way between kernels of tables.
    """

    host_s: Fixed
    exchange_host_s: Fixed
    table_host_s: Fixed = 0.0
    cache_host_s: Fixed = 0.0
    rows_host_s: Fixed = 0.0
    exchange_gpu_s: Fixed = 0.0
    copies: Factor = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeCosts:
    """Constants of one runtime on one machine, fitted to measured steps.

    Attributes:
        hbm_fixed_s: Time of the host for a step of one fused module in HBM: launches and waiting.
        caching_fixed_s: The same with a cache.
        host_fixed_s: The same for tables in host memory.
        miss_factor: Time of a missed row over that of two random host gathers of the row with its state.
        contention_rows: Cache rows per unique key at which eviction doubles the cost of a miss. The cost of a
            missed row grows by `1 + (contention_rows / (cache rows / unique keys)) ** 2`.
        cache_lookup_s: Time of a lookup that goes through a cache, beside that of its row.
        cache_hit_s: Time of a unique row that a cache holds: it is found, and noted as used.
        second_module_s: Time of the kernels of a second module, where some tables that fuse are cached and others
            not, apart from that of its rows and outputs; 0 where such modules cost nothing.
        host_factor: Time of a row in host memory over that of a random host gather of it.
        hbm_gather: Pairs of row bytes and bytes per second with which its kernels read random rows from HBM; those of
            the profile by default.
        host_gather: The same from host memory.
        host_update: Time of an updated row in host memory over that of one that is read.
        in_flight_bytes: Bytes that reads of host memory have under way at once. A row that is looked up again
            meanwhile is read once.
        narrow_hbm_s: Further time of a lookup of an unpooled row of at most `NARROW` elements in HBM.
        narrow_host_s: The same in host memory.
        hybrid_hit: Part of the lookups of a HYBRID table that HBM serves, per unit of its HBM ratio.
        workspace_bytes: HBM in use on a rank outside of tables and step (context, code, communicators, allocator).
        unique_copies: Copies of the unique rows of a step that its buffers hold.
        caching_staging: Buffer for staged rows of a step, over the bytes of its unique rows with their state.
        hybrid_staging: The same for HYBRID.
        host_staging: The same for HOST_ONLY.
        step: What a whole step on several ranks takes beside its tables; that of an H200 where it was not measured.
        step_one_rank: The same of a step on one rank, which goes through the same exchanges with itself.
    """

    hbm_fixed_s: Fixed
    caching_fixed_s: Fixed
    host_fixed_s: Fixed
    miss_factor: Factor
    contention_rows: Factor
    cache_lookup_s: Fixed = 0.0
    cache_hit_s: Fixed = 0.0
    second_module_s: Fixed = 0.0
    host_factor: Factor = 1.0
    hbm_gather: Gather | None = None
    host_gather: Gather | None = None
    host_update: Factor = 1.0
    in_flight_bytes: Annotated[float, Range(0, 2**40)] = 0.0
    narrow_hbm_s: Fixed = 0.0
    narrow_host_s: Fixed = 0.0
    hybrid_hit: Share = 0.1
    workspace_bytes: Annotated[int, Range(0, 2**50)] = 0
    unique_copies: Factor = 2.0
    caching_staging: Factor = 0.0
    hybrid_staging: Factor = 0.0
    host_staging: Factor = 0.0
    step: StepCosts | None = None
    step_one_rank: StepCosts | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        _check_widths(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareProfile:
    """What one kind of machine does per second.

    Attributes:
        name: Name of the profile.
        device: The GPU, in words.
        date: When it was measured or published, ISO 8601.
        source: Where the figures are from.
        hbm_bytes: HBM of one GPU.
        host_bytes_per_rank: Usual host memory for each GPU, a default for topologies given by name.
        ranks_per_host: Usual number of GPUs of a host.
        hbm_gather: Pairs of row bytes and bytes per second of a random-row gather from HBM.
        host_gather: The same from host memory over the link.
        intra_host_bytes_per_s: All2All rate of one rank inside a host.
        inter_host_bytes_per_s: All2All rate of one rank between hosts.
        collective_latency_s: Time of a collective of no size.
        host_memory_bytes_per_s: What all GPUs of a host read of its memory together; by default two thirds of sixteen
            channels of DDR5-4800.
        runtimes: Constants by runtime.
        version: Version of this form.
    """

    name: str
    device: str
    date: str
    source: str
    hbm_bytes: Bytes
    host_bytes_per_rank: Bytes
    hbm_gather: Gather
    host_gather: Gather
    intra_host_bytes_per_s: Rate
    inter_host_bytes_per_s: Rate
    collective_latency_s: Annotated[float, Range(0, 10)]
    runtimes: dict[str, RuntimeCosts]
    host_memory_bytes_per_s: Rate = 4e11
    ranks_per_host: Annotated[int, Range(1, 1024)] = 8
    version: Annotated[int, OneOf((PROFILE_VERSION,))] = PROFILE_VERSION

    def __post_init__(self) -> None:
        check_fields(self)
        _check_widths(self)
        for key in self.runtimes:
            known = [runtime.value for runtime in Runtime]
            require(key in known, f"runtimes.{key}", key, "is no runtime", f"use one of: {', '.join(known)}")

    def costs(self, runtime: Runtime) -> RuntimeCosts:
        """The constants of `runtime`.

        Raises:
            InvalidInputError: If the profile was not measured with this runtime.
        """
        known = ", ".join(self.runtimes) or "none"
        remedy = f"calibrate it, or plan for one of: {known}"
        require(runtime.value in self.runtimes, "runtime", runtime.value, f"is not in profile {self.name!r}", remedy)
        return self.runtimes[runtime.value]


def _check_widths(holder: RuntimeCosts | HardwareProfile) -> None:
    for name in ("hbm_gather", "host_gather"):
        widths = [width for width, _ in getattr(holder, name) or ()]
        for index, (last, width) in enumerate(pairwise(widths), start=1):
            require(width > last, f"{name}[{index}]", width, "row widths do not ascend", "sort by width")


def row_seconds(curve: tuple[tuple[float, float], ...], row_bytes: float) -> float:
    """Seconds in which kernels read a random row, by pairs of row bytes and bytes per second.

    They are linear in the row's width between measured widths; at the nearest rate outside of them. Below the narrowest
    measured width a row costs as much as that one: a sector is fetched either way.
    """
    widths = np.array([width for width, _ in curve])
    seconds = widths / np.array([rate for _, rate in curve])
    if row_bytes <= widths[0]:
        return float(seconds[0])
    if row_bytes >= widths[-1]:
        return float(seconds[-1] * row_bytes / widths[-1])
    return float(np.interp(row_bytes, widths, seconds))


@cache
def builtin_profiles() -> dict[str, HardwareProfile]:
    """The profiles that come with the package, by name."""
    folder = resources.files("evenkeel.placement") / "profiles"
    files = sorted((entry for entry in folder.iterdir() if entry.name.endswith(".json")), key=lambda entry: entry.name)
    profiles = [parse_profile(json.loads(entry.read_text("utf-8"))) for entry in files]
    return {profile.name: profile for profile in profiles}


def builtin_profile(name: str) -> HardwareProfile:
    """The built-in profile called `name`.

    Raises:
        InvalidInputError: If there is none of that name.
    """
    profiles = builtin_profiles()
    require(name in profiles, "hardware", name, "is no built-in profile", f"use one of: {', '.join(profiles)}")
    return profiles[name]


FALLBACK = "h200"
"""The built-in profile of GPUs that have none of their own."""


def profile_of(device: str) -> str | None:
    """The name of the built-in profile of a GPU, from its name in words; `None` if there is none."""
    return next((name for name in sorted(builtin_profiles(), key=len, reverse=True) if name in device.lower()), None)


def parse_profile(value: object) -> HardwareProfile:
    """A profile from its JSON value.

    Raises:
        InvalidInputError: If a field is missing, unknown or impossible.
    """
    return decode(HardwareProfile, value, "hardware")
