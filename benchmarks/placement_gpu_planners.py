"""Planners as functions of a budget, and the budget at which a planner's plan really takes the HBM that there is.

A planner's model of memory is off by some, to one side or the other. So that plans are compared by what they do with
the same bytes, each planner is asked again with another budget, until what its plan takes on the GPU is the budget or
a little less.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from fbgemm_gpu.split_table_batched_embeddings_ops_common import CacheAlgorithm
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
from torchrec.distributed.planner import Topology as TorchRecTopology
from torchrec.distributed.planner.proposers import (
    DynamicProgrammingProposer,
    EmbeddingOffloadScaleupProposer,
    GreedyProposer,
    GridSearchProposer,
    UniformProposer,
)
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.types import CacheParams, CacheStatistics

from benchmarks.peers.checkouts import TorchEasyRec
from benchmarks.placement_gpu_model import sharders
from evenkeel.placement import Eviction, InvalidInputError, MissCurve, Mode, Optimizer, PlanRequest, Status, plan
from evenkeel.placement.hit_rates import step_keys
from trainer_client.planning import sharding_plan

KERNELS = {Mode.HBM_ONLY: "fused", Mode.CACHING: "fused_uvm_caching", Mode.HOST_ONLY: "fused_uvm"}
DEFAULT_LOAD_FACTOR = 0.2

Planner = Callable[[Any, int], Any]
"""From a model on no device and a budget of HBM in bytes to a `ShardingPlan`, or `None` if it finds none."""


@dataclass(frozen=True, slots=True)
class Try:
    """What came of asking a planner for a plan.

    Attributes:
        asked: HBM in bytes that the planner was told of.
        used: HBM in bytes that its plan took; `None` where it found no plan.
        built: The plan's model, to be run.
    """

    asked: int
    used: int | None
    built: Any = None


def fit_to_budget(attempt: Callable[[int], Try], budget: int, *, tries: int = 4, close: float = 0.02) -> Try | None:
    """The plan that takes most of `budget`, among those of `tries` requests that take no more.

    Args:
        attempt: Asks the planner with a budget, and measures what its plan takes.
        budget: HBM that a plan may take, in bytes.
        tries: Requests at most.
        close: A plan that takes this much less than the budget is not improved on.

    Returns:
        `None` where no request gave a plan within the budget.
    """
    best: Try | None = None
    asked, low, high = budget, 0, 0  # the largest request known to fit or to be too small; the smallest too large
    aim, last = budget * (1 - close / 2), None
    for _ in range(tries):
        found = attempt(asked)
        used = found.used
        if used is not None and used > budget:
            high = min(high or asked, asked)
        else:
            low = max(low, asked)
            if used is not None and (best is None or used > (best.used or 0)):
                best = found
        del found  # what was built for it may be large
        if used is not None and budget * (1 - close) <= used <= budget:
            break
        wanted = asked * 1.25 if used is None else asked * aim / max(used, 1)
        if used is not None and last is not None and (asked - last[0]) * (used - last[1]) > 0:
            wanted = asked + (aim - used) * (asked - last[0]) / (used - last[1])
        last = None if used is None else (asked, used)
        asked = round(wanted)
        if high and not low < asked < high:
            asked = (low + high) // 2
        elif asked <= low:
            asked = round(low * 1.1)
    return best


def ours(request: PlanRequest, device: str) -> Planner:
    """Evenkeel's planner; `request` says what else there is."""

    def make(model: Any, hbm: int) -> Any:
        workspace = request.profile.costs(request.runtime).workspace_bytes
        budgeted = replace(request, topology=replace(request.topology, hbm_bytes=hbm + workspace))
        found = plan(budgeted, split=False)
        if found.status not in (Status.OPTIMAL, Status.FEASIBLE):
            return None
        return sharding_plan(model, budgeted, found, device=device)

    return make


def torchrecs(request: PlanRequest, device: str) -> Planner:
    """TorchRec's planner: all of its proposers, all kernels, the measured statistics."""

    def make(model: Any, hbm: int) -> Any:
        planner = EmbeddingShardingPlanner(
            topology=_topology(hbm, device),
            batch_size=request.step.samples_per_rank,
            constraints=_constraints(request),
            storage_reservation=FixedPercentageStorageReservation(0.0),
            proposer=[
                GreedyProposer(),
                GreedyProposer(use_depth=False),
                UniformProposer(),
                GridSearchProposer(),
                DynamicProgrammingProposer(),
                EmbeddingOffloadScaleupProposer(),
            ],
        )
        return _planned(planner, model)

    return make


