"""What a plan is asked for, and the watch over its time limit that every loop of a search looks at."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Annotated

from evenkeel.placement.access import Eviction, Histogram
from evenkeel.placement.fields import Checked, InvalidInputError, Length, Range, Share, check_fields, require
from evenkeel.placement.hardware import HardwareProfile, builtin_profile
from evenkeel.placement.layouts import WIDTH_UNIT
from evenkeel.placement.model import DataType, Mode, Runtime, Sharding, Step, Table, Topology

_SHORT = re.compile(r"[1-9][0-9]{0,8}(/[1-9][0-9]{0,8})?")
MAX_TABLES = 20_000
MAX_RATIO_STEPS = 200
_DYNAMICEMB_WIDTH = 1024
"""Its kernels take rows of any width up to that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverOptions(Checked):
    """How hard to search.

    Attributes:
        ratio_steps: Ratios tried for CACHING and HYBRID; 0 chooses by the number of tables.
        gap: Relative gap to prove above 50 tables, and where a table may be on some of the ranks; else the optimum on
            the grid of ratios is proved.
        time_limit_s: Time after which the best found is returned with its gap.
    """

    ratio_steps: Annotated[int, Range(0, MAX_RATIO_STEPS)] = 0
    gap: Share = 1e-4
    time_limit_s: Annotated[float, Range(0.01, 3600)] = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """Tables, machines and the step, in one.

    Attributes:
        tables: The tables; where there are none, the plan is empty too.
        topology: The machines.
        hardware: A profile, or the name of a built-in one.
        runtime: The library that will hold the tables.
        step: What a step does.
        solver: How hard to search.
    """

    topology: Topology
    tables: Annotated[tuple[Table, ...], Length(0, MAX_TABLES)] = ()
    hardware: str | HardwareProfile = "h200"
    runtime: Runtime = Runtime.DYNAMICEMB
    step: Step = field(default_factory=Step)
    solver: SolverOptions = field(default_factory=SolverOptions)

    def __post_init__(self) -> None:
        check_fields(self)
        seen: set[str] = set()
        for index, table in enumerate(self.tables):
            field_name = f"tables[{index}].name"
            require(table.name not in seen, field_name, table.name, "is there twice", "give every table its own name")
            seen.add(table.name)
            self._check_runtime(index, table)
        self.profile.costs(self.runtime)

    def _check_runtime(self, index: int, table: Table) -> None:
        """Refuses what the runtime cannot do, or would do otherwise than asked."""
        where = f"tables[{index}]"
        if self.runtime is Runtime.DYNAMICEMB:
            rows, given = Sharding.ROW_WISE in table.shardings, [sharding.value for sharding in table.shardings]
            remedy = "leave sharding out, add row_wise, or plan with runtime torchrec"
            require(rows, f"{where}.sharding", given, "is not what DynamicEmb does: by rows", remedy)
            what = f"is more than the {_DYNAMICEMB_WIDTH} elements that DynamicEmb looks up and updates"
            remedy = f"make it {_DYNAMICEMB_WIDTH} at most, or plan with runtime torchrec"
            require(table.dim <= _DYNAMICEMB_WIDTH, f"{where}.dim", table.dim, what, remedy)
            by_frequency = table.score_words == 1 or table.eviction is Eviction.LFU
            what = "holds a time and a frequency, by which DynamicEmb evicts"
            require(by_frequency, f"{where}.score_words", table.score_words, what, "set eviction to lfu")
            what = "is not what DynamicEmb does: it takes weights for how often a key was looked up"
            remedy = "leave weighted out, or plan with runtime torchrec"
            require(not table.weighted, f"{where}.weighted", table.weighted, what, remedy)
            return
        given, what = [mode.value for mode in table.modes], "has HYBRID, of which TorchRec has no kernel"
        remedy = "name CACHING instead, or plan with runtime dynamicemb"
        require(Mode.HYBRID not in given, f"{where}.modes", given, what, remedy)
        what = "is no type that FBGEMM trains: its kernels have float32 and float16"
        remedy = "make it float16, or plan with runtime dynamicemb"
        known = table.data_type is not DataType.BFLOAT16
        require(known, f"{where}.data_type", table.data_type.value, what, remedy)
        if set(table.shardings) != {Sharding.DATA_PARALLEL}:
            what = f"is no multiple of {WIDTH_UNIT}, as FBGEMM wants every width"
            remedy = f"make it {-(-table.dim // WIDTH_UNIT) * WIDTH_UNIT}, or plan with runtime dynamicemb"
            require(table.dim % WIDTH_UNIT == 0, f"{where}.dim", table.dim, what, remedy)
            width = table.dim // max(1, table.column_shards)
            what = f"makes parts of {width} elements, and FBGEMM wants multiples of {WIDTH_UNIT}"
            remedy = f"give a divisor of {table.dim // WIDTH_UNIT}, or leave it out"
            require(width % WIDTH_UNIT == 0, f"{where}.column_shards", table.column_shards, what, remedy)
        if isinstance(table.access, Histogram):
            keys = sum(table.access.keys)
            what = f"has {keys:g} keys, and the table {table.rows} rows, one for each key in TorchRec"
            remedy = "count the keys that the table is given, or give it as many rows"
            require(keys <= table.rows * (1 + 1e-6), f"{where}.access.keys", keys, what, remedy)
        if self.step.prefetch_depth > 1 and (not table.modes or Mode.CACHING in table.modes):
            recent = table.eviction is Eviction.LRU
            what = "does not go with prefetching: FBGEMM prefetches only into caches that evict by lru"
            remedy = "set eviction to lru, step.prefetch_depth to 1, or modes without CACHING"
            require(recent, f"{where}.eviction", table.eviction.value, what, remedy)

    @property
    def profile(self) -> HardwareProfile:
        """The hardware profile itself."""
        return self.hardware if isinstance(self.hardware, HardwareProfile) else builtin_profile(self.hardware)


