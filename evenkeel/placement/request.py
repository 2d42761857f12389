"""What a plan is asked for: tables, machines, the step, the runtime; and the watch over the time of the search."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Annotated, TypeAlias

from evenkeel.placement.access import DIST_TYPES, Access, Eviction, Histogram, Zipf
from evenkeel.placement.fields import Checked, InvalidInputError, Length, OneOf, Range, Share, check_fields, require
from evenkeel.placement.hardware import Bytes, HardwareProfile, Runtime, builtin_profile

MAX_TABLES = 20_000
MAX_ROWS = 10**12
MAX_DIM = 32_768
MAX_RANKS = 65_536
MAX_RATIO_STEPS = 200
WIDTH_UNIT = 4
"""Elements that the width of every table and shard is a multiple of in FBGEMM, but for those that are replicated."""
_DYNAMICEMB_WIDTH = 1024
"""Its kernels take rows of any width up to that."""
_SHORT = re.compile(r"[1-9][0-9]{0,8}(/[1-9][0-9]{0,8})?")

Name: TypeAlias = Annotated[str, Length(1, 512)]
Rows: TypeAlias = Annotated[int, Range(0, MAX_ROWS)]


class Mode(StrEnum):
    """Where the rows of a table live."""

    HBM_ONLY = "HBM_ONLY"
    CACHING = "CACHING"
    HYBRID = "HYBRID"
    HOST_ONLY = "HOST_ONLY"


def modes_of_ratio(ratio: float | None) -> tuple[Mode, ...]:
    """The modes in which HBM can hold that fraction of a table's rows."""
    ends = {None: tuple(Mode), 0.0: (Mode.HOST_ONLY,), 1.0: (Mode.HBM_ONLY,)}
    return ends.get(ratio, (Mode.CACHING, Mode.HYBRID))


class Optimizer(StrEnum):
    """The optimizer of a table, by the state it keeps per row."""

    SGD = "sgd"
    ADAM = "adam"
    ADAGRAD = "adagrad"
    ROWWISE_ADAGRAD = "rowwise_adagrad"


