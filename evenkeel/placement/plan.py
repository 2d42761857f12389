"""What a plan says."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from evenkeel.placement.hardware import Runtime
from evenkeel.placement.request import Mode, Sharding


class Status(StrEnum):
    """Outcome of planning.

    `OPTIMAL` is proved within the gap that was asked for; `FEASIBLE` is the best found, with a larger gap, as the
    time was up or the bound is no better; `UNKNOWN` means that the time was up before anything was found or excluded.
    """

    OPTIMAL = "OPTIMAL"
    FEASIBLE = "FEASIBLE"
    INFEASIBLE = "INFEASIBLE"
    UNKNOWN = "UNKNOWN"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where one table lives.

    Attributes:
        table: Name of the table.
        mode: Its mode.
        ratio: Fraction of its rows that HBM holds; in a cache that tables share, of the rows of all of them, of which
            this one has `cache_rows`.
        sharding: How it is spread over the ranks.
        column_shards: Parts that its width is cut into; 1 where it is not.
        ranks: Ranks that hold it, where it is not on all of them: of each part of the width in turn, the rank, or all
            ranks of the host, that hold it.
        module: Name of the fused module that it is in.
        hbm_bytes: HBM that it takes on the fullest rank, buffers included.
        host_bytes: Memory that it takes on a host.
        hbm_value_bytes: HBM budget of its values on one rank: what to give the runtime.
        cache_rows: Rows that HBM holds on one rank.
        seconds: Time of its kernels and collectives in a step, on a rank that holds it.
        unique_keys: Unique keys of a step on one rank.
        miss_rate: Fraction of those that are not in HBM.
        seconds_per_gib: Time that its best use of more HBM would save on a rank that holds it, per GiB; 0 where none
            helps.
    """

    table: str
    mode: Mode
    ratio: float
    sharding: Sharding
    column_shards: int = 1
    ranks: tuple[int, ...]
    module: str
    hbm_bytes: int
    host_bytes: int
    hbm_value_bytes: int
    cache_rows: int
    seconds: float
    unique_keys: float
    miss_rate: float
    seconds_per_gib: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedModule:
    """Tables that are looked up together.

    Attributes:
        name: Name of the module, unique in the plan.
        mode: Mode of all its tables.
        ratio: Their ratio; `None` where each has its own, as tables that are not row-wise may.
        tables: Names of its tables.
        fixed_seconds: Time in which the host launches the module and waits for it.
    """

    name: str
    mode: Mode
    ratio: float | None
    tables: tuple[str, ...]
    fixed_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """A resource: what there is, what the plan takes, and its price.

    Attributes:
        limit_bytes: What tables may use; `None` where there is no limit.
        used_bytes: What the plan uses.
        seconds_per_gib: Shadow price: time of a step that a little more of it would save, by the GiB, if placements
            could be mixed. A whole GiB may save more or less: `WhatIf` has what it saves by planning again.
    """

    limit_bytes: int | None
    used_bytes: int
    seconds_per_gib: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrivialPlan:
    """A plan that anybody writes in a minute, to see what the search buys.

    Attributes:
        name: What it is called.
        seconds: Its predicted kernel time, to compare with that of the plan; `None` where it does not fit.
    """

    name: str
    seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """Why nothing fits, and what would.

    Attributes:
        binding: `hbm`, `host` or `both`: the budget that no plan can keep, given the other.
        hbm_shortfall_bytes: HBM that a rank lacks to `smallest_hbm_bytes`; `None` where that is.
        host_shortfall_bytes: Memory that a host lacks to `smallest_host_bytes`; `None` where that is.
        smallest_hbm_bytes: Smallest HBM of a GPU that is known to do, host memory being what it is, reservations and
            workspace included; `None` where none is known, and where the request is for ranks without GPUs.
        smallest_host_bytes: Smallest memory of a host that is known to do, HBM being what it is, likewise.
        least_hbm_bytes: No HBM of a GPU below this does: proved. Where it equals `smallest_hbm_bytes`, that is the
            smallest there is. `None` where no HBM would do, and without GPUs.
        least_host_bytes: No memory of a host below this does, likewise.
        tables: The tables that take most of the binding budget even in the most frugal plan, largest first.
        explanation: All of it in a sentence.
    """

    binding: str
    hbm_shortfall_bytes: int | None
    host_shortfall_bytes: int | None
    smallest_hbm_bytes: int | None
    smallest_host_bytes: int | None
    least_hbm_bytes: int | None
    least_host_bytes: int | None
    tables: tuple[str, ...]
    explanation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A placement of all tables, what it costs, and how good it is.

    Attributes:
        status: Outcome.
        runtime: The library that it is for.
        seconds: Predicted time of the tables' kernels and collectives in a step, on the slowest rank.
        bound_seconds: No plan on the same ratios is below that.
        gap: Relative distance of what is made fast to its bound: of `seconds`, or of `step_seconds` where it is given.
        placements: One a table, in the order of the request.
        modules: The fused modules.
        hbm: HBM of the fullest rank, the runtime's workspace not included.
        host: Memory of a host.
        workspace_bytes: HBM of a rank that the runtime takes before any table.
        host_seconds: Predicted time in which the host launches the tables' modules and waits for them.
        step_seconds: The larger of that and the dense part with the kernels; `None` where `dense_ms` is not given.
        trivial: What plans without a search would take.
        shortage: Why nothing fits; `None` where something does.
        hardware: Name of the hardware profile.
        version: Version of this form.
    """

    status: Status
    runtime: Runtime
    seconds: float | None
    bound_seconds: float | None
    gap: float | None
    placements: tuple[Placement, ...]
    modules: tuple[FusedModule, ...]
    hbm: Budget
    host: Budget
    workspace_bytes: int
    hardware: str
    host_seconds: float | None = None
    step_seconds: float | None = None
    trivial: tuple[TrivialPlan, ...] = ()
    shortage: Shortage | None = None
    version: int = 1
