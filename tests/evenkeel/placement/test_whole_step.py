from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from evenkeel.placement import Mode, PlanRequest, Runtime, Sharding, Table, Topology, plan, whole_step_seconds
from evenkeel.placement.whole_step import MEASURED, Launches, launch_seconds

FITTED = Path(__file__).parents[3] / "benchmarks/results/placement_gpu_fit.json"


def _request(ranks: int, *tables: Table) -> PlanRequest:
    topology = Topology(ranks=ranks, hbm_bytes=1 << 36)
    return PlanRequest(tables=tables, topology=topology, hardware="h200", runtime=Runtime.TORCHREC)


def _table(name: str, mode: Mode, **more: object) -> Table:
    return replace(Table(name=name, rows=100_000, dim=64, modes=(mode,)), **more)  # type: ignore[arg-type]


def test_one_rank_exchanges_nothing() -> None:
    request = _request(1, _table("a", Mode.HBM_ONLY))
    found = plan(request)
    assert launch_seconds(request, found) == 0
    assert whole_step_seconds(request, found) == pytest.approx(found.seconds)


def test_the_host_launches_once_for_tables_that_are_exchanged_together() -> None:
    launches = Launches(exchange_s=1.0, cache_s=0.1)
    together = _request(2, _table("a", Mode.HBM_ONLY), _table("b", Mode.HOST_ONLY), _table("c", Mode.CACHING))
    assert launch_seconds(together, plan(together), launches) == pytest.approx(1.1)
    single = {"sharding": Sharding.TABLE_WISE}
    apart = _request(
        2,
        _table("a", Mode.HBM_ONLY),
        _table("b", Mode.HBM_ONLY, pooled=True),
        _table("c", Mode.HBM_ONLY, group="other"),
        _table("d", Mode.HBM_ONLY, **single),
        _table("e", Mode.HBM_ONLY, **single),
        _table("f", Mode.HBM_ONLY, sharding=Sharding.DATA_PARALLEL),
    )
    assert launch_seconds(apart, plan(apart), launches) == pytest.approx(4.0)


def test_the_slower_of_host_and_gpu_tells() -> None:
    request = _request(2, _table("a", Mode.HBM_ONLY))
    found = plan(request)
    assert whole_step_seconds(request, found) == pytest.approx(MEASURED.exchange_s, rel=0.01)
    slow = replace(found, seconds=1.0)
    assert whole_step_seconds(request, slow) == pytest.approx(1.0, rel=1e-3)
    assert whole_step_seconds(request, replace(found, seconds=None)) is None


def test_the_constants_are_those_that_were_fitted() -> None:
    summary = json.loads(FITTED.read_text("utf-8"))["summary"]["fitted_to_even"]
    assert MEASURED.exchange_s * 1e3 == pytest.approx(summary["exchange_ms"], rel=0.02)
    assert MEASURED.cache_s * 1e3 == pytest.approx(summary["cache_ms"], rel=0.1)
    assert summary["unseen_within_20_percent"] == summary["unseen"]
