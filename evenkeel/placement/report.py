"""A plan rank by rank and host by host: tables, memory, parts of the step, and how unevenly they are spread.

The parts of a table's time are what the cost model says of a step with less in it: the forward pass is a step without a
backward pass, what a cache adds to a table in HBM is the fetching of missed rows, and the rest is the backward pass.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import numpy as np

from evenkeel.placement.layouts import Layout, Scope
from evenkeel.placement.options import RankLoad, exchange_seconds, mode_seconds
from evenkeel.placement.plan import Placement, Plan
from evenkeel.placement.request import Mode, PlanRequest, Sharding, Table

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """Parts of the time of a step on a rank.

    Attributes:
        forward_seconds: In the forward pass.
        backward_seconds: In the backward pass, optimizer included.
        communication_seconds: In exchanging keys, rows and gradients.
        prefetch_seconds: In fetching rows that caches miss, and in writing back those that they replace.
    """

    forward_seconds: float
    backward_seconds: float
    communication_seconds: float
    prefetch_seconds: float


_PARTS = tuple(field.name for field in fields(StepParts))


@dataclass(frozen=True, slots=True, kw_only=True)
class TableParts(StepParts):
    """What one table takes on a rank that holds a shard of it, and on a host.

    Attributes:
        table: Name of the table.
        mode: Its mode.
        sharding: How it is spread over the ranks.
        ranks: Ranks that hold it, one a shard, where it is not on all of them.
        hbm_bytes: HBM on a rank.
        host_bytes: Memory on a host, of one shard where ranks are named.
    """

    table: str
    mode: Mode
    sharding: Sharding
    ranks: tuple[int, ...]
    hbm_bytes: int
    host_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankParts(StepParts):
    """What is on a rank. Ranks that are alike are one entry.

    Attributes:
        ranks: The ranks, ascending.
        tables: Tables that have a shard on each of them.
        shards: Number of shards by sharding type.
        hbm_bytes: HBM of tables, the runtime's workspace not included.
        fixed_seconds: Time in which the host launches modules and waits for them, beside the others.
        seconds: Time of kernels and collectives in a step: the four parts.
    """

    ranks: tuple[int, ...]
    tables: int
    shards: dict[str, int]
    hbm_bytes: int
    fixed_seconds: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HostParts:
    """What is in a host's memory. Hosts that are alike are one entry.

    Attributes:
        hosts: The hosts, ascending; host 0 has the first ranks.
        ranks: Ranks of a host.
        tables: Tables that take memory of the host.
        host_bytes: Memory that they take.
    """

    hosts: tuple[int, ...]
    ranks: int
    tables: int
    host_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Imbalance:
    """How far shares are from equal.

    Attributes:
        of: What is shared: `seconds` and `hbm_bytes` over ranks, `host_bytes` over hosts.
        max_over_mean: The largest over the mean.
    """

    of: str
    max_over_mean: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A plan by rank, host and table.

    Attributes:
        ranks: What is on each rank; ranks that are alike are one entry, and entries are by their first rank.
        hosts: What is in each host's memory, likewise.
        tables: What each table takes, in the order of the request.
        imbalance: How unevenly time and memory are spread; what nothing takes is left out.
    """

    ranks: tuple[RankParts, ...]
    hosts: tuple[HostParts, ...]
    tables: tuple[TableParts, ...]
    imbalance: tuple[Imbalance, ...]