class DataType(StrEnum):
    """The type of the elements of a table's embeddings."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


class Sharding(StrEnum):
    """How a table is spread over the ranks, in TorchRec's words.

    Row-wise, every rank has a part of the rows; table-wise, one rank has them all; column-wise, each of some ranks has
    a part of the width. Table-row-wise and grid are the same two with a host in the place of a rank, whose ranks have
    a part of the rows each. Data-parallel, every rank has all of the table.
    """

    ROW_WISE = "row_wise"
    TABLE_WISE = "table_wise"
    COLUMN_WISE = "column_wise"
    TABLE_ROW_WISE = "table_row_wise"
    GRID = "grid_shard"
    DATA_PARALLEL = "data_parallel"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One embedding table.

    Attributes:
        name: Unique name.
        rows: Number of rows (keys), over all ranks.
        dim: Width of an embedding, in elements.
        ids_per_sample: Mean number of lookups of one sample, over all features that use the table.
        data_type: Type of the embeddings; with DynamicEmb of their optimizer state too, which is float32 in TorchRec.
            What leaves the table is float32 in both. TorchRec's kernels have no bfloat16.
        optimizer: Decides the state kept beside each row.
        access: How often the keys are looked up.
        pooled: Whether the lookups of a sample are summed into one output row of each feature.
        weighted: Whether each of these lookups has a weight of its own, which travels with its key. TorchRec only.
        features: Number of features that use the table.
        eviction: What a full cache gives up.
        score_words: 8-byte scores kept per row: 1, or 2 for strategies that keep a time and a frequency.
        admission_rows: Rows of the table that counts keys before they are admitted; 0 without admission.
        admission_threshold: Lookups after which a key is admitted, where there is admission.
        dist_type: How keys are routed to ranks. Tables that differ here never fuse.
        group: Name of the module that owns the table; none is a name too. Tables of different modules never fuse.
        sharding: How the table is spread over the ranks; of several, the planner chooses one.
        column_shards: Number of column shards of a column_wise or grid_shard table, a divisor of dim; 0 lets the
            planner choose.
        modes: The modes to choose from; all where empty.
        ratio: Pins the fraction of the rows that HBM holds; 0 is HOST_ONLY, 1 is HBM_ONLY.
    """

    name: Name
    rows: Annotated[int, Range(1, MAX_ROWS)]
    dim: Annotated[int, Range(1, MAX_DIM)]
    ids_per_sample: Annotated[float, Range(0, 1e6)] = 1.0
    data_type: DataType = DataType.FLOAT32
    optimizer: Optimizer = Optimizer.ADAM
    access: Access = field(default_factory=Zipf)
    pooled: bool = False
    weighted: bool = False
    features: Annotated[int, Range(1, 100_000)] = 1
    eviction: Eviction = Eviction.LRU
    score_words: Annotated[int, OneOf((1, 2))] = 1
    admission_rows: Rows = 0
    admission_threshold: Annotated[int, Range(1, 2**31)] = 2
    dist_type: Annotated[str, OneOf(DIST_TYPES)] = "hash_roundrobin"
    group: Annotated[str, Length(0, 512)] = ""
    sharding: Annotated[Sharding | tuple[Sharding, ...], Length(1, len(Sharding))] = Sharding.ROW_WISE
    column_shards: Annotated[int, Range(0, MAX_DIM)] = 0
    modes: Annotated[tuple[Mode, ...], Length(0, 4)] = ()
    ratio: Share | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        doubles = len(set(self.shardings)) < len(self.shardings)
        given = [sharding.value for sharding in self.shardings]
        require(not doubles, "sharding", given, "has doubles", "name each way once")
        split = self.column_shards < 2 or not {Sharding.COLUMN_WISE, Sharding.GRID}.isdisjoint(self.shardings)
        hosts = {Sharding.TABLE_ROW_WISE, Sharding.GRID}
        remedy = "set pooled to true, or allow row_wise"
        runs = self.pooled or not hosts.issuperset(self.shardings)
        require(runs, "sharding", given, "is only for pooled tables", remedy)
        remedy = "set pooled to true, or leave weighted out"
        require(self.pooled or not self.weighted, "weighted", self.weighted, "is only for pooled tables", remedy)
        only = "is only for column_wise and grid_shard tables"
        require(split, "column_shards", self.column_shards, only, "leave it out")
        divides = self.dim % max(1, self.column_shards) == 0
        remedy = f"give a divisor of dim={self.dim}"
        require(divides, "column_shards", self.column_shards, "does not divide the width", remedy)
        require(len(set(self.modes)) == len(self.modes), "modes", self.modes, "has doubles", "name each mode once")
        goes, what = modes_of_ratio(self.ratio), f"goes with none of modes={[mode.value for mode in self.modes]}"
        remedy = f"leave ratio or modes out, or name {' or '.join(goes)} among the modes"
        require(not self.modes or not {*goes}.isdisjoint(self.modes), "ratio", self.ratio, what, remedy)

    @property
    def value_bytes(self) -> int:
        """Bytes of one element of the embeddings."""
        return 4 if self.data_type is DataType.FLOAT32 else 2

    @property
    def weight_bytes(self) -> int:
        """Bytes of the whole table, without optimizer state."""
        return self.rows * self.dim * self.value_bytes

    @property
    def shardings(self) -> tuple[Sharding, ...]:
        """The ways of spreading the table to choose from."""
        return (self.sharding,) if isinstance(self.sharding, Sharding) else self.sharding

    @property
    def fuse_key(self) -> tuple[object, ...]:
        """What must be equal for two tables to fuse, apart from the mode that the planner chooses."""
        return (
            self.group,
            self.data_type,
            self.pooled,
            self.weighted,
            self.eviction,
            self.score_words,
            self.admission_threshold if self.admission_rows else 0,
            self.dist_type,
            self.optimizer,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The machines of the job.

    Attributes:
        ranks: Number of ranks (GPUs).
        ranks_per_host: Ranks that share one host's memory; all on one host where `None`.
        hbm_bytes: HBM of one rank; 0 plans without any GPU memory.
        host_bytes: Host memory of one host; unlimited where `None`, 0 plans without any.
        hbm_reserved_fraction: Part of the HBM that the tables may not use (model, activations, communication).
        hbm_reserved_bytes: The same in bytes, on top of the fraction.
        host_reserved_fraction: Part of the host memory that the tables may not use.
        host_reserved_bytes: The same in bytes, on top of the fraction.
    """

    ranks: Annotated[int, Range(1, MAX_RANKS)]
    hbm_bytes: Bytes
    ranks_per_host: Annotated[int, Range(1, MAX_RANKS)] | None = None
    host_bytes: Bytes | None = None
    hbm_reserved_fraction: Share = 0.0
    hbm_reserved_bytes: Bytes = 0
    host_reserved_fraction: Share = 0.0
    host_reserved_bytes: Bytes = 0

    def __post_init__(self) -> None:
        check_fields(self)
        remedy = f"give a divisor of ranks={self.ranks}"
        fits = self.ranks % self.local_ranks == 0
        require(fits, "ranks_per_host", self.ranks_per_host, "does not divide the ranks evenly", remedy)

    @property
    def local_ranks(self) -> int:
        """Ranks of one host."""
        return self.ranks_per_host or self.ranks

    @property
    def hbm_budget(self) -> int:
        """Bytes that tables may use on one rank."""
        return self.usable(0, self.hbm_bytes)

    @property
    def host_budget(self) -> int | None:
        """Bytes that tables may use on one host; `None` is unlimited."""
        return None if self.host_bytes is None else self.usable(1, self.host_bytes)

    def usable(self, resource: int, size: int) -> int:
        """Bytes that tables may use of a rank's HBM (0), or of a host's memory (1), of so many bytes."""
        fraction, reserved = self.hbm_reserved_fraction, self.hbm_reserved_bytes
        if resource:
            fraction, reserved = self.host_reserved_fraction, self.host_reserved_bytes
        return max(0, math.floor(size * (1 - fraction)) - reserved)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(Checked):
    """What one step of the job does.

    Attributes:
        samples_per_rank: Samples of a batch on one rank.
        training: Whether there is a backward pass, gradients and optimizer state.
        prefetch_depth: Batches whose rows a cache must hold at once; 1 without prefetching, where a cache of TorchRec
            may hold less than one.
        dense_ms: Time of a step's dense part on a GPU; where it is not given, kernels alone decide.
    """

    samples_per_rank: Annotated[int, Range(1, 10**9)] = 1024
    training: bool = True
    prefetch_depth: Annotated[int, Range(1, 64)] = 1
    dense_ms: Annotated[float, Range(0, 1e6)] | None = None


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
        tables: The tables.
        topology: The machines.
        hardware: A profile, or the name of a built-in one.
        runtime: The library that will hold the tables.
        step: What a step does.
        solver: How hard to search.
    """

    tables: Annotated[tuple[Table, ...], Length(1, MAX_TABLES)]
    topology: Topology
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
