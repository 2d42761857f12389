"""What the planner is told: tables, machines, the step, and the runtime that will hold the tables."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

from evenkeel.placement.access import Access, Zipf
from evenkeel.placement.errors import require
from evenkeel.placement.hit_rates import Eviction

MAX_ROWS = 10**12
MAX_DIM = 32_768
MAX_RANKS = 65_536
MAX_BYTES = 2**53


class Mode(StrEnum):
    """Where the rows of a table live."""

    HBM_ONLY = "HBM_ONLY"
    CACHING = "CACHING"
    HYBRID = "HYBRID"
    HOST_ONLY = "HOST_ONLY"


class Runtime(StrEnum):
    """The library that holds the tables: its storage formulas, its modes and its fusing of tables."""

    DYNAMICEMB = "dynamicemb"
    TORCHREC = "torchrec"


class Optimizer(StrEnum):
    """The optimizer of a table, by the state it keeps per row."""

    SGD = "sgd"
    ADAM = "adam"
    ADAGRAD = "adagrad"
    ROWWISE_ADAGRAD = "rowwise_adagrad"


class Sharding(StrEnum):
    """How a table is spread over the ranks."""

    ROW_WISE = "row_wise"
    TABLE_WISE = "table_wise"
    COLUMN_WISE = "column_wise"
    DATA_PARALLEL = "data_parallel"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One embedding table.

    Attributes:
        name: Unique name.
        rows: Number of rows (keys), over all ranks.
        dim: Width of an embedding, in elements.
        ids_per_sample: Mean number of lookups of one sample, over all features that use the table.
        value_bytes: Bytes of one element of the embedding and of its optimizer state: 4 or 2.
        optimizer: Decides the state kept beside each row.
        access: How often the keys are looked up.
        pooled: Whether the lookups of a sample are summed into one output row of each feature.
        features: Number of features that use the table.
        eviction: What a full cache gives up.
        score_words: 8-byte scores kept per row: 1, or 2 for strategies that keep a time and a frequency.
        admission_rows: Rows of the table that counts keys before they are admitted; 0 without admission.
        dist_type: How keys are routed to ranks. Tables that differ here never fuse.
        group: Name of the module that owns the table. Tables of different modules never fuse.
        sharding: How the table is spread over the ranks.
        column_shards: Number of column shards of a column-wise table.
        modes: The modes to choose from; all where empty.
        ratio: Pins the fraction of the rows that HBM holds; 0 is HOST_ONLY, 1 is HBM_ONLY.
    """

    name: str
    rows: int
    dim: int
    ids_per_sample: float = 1.0
    value_bytes: int = 4
    optimizer: Optimizer = Optimizer.ADAM
    access: Access = field(default_factory=Zipf)
    pooled: bool = False
    features: int = 1
    eviction: Eviction = Eviction.LRU
    score_words: int = 1
    admission_rows: int = 0
    dist_type: str = "hash_roundrobin"
    group: str = ""
    sharding: Sharding = Sharding.ROW_WISE
    column_shards: int = 1
    modes: tuple[Mode, ...] = ()
    ratio: float | None = None

    def __post_init__(self) -> None:
        require(0 < len(self.name) <= 512, "name", self.name, "is no usable name", "give 1 to 512 characters")
        whole(self.rows, "rows", 1, MAX_ROWS)
        whole(self.dim, "dim", 1, MAX_DIM)
        number(self.ids_per_sample, "ids_per_sample", 0, 1e6)
        require(self.value_bytes in (2, 4), "value_bytes", self.value_bytes, "is no element size", "give 2 or 4")
        whole(self.features, "features", 1, 100_000)
        require(self.score_words in (1, 2), "score_words", self.score_words, "is not kept by any strategy", "1 or 2")
        whole(self.admission_rows, "admission_rows", 0, MAX_ROWS)
        whole(self.column_shards, "column_shards", 1, self.dim)
        split = self.sharding is Sharding.COLUMN_WISE or self.column_shards == 1
        require(split, "column_shards", self.column_shards, "is only for column_wise tables", "leave it at 1")
        divides = self.dim % self.column_shards == 0
        remedy = f"give a divisor of dim={self.dim}"
        require(divides, "column_shards", self.column_shards, "does not divide the width", remedy)
        require(len(set(self.modes)) == len(self.modes), "modes", self.modes, "has doubles", "name each mode once")
        if self.ratio is not None:
            number(self.ratio, "ratio", 0, 1)

    @property
    def fuse_key(self) -> tuple[object, ...]:
        """What must be equal for two tables to fuse, apart from the mode that the planner chooses."""
        return (
            self.group,
            self.value_bytes,
            self.pooled,
            self.eviction,
            self.score_words,
            self.admission_rows > 0,
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

    ranks: int
    hbm_bytes: int
    ranks_per_host: int | None = None
    host_bytes: int | None = None
    hbm_reserved_fraction: float = 0.0
    hbm_reserved_bytes: int = 0
    host_reserved_fraction: float = 0.0
    host_reserved_bytes: int = 0

    def __post_init__(self) -> None:
        whole(self.ranks, "ranks", 1, MAX_RANKS)
        if self.ranks_per_host is not None:
            whole(self.ranks_per_host, "ranks_per_host", 1, MAX_RANKS)
            fits = self.ranks % self.ranks_per_host == 0
            remedy = f"give a divisor of ranks={self.ranks}"
            require(fits, "ranks_per_host", self.ranks_per_host, "does not divide the ranks evenly", remedy)
        whole(self.hbm_bytes, "hbm_bytes", 0, MAX_BYTES)
        if self.host_bytes is not None:
            whole(self.host_bytes, "host_bytes", 0, MAX_BYTES)
        number(self.hbm_reserved_fraction, "hbm_reserved_fraction", 0, 1)
        number(self.host_reserved_fraction, "host_reserved_fraction", 0, 1)
        whole(self.hbm_reserved_bytes, "hbm_reserved_bytes", 0, MAX_BYTES)
        whole(self.host_reserved_bytes, "host_reserved_bytes", 0, MAX_BYTES)

    @property
    def local_ranks(self) -> int:
        """Ranks of one host."""
        return self.ranks_per_host or self.ranks

    @property
    def hbm_budget(self) -> int:
        """Bytes that tables may use on one rank."""
        return max(0, math.floor(self.hbm_bytes * (1 - self.hbm_reserved_fraction)) - self.hbm_reserved_bytes)

    @property
    def host_budget(self) -> int | None:
        """Bytes that tables may use on one host; `None` is unlimited."""
        if self.host_bytes is None:
            return None
        return max(0, math.floor(self.host_bytes * (1 - self.host_reserved_fraction)) - self.host_reserved_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one step of the job does.

    Attributes:
        samples_per_rank: Samples of a batch on one rank.
        training: Whether there is a backward pass, gradients and optimizer state.
        prefetch_depth: Batches whose rows a cache must hold at once; 1 without prefetching.
    """

    samples_per_rank: int = 1024
    training: bool = True
    prefetch_depth: int = 1

    def __post_init__(self) -> None:
        whole(self.samples_per_rank, "samples_per_rank", 1, 10**9)
        whole(self.prefetch_depth, "prefetch_depth", 1, 64)


def whole(value: object, name: str, low: int, high: int) -> None:
    """Raise unless `value` is a whole number within bounds."""
    ok = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
    require(ok, name, value, "is out of range", f"give a whole number from {low} to {high}")


def number(value: object, name: str, low: float, high: float) -> None:
    """Raise unless `value` is a finite number within bounds."""
    ok = (
        isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and low <= value <= high
    )
    require(ok, name, value, "is out of range", f"give a number from {low:g} to {high:g}")
