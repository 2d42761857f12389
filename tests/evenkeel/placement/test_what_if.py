from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from evenkeel.placement import (
    Optimizer,
    PlanRequest,
    Runtime,
    Sharding,
    SolverOptions,
    Step,
    Table,
    Topology,
    Zipf,
    parse_topology,
    plan,
    what_if,
)
from evenkeel.placement.fields import TimeIsUpError
from tests.evenkeel.placement.instances import random_tables, request


@pytest.mark.parametrize(("resource", "hbm_gib", "host_gib"), [("hbm", 5, None), ("host", 1.5, 60)])
def test_a_curve_over_either_memory_falls_and_is_one_of_plans(
    resource: str, hbm_gib: float, host_gib: float | None
) -> None:
    asked = request(random_tables(12, 8), hbm_gib=hbm_gib, host_gib=host_gib)
    answer = what_if(asked, points=8 * (resource == "hbm"), host_points=8 * (resource == "host"))
    curve, other = (answer.curve, answer.host_curve)[:: 1 if resource == "hbm" else -1]
    assert not other
    assert answer.next_hbm_gib_saves_seconds > 0
    values = [value.seconds_per_gib for value in answer.tables]
    assert values == sorted(values, reverse=True)
    sizes = [(point.hbm_bytes, point.host_bytes or 0) for point in curve]
    assert sizes == sorted(sizes)
    known = [point for point in curve if point.seconds is not None]
    assert len(known) > 5
    times = [point.seconds for point in known]
    assert times == sorted(times, reverse=True)
    assert times[0] != times[-1]
    for point in known[::3]:
        there = replace(asked.topology, hbm_bytes=point.hbm_bytes, host_bytes=point.host_bytes)
        assert plan(replace(asked, topology=there)).seconds <= point.seconds * 1.002
    if resource == "host":
        boundless = plan(replace(asked, topology=replace(asked.topology, host_bytes=None)))
        assert boundless.seconds == pytest.approx(times[-1], rel=2e-3)


@pytest.mark.parametrize("runtime", ["dynamicemb", "torchrec"])
def test_curve_and_savings_beside_a_dense_part_are_those_of_such_plans(runtime: str) -> None:
    asked = request(random_tables(12, 4), hbm_gib=3, runtime=runtime)
    asked = replace(asked, step=replace(asked.step, dense_ms=1e-4))
    answer = what_if(asked, hbm_bytes=(3 << 30, 4 << 30))
    now, then = (point.seconds for point in answer.curve)
    assert now == pytest.approx(answer.plan.seconds)
    assert answer.next_hbm_gib_saves_seconds == pytest.approx(now - then, abs=0.02 * now)  # curves have other ratios


def test_a_curve_over_shards_on_ranks_is_one_of_plans() -> None:
    tables = random_tables(3, 5, pooled=True, sharding=(Sharding.TABLE_WISE, Sharding.ROW_WISE))
    asked = request(tables, hbm_gib=2.6, runtime="torchrec", ranks=4, solver=SolverOptions(ratio_steps=3))
    answer = what_if(asked, hbm_bytes=(5 << 29, 4 << 30), clock=time.process_time)
    assert answer.curve[0].seconds > 2 * answer.curve[1].seconds
    for point in answer.curve:
        there = replace(asked, topology=replace(asked.topology, hbm_bytes=point.hbm_bytes))
        own = plan(there, clock=time.process_time)
        assert point.seconds >= own.bound_seconds * (1 - 1e-9)
        assert point.seconds == pytest.approx(own.seconds, rel=0.01)
    assert answer.next_hbm_gib_saves_seconds <= answer.plan.seconds - own.bound_seconds + 1e-9


@pytest.mark.parametrize("sharding", [Sharding.ROW_WISE, Sharding.TABLE_WISE])
def test_the_next_gib_saves_what_planning_again_with_it_saves(sharding: Sharding) -> None:
    """Also where what it buys fits on no rank today."""
    table = Table(
        name="t",
        rows=1_000_000 * (2 if sharding is Sharding.ROW_WISE else 1),
        dim=256,
        ids_per_sample=300.0,
        access=Zipf(exponent=0.0),
        sharding=sharding,
        optimizer=Optimizer.SGD,
    )
    least = int(2.7 * 2**30)
    topology = Topology(ranks=2, hbm_bytes=least)
    asked = PlanRequest(tables=(table,), topology=topology, runtime=Runtime.TORCHREC, step=Step(samples_per_rank=64))
    more = replace(asked, topology=replace(topology, hbm_bytes=least + 2**30))
    now, then = plan(asked).seconds, plan(more).seconds
    assert then < 0.6 * now
    answer = what_if(asked, points=0)
    assert answer.next_hbm_gib_saves_seconds == pytest.approx(now - then)
    assert answer.plan.placements[0].seconds_per_gib > 0
    assert [value.table for value in answer.tables] == ["t"]


def test_many_sizes_of_memory_that_is_partly_reserved_keep_a_short_time_limit() -> None:
    """Most of it is for the curve."""
    name, machines = parse_topology("h100x8")
    machines = replace(machines, hbm_reserved_fraction=0.15)
    options = SolverOptions(time_limit_s=0.6)
    tables = random_tables(50, 1)
    asked = PlanRequest(tables=tables, topology=machines, hardware=name, runtime=Runtime.TORCHREC, solver=options)
    begin = time.process_time()
    answer = what_if(asked, points=256, clock=time.process_time)
    assert time.process_time() - begin < 0.6 + 0.3
    assert answer.plan.seconds is not None
    assert len(answer.curve) >= 3


@pytest.mark.parametrize("ask", [plan, what_if])
def test_a_limit_that_is_over_while_tables_that_share_caches_are_priced_is_kept_and_named(
    ask: Callable[..., object],
) -> None:
    tables = tuple(Table(name=f"t{i}", rows=1_000_003 + i, dim=64) for i in range(1500))
    asked = request(tables, hbm_gib=60, runtime="torchrec", solver=SolverOptions(time_limit_s=0.1))
    begin = time.process_time()
    with pytest.raises(TimeIsUpError, match=r"1500 tables are priced \(got 0\.1\); give more time"):
        ask(asked, clock=time.process_time)
    assert time.process_time() - begin < 0.1 + 0.3


def test_a_curve_without_a_point_says_why() -> None:
    asked = request(random_tables(5, 1), hbm_gib=4)
    ticks = itertools.count()
    answer = what_if(asked, points=3, clock=lambda: 0.0 if next(ticks) < 20 else 1e6)
    assert answer.plan.seconds is not None
    assert not answer.curve
    assert answer.notice == "time was over when 0 of 3 sizes were planned for: raise solver.time_limit_s or ask fewer"
    assert what_if(asked, points=3).notice == ""