def make_report(request: PlanRequest, plan: Plan) -> Report | None:
    """The report of a plan; `None` where the plan has no placements."""
    if not plan.placements:
        return None
    ranks, local = request.topology.ranks, request.topology.local_ranks
    tables = tuple(_table_parts(request, *each) for each in zip(request.tables, plan.placements, strict=True))
    kinds = sorted(Sharding)
    figures = np.zeros((6 + len(kinds), ranks))  # HBM, the four parts of time, tables, and shards of each kind
    host_bytes, on_host = np.zeros((2, ranks // local), dtype=np.int64)
    for entry in tables:
        held = np.bincount(entry.ranks, minlength=ranks) if entry.ranks else np.ones(ranks, dtype=np.int64)
        figures[:5] += np.array([entry.hbm_bytes, *(getattr(entry, name) for name in _PARTS)])[:, None] * held
        figures[5] += held > 0
        figures[6 + kinds.index(entry.sharding)] += held
        apart = Layout(entry.sharding).scope is Scope.RANK
        shards = held.reshape(-1, local).sum(axis=1) // (1 if apart else local)
        host_bytes += entry.host_bytes * shards
        on_host += (shards > 0) & (entry.host_bytes > 0)
    # Where tables are cached beside others, outputs and gradients are put in order, which is of no table.
    mixing = max(0.0, (plan.seconds or 0.0) - float(figures[1:5].sum(axis=0).max()))
    figures[1:3] += np.array([[0.5], [0.5]] if request.step.training else [[1.0], [0.0]]) * mixing
    spread = {"seconds": figures[1:5].sum(axis=0), "hbm_bytes": figures[0], "host_bytes": host_bytes.astype(np.float64)}
    return Report(
        ranks=tuple(
            RankParts(
                ranks=tuple(alike),
                tables=int(parts[4]),
                shards={kind.value: int(count) for kind, count in zip(kinds, parts[5:], strict=True) if count},
                hbm_bytes=round(hbm),
                fixed_seconds=sum(module.fixed_seconds for module in plan.modules),
                seconds=sum(parts[:4]),
                **dict(zip(_PARTS, parts[:4], strict=True)),
            )
            for (hbm, *parts), alike in _alike(zip(*figures.tolist(), strict=True)).items()
        ),
        hosts=tuple(
            HostParts(hosts=tuple(hosts), ranks=local, tables=number, host_bytes=used)
            for (used, number), hosts in _alike(zip(host_bytes.tolist(), on_host.tolist(), strict=True)).items()
        ),
        tables=tables,
        imbalance=tuple(
            Imbalance(of=name, max_over_mean=float(values.max() / values.mean()))
            for name, values in spread.items()
            if values.sum() > 0
        ),
    )


def _alike(keys: Iterable[K]) -> dict[K, list[int]]:
    """Numbers of the places that have each key, by the first of them."""
    found: dict[K, list[int]] = {}
    for number, key in enumerate(keys):
        found.setdefault(key, []).append(number)
    return found


def _table_parts(request: PlanRequest, table: Table, placed: Placement) -> TableParts:
    """Parts that sum up to the placement's time, whatever the model leaves out or rounds."""
    load = RankLoad(request, table, Layout(placed.sharding, placed.column_shards))

    def seconds(mode: Mode, **changes: Any) -> float:
        ratios, rows = np.array([placed.ratio]), np.array([float(placed.cache_rows)])
        return float(mode_seconds(load.but(**changes), mode, ratios, rows)[0])

    cached = placed.mode is Mode.CACHING
    mode = Mode.HBM_ONLY if cached else placed.mode
    prefetch = 0.0
    if cached:
        prefetch = seconds(Mode.CACHING, uncached_state_bytes=0) - seconds(mode, uncached_state_bytes=0)
    known = np.maximum(0.0, [seconds(mode, training=False), exchange_seconds(load), prefetch])
    if known.sum() > 0 and (not load.training or known.sum() > placed.seconds):
        known *= placed.seconds / known.sum()
    forward, communication, prefetch = known.tolist()
    return TableParts(
        table=placed.table,
        mode=placed.mode,
        sharding=placed.sharding,
        ranks=placed.ranks,
        hbm_bytes=placed.hbm_bytes,
        host_bytes=placed.host_bytes,
        forward_seconds=forward,
        backward_seconds=max(0.0, placed.seconds - float(known.sum())) if load.training else 0.0,
        communication_seconds=communication,
        prefetch_seconds=prefetch,
    )