def torcheasyrecs(request: PlanRequest, peer: TorchEasyRec, device: str) -> Planner:
    """TorchEasyRec's planner, as its `create_planner` makes it, with the measured statistics and no reservation."""

    def make(model: Any, hbm: int) -> Any:
        topology, samples, constraints = _topology(hbm, device), request.step.samples_per_rank, _constraints(request)
        planner = EmbeddingShardingPlanner(
            topology=topology,
            batch_size=samples,
            enumerator=peer.planner.EmbeddingEnumerator(topology=topology, batch_size=samples, constraints=constraints),
            storage_reservation=FixedPercentageStorageReservation(0.0),
            proposer=[peer.planner.DynamicProgrammingProposer(), UniformProposer()],
        )
        return _planned(planner, model)

    return make


def all_cached(request: PlanRequest, device: str) -> Planner:
    """Every table in host memory with a cache of the same share of its rows, as large as the budget allows."""
    pinned = tuple(replace(table, modes=(Mode.HBM_ONLY,)) for table in request.tables)
    everything = replace(request, tables=pinned, topology=replace(request.topology, hbm_bytes=1 << 45))
    weights = sum(table.rows * table.dim * table.value_bytes for table in request.tables)

    def make(model: Any, hbm: int) -> Any:
        placed = sharding_plan(model, everything, plan(everything, split=False), device=device)
        share = min(1.0, max(0.001, hbm / weights))
        for parameters in placed.plan.values():
            for parameter in parameters.values():
                parameter.compute_kernel = KERNELS[Mode.CACHING]
                parameter.cache_params = CacheParams(algorithm=CacheAlgorithm.LRU, load_factor=share)
        return placed

    return make


def predicted_seconds(request: PlanRequest, placed: Any) -> float | None:
    """What our model says of a step of anybody's plan; `None` where it knows no such placement."""
    modes = {kernel: mode for mode, kernel in KERNELS.items()}
    where = {name: parameter for parameters in placed.plan.values() for name, parameter in parameters.items()}
    rows = {table.name: table.rows for table in request.tables}
    factors = {
        name: getattr(parameter.cache_params, "load_factor", None) or DEFAULT_LOAD_FACTOR
        for name, parameter in where.items()
        if modes[parameter.compute_kernel] is Mode.CACHING
    }
    # FBGEMM's cache is one for all tables of a kernel.
    held = sum(factor * rows[name] for name, factor in factors.items())
    ratio = min(0.999, max(0.001, held / max(1, sum(rows[name] for name in factors))))
    tables = tuple(
        replace(
            table,
            modes=(modes[where[table.name].compute_kernel],),
            ratio=ratio if table.name in factors else None,
        )
        for table in request.tables
    )
    pinned = replace(request, tables=tables, topology=replace(request.topology, hbm_bytes=1 << 45))
    try:
        return plan(pinned, split=False).seconds
    except InvalidInputError:
        return None


def kernels_of(placed: Any) -> dict[str, int]:
    """Number of tables of each kernel."""
    counts: dict[str, int] = {}
    for parameters in placed.plan.values():
        for parameter in parameters.values():
            counts[parameter.compute_kernel] = counts.get(parameter.compute_kernel, 0) + 1
    return counts


class _Statistics(CacheStatistics):  # type: ignore[misc]
    """A table's measured curve, in the form that TorchRec's planner takes."""

    def __init__(self, curve: MissCurve, rows: int, lookups: float) -> None:
        self._keys, self._rows = step_keys(curve, rows, lookups, Eviction.LRU), rows

    @property
    def expected_lookups(self) -> float:
        return self._keys.unique

    def expected_miss_rate(self, clf: float) -> float:
        return float(self._keys.misses(np.array([clf * self._rows]))[0])

    @property
    def cacheability(self) -> float:
        return float(np.mean([self.expected_miss_rate(part / 20) for part in range(1, 21)]))


def _topology(hbm: int, device: str) -> TorchRecTopology:
    return TorchRecTopology(world_size=1, local_world_size=1, compute_device=device, hbm_cap=hbm, ddr_cap=1 << 42)


def _constraints(request: PlanRequest) -> dict[str, ParameterConstraints]:
    constraints = {}
    for table in request.tables:
        curve = table.access
        assert isinstance(curve, MissCurve)
        lookups = table.ids_per_sample * request.step.samples_per_rank
        constraints[table.name] = ParameterConstraints(
            compute_kernels=list(KERNELS.values()),
            sharding_types=["table_wise", "row_wise"],
            pooling_factors=[table.ids_per_sample],
            cache_params=CacheParams(load_factor=DEFAULT_LOAD_FACTOR, stats=_Statistics(curve, table.rows, lookups)),
        )
    return constraints


def _planned(planner: EmbeddingShardingPlanner, model: Any) -> Any:
    """Its plan; whatever it raises where it finds none is a result."""
    from torchrec.distributed.planner.types import PlannerError

    try:
        return planner.plan(model, sharders(Optimizer.ROWWISE_ADAGRAD))
    except PlannerError:
        return None
