"""A plan rank by rank and host by host: tables, memory, parts of the step, and how unevenly they are spread.

The parts of a table's time are what the cost model says of a step with less in it: the forward pass is a step without a
backward pass, what a cache adds to a table in HBM is the fetching of missed rows, and the rest is the backward pass.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from evenkeel.placement.layouts import Layout, Scope
from evenkeel.placement.model import Mode, Sharding, Table
from evenkeel.placement.options import communication_seconds, rank_load
from evenkeel.placement.plan import Placement, Plan
from evenkeel.placement.request import PlanRequest
from evenkeel.placement.timing import mode_seconds

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class TableParts:
    """What one table takes on a rank that holds a shard of it, and on a host.

    Attributes:
        table: Name of the table.
        mode: Its mode.
        sharding: How it is spread over the ranks.
        ranks: Ranks that hold it, one a shard, where it is not on all of them.
        hbm_bytes: HBM on a rank.
        host_bytes: Memory on a host, of one shard where ranks are named.
        forward_seconds: Time of a step in the forward pass.
        backward_seconds: Time of a step in the backward pass, optimizer included.
        communication_seconds: Time of a step in exchanging keys, rows and gradients.
        prefetch_seconds: Time of a step in fetching rows that its cache misses, and in writing back those that they
            replace.
    """

    table: str
    mode: Mode
    sharding: Sharding
    ranks: tuple[int, ...]
    hbm_bytes: int
    host_bytes: int
    forward_seconds: float
    backward_seconds: float
    communication_seconds: float
    prefetch_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankParts:
    """What is on a rank. Ranks that are alike are one entry.

    Attributes:
        ranks: The ranks, ascending.
        tables: Tables that have a shard on each of them.
        shards: Number of shards by sharding type.
        hbm_bytes: HBM of tables, the runtime's workspace not included.
        forward_seconds: Time of a step in forward passes of tables.
        backward_seconds: Time of a step in their backward passes, optimizer included.
        communication_seconds: Time of a step in exchanging keys, rows and gradients.
        prefetch_seconds: Time of a step in fetching rows that caches miss, and in writing back those that they replace.
        fixed_seconds: Time in which the host launches modules and waits for them, beside the others.
        seconds: Time of kernels and collectives in a step: the four of them.
    """

    ranks: tuple[int, ...]
    tables: int
    shards: dict[str, int]
    hbm_bytes: int
    forward_seconds: float
    backward_seconds: float
    communication_seconds: float
    prefetch_seconds: float
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
    """How far shares are from equal, as TorchRec's planner measures it: 0 is even, 1 is all in one place.

    Attributes:
        of: What is shared: `seconds` and `hbm_bytes` over ranks, `host_bytes` over hosts.
        max_over_mean: The largest over the mean.
        total_variation: Largest distance of a share from the even one.
        total_distance: Sum of these distances; up to 2.
        chi_divergence: Chi-squared divergence from even shares, over the largest there is.
        kl_divergence: Kullback-Leibler divergence from even shares, over the largest there is.
    """

    of: str
    max_over_mean: float
    total_variation: float
    total_distance: float
    chi_divergence: float
    kl_divergence: float


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


class _Parts(NamedTuple):
    forward: float
    backward: float
    communication: float
    prefetch: float


def make_report(request: PlanRequest, plan: Plan) -> Report | None:
    """The report of a plan; `None` where the plan has no placements."""
    if not plan.placements:
        return None
    ranks, local = request.topology.ranks, request.topology.local_ranks
    tables = {table.name: table for table in request.tables}
    parts = tuple(_table_parts(request, tables[placed.table], placed) for placed in plan.placements)
    everywhere = [entry for entry in parts if not entry.ranks]
    figures = np.zeros((6, ranks)) + _sums(everywhere)[:, None]
    host_bytes = np.zeros(ranks // local) + sum(entry.host_bytes for entry in everywhere)
    on_host = np.zeros(ranks // local, dtype=np.int64) + sum(entry.host_bytes > 0 for entry in everywhere)
    common = Counter(entry.sharding.value for entry in everywhere)
    held: list[list[TableParts]] = [[] for _ in range(ranks)]
    for entry in parts:
        if not entry.ranks:
            continue
        share = _sums([entry])
        for rank in entry.ranks:
            figures[:, rank] += share
            held[rank].append(entry)
        for host in _hosts(entry, local):
            shards = sum(rank // local == host for rank in entry.ranks)
            whole_host = Layout(entry.sharding).scope is Scope.HOST
            host_bytes[host] += entry.host_bytes * (shards // local if whole_host else shards)
            on_host[host] += entry.host_bytes > 0
    figures[5] += sum(module.fixed_seconds for module in plan.modules)
    return Report(
        ranks=_ranks(figures, held, common, len(everywhere)),
        hosts=_host_entries(host_bytes, on_host, local),
        tables=parts,
        imbalance=tuple(
            _imbalance(name, values)
            for name, values in (
                ("seconds", figures[1:5].sum(axis=0)),
                ("hbm_bytes", figures[0]),
                ("host_bytes", host_bytes),
            )
            if values.sum() > 0
        ),
    )


def _sums(entries: list[TableParts]) -> FloatArray:
    """(6,) HBM, the four parts of time, and no fixed time."""
    rows = [
        (e.hbm_bytes, e.forward_seconds, e.backward_seconds, e.communication_seconds, e.prefetch_seconds, 0.0)
        for e in entries
    ]
    total: FloatArray = np.array(rows, dtype=np.float64).reshape(-1, 6).sum(axis=0)
    return total


def _hosts(entry: TableParts, local: int) -> set[int]:
    return {rank // local for rank in entry.ranks}


def _ranks(
    figures: FloatArray, held: list[list[TableParts]], common: Counter[str], everywhere: int
) -> tuple[RankParts, ...]:
    alike: dict[object, list[int]] = {}
    for rank, entries in enumerate(held):
        kinds = Counter(entry.sharding.value for entry in entries)
        names = frozenset(entry.table for entry in entries)
        alike.setdefault((figures[:, rank].tobytes(), len(names), tuple(sorted(kinds.items()))), []).append(rank)
    found = []
    for ranks in alike.values():
        first = ranks[0]
        hbm, forward, backward, communication, prefetch, fixed = figures[:, first].tolist()
        shards = common + Counter(entry.sharding.value for entry in held[first])
        entry = RankParts(
            ranks=tuple(ranks),
            tables=everywhere + len({entry.table for entry in held[first]}),
            shards=dict(sorted(shards.items())),
            hbm_bytes=round(hbm),
            forward_seconds=forward,
            backward_seconds=backward,
            communication_seconds=communication,
            prefetch_seconds=prefetch,
            fixed_seconds=fixed,
            seconds=forward + backward + communication + prefetch,
        )
        found.append(entry)
    return tuple(found)


def _host_entries(host_bytes: FloatArray, tables: npt.NDArray[np.int64], local: int) -> tuple[HostParts, ...]:
    alike: dict[tuple[int, int], list[int]] = {}
    for host, (used, number) in enumerate(zip(host_bytes.tolist(), tables.tolist(), strict=True)):
        alike.setdefault((round(used), number), []).append(host)
    return tuple(
        HostParts(hosts=tuple(hosts), ranks=local, tables=number, host_bytes=used)
        for (used, number), hosts in alike.items()
    )


def _table_parts(request: PlanRequest, table: Table, placed: Placement) -> TableParts:
    parts = _parts(request, table, placed)
    return TableParts(
        table=placed.table,
        mode=placed.mode,
        sharding=placed.sharding,
        ranks=placed.ranks,
        hbm_bytes=placed.hbm_bytes,
        host_bytes=placed.host_bytes,
        forward_seconds=parts.forward,
        backward_seconds=parts.backward,
        communication_seconds=parts.communication,
        prefetch_seconds=parts.prefetch,
    )


def _parts(request: PlanRequest, table: Table, placed: Placement) -> _Parts:
    """Parts that sum up to the placement's time, whatever the model leaves out or rounds."""
    profile = request.profile
    costs = profile.costs(request.runtime)
    layout = Layout(placed.sharding, placed.column_shards)
    load = rank_load(request, table, layout)

    def seconds(mode: Mode, *, training: bool) -> float:
        ratios, rows = np.array([placed.ratio]), np.array([float(placed.cache_rows)])
        return float(mode_seconds(profile, costs, replace(load, training=training), mode, ratios, rows)[0])

    cached = placed.mode is Mode.CACHING
    mode = Mode.HBM_ONLY if cached else placed.mode
    forward = seconds(mode, training=False)
    prefetch = 0.0
    if cached:
        values = replace(load, uncached_state_bytes=0)
        ratios, rows = np.array([placed.ratio]), np.array([float(placed.cache_rows)])
        times = [mode_seconds(profile, costs, values, each, ratios, rows)[0] for each in (mode, Mode.CACHING)]
        prefetch = float(times[1] - times[0])
    communication = communication_seconds(request, table, layout)
    parts = [max(0.0, part) for part in (forward, communication, prefetch)]
    if not load.training or sum(parts) > placed.seconds:
        scale = placed.seconds / sum(parts) if sum(parts) else 0.0
        parts = [part * scale for part in parts]
    backward = max(0.0, placed.seconds - sum(parts)) if load.training else 0.0
    return _Parts(parts[0], backward, parts[1], parts[2])


def _imbalance(of: str, values: FloatArray) -> Imbalance:
    share, number = values / values.sum(), len(values)
    even = 1 / number
    apart = np.abs(share - even)
    held = share[share > 0]
    most_chi = (1 - even) ** 2 * number + (number - 1) * even
    kl = float((held * np.log(number * held)).sum()) / math.log(number) if number > 1 else 0.0
    return Imbalance(
        of=of,
        max_over_mean=float(values.max() / values.mean()),
        total_variation=float(apart.max()),
        total_distance=float(apart.sum()),
        chi_divergence=float((apart**2 * number).sum()) / most_chi if number > 1 else 0.0,
        kl_divergence=max(0.0, kl),
    )