class Watch:
    """The time that a search has left, from now on."""

    def __init__(self, seconds: float = 60.0, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._end = clock, clock() + seconds

    def left(self) -> float:
        """Seconds; none or less once the time is up."""
        return self._end - self._clock()

    def wall_left(self) -> float:
        """The same for a library that looks at the wall clock: without end where the time is told by another one."""
        return self.left() if self._clock is time.monotonic else math.inf

    def part(self, share: float) -> Watch:
        """A watch over a part of the time that is left."""
        return Watch(max(0.0, share * self.left()), clock=self._clock)

    def at_least(self, seconds: float) -> Watch:
        """A watch over the time that is left, or over so much where that is less."""
        return Watch(max(seconds, self.left()), clock=self._clock)

    def is_over(self) -> bool:
        """Whether the time is up."""
        return self.left() <= 0


def with_time(request: PlanRequest, seconds: float) -> PlanRequest:
    """The same request with another time limit."""
    return replace(request, solver=replace(request.solver, time_limit_s=max(0.01, seconds)))


def parse_topology(text: str) -> tuple[str, Topology]:
    """Profile name and topology from a short form such as `h200x8` or `h100x64/8` (8 ranks a host).

    HBM and host memory are those of the profile.

    Raises:
        InvalidInputError: If it is no such form, or the profile is unknown.
    """
    name, _, counts = text.rpartition("x")
    ranks, _, per_host = counts.partition("/")
    if not name or _SHORT.fullmatch(counts) is None:
        raise InvalidInputError("topology", text, "is not understood", "write PROFILExRANKS or PROFILExRANKS/PER_HOST")
    try:
        profile = builtin_profile(name)
        local = int(per_host) if per_host else min(int(ranks), profile.ranks_per_host)
        topology = Topology(
            ranks=int(ranks),
            ranks_per_host=local,
            hbm_bytes=profile.hbm_bytes,
            host_bytes=profile.host_bytes_per_rank * local,
        )
    except InvalidInputError as error:
        what = f"says {error.value!r} for {error.field}, which {error.problem}"
        raise InvalidInputError("topology", text, what, error.remedy) from None
    return name, topology
