from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest

from evenkeel.placement import (
    InvalidInputError,
    Mode,
    Plan,
    PlanRequest,
    Sharding,
    SolverOptions,
    Status,
    Table,
    plan,
)
from evenkeel.placement.fields import decode, encode
from tests.evenkeel.placement.instances import random_tables, request


def test_everything_fits_in_hbm_where_there_is_enough() -> None:
    found = plan(request(random_tables(10, 1), hbm_gib=140))
    assert found.status is Status.OPTIMAL
    assert {p.mode for p in found.placements} == {Mode.HBM_ONLY}
    assert found.hbm.seconds_per_gib == 0


@pytest.mark.parametrize("runtime", ["dynamicemb", "torchrec"])
def test_a_plan_keeps_its_budgets_and_adds_up(runtime: str) -> None:
    asked = request(random_tables(25, 3), hbm_gib=2.5, host_gib=200, runtime=runtime)
    found = plan(asked)
    assert found.status is Status.OPTIMAL
    assert found.hbm.used_bytes <= found.hbm.limit_bytes
    assert sum(p.hbm_bytes for p in found.placements) == found.hbm.used_bytes
    assert sum(p.host_bytes for p in found.placements) == found.host.used_bytes
    assert found.seconds is not None
    assert sum(p.seconds for p in found.placements) == pytest.approx(found.seconds)
    assert sum(m.fixed_seconds for m in found.modules) == pytest.approx(found.host_seconds)
    assert found.bound_seconds == pytest.approx(found.seconds)
    trivial = [known.seconds for known in found.trivial if known.seconds is not None]
    assert min(trivial) >= found.seconds * (1 - 1e-9)
    assert [p.table for p in found.placements] == [t.name for t in asked.tables]
    assert sorted(t for m in found.modules for t in m.tables) == sorted(t.name for t in asked.tables)


def test_plans_and_requests_survive_json() -> None:
    asked = request(random_tables(5, 2), hbm_gib=1.5)
    found = plan(asked)
    assert decode(Plan, json.loads(json.dumps(encode(found)))) == found
    assert decode(PlanRequest, json.loads(json.dumps(encode(asked)))) == asked


def test_pins_and_exclusions_are_kept() -> None:
    first, second, third = random_tables(3, 1)
    tables = (
        replace(first, ratio=0.25, group="a"),
        replace(second, modes=(Mode.CACHING,), group="b"),
        replace(third, ratio=0.0, group="c"),
    )
    found = plan(request(tables, hbm_gib=3)).placements
    assert found[0].ratio == 0.25
    assert found[0].mode in (Mode.CACHING, Mode.HYBRID)
    assert found[1].mode is Mode.CACHING
    assert found[2].mode is Mode.HOST_ONLY


def test_a_cache_smaller_than_the_prefetched_keys_is_not_planned() -> None:
    table = Table(name="t", rows=100_000, dim=64, ids_per_sample=20, modes=(Mode.CACHING,))
    asked = request((table,), hbm_gib=2)
    deep = replace(asked, step=replace(asked.step, prefetch_depth=2))
    placed = plan(deep).placements[0]
    assert placed.cache_rows >= 2 * placed.unique_keys
    with pytest.raises(InvalidInputError) as caught:
        plan(replace(asked, step=replace(asked.step, prefetch_depth=64)))
    assert caught.value.field == "tables[0].modes"


@pytest.mark.parametrize(("sharding", "hbm_gib"), [(Sharding.TABLE_WISE, 8), (Sharding.COLUMN_WISE, 9.5)])
def test_tables_that_live_on_one_rank_are_placed_on_ranks(sharding: Sharding, hbm_gib: float) -> None:
    shards = 2 if sharding is Sharding.COLUMN_WISE else 1
    tables = random_tables(24, 4, sharding=sharding, column_shards=shards, pooled=sharding is Sharding.COLUMN_WISE)
    asked = request(tables, hbm_gib=hbm_gib, runtime="torchrec", ranks=4, solver=SolverOptions(time_limit_s=1))
    found = plan(asked, clock=time.process_time)
    assert found.status in (Status.OPTIMAL, Status.FEASIBLE)
    assert found.gap < 0.01
    loads = [0.0] * 4
    hbm = [0] * 4
    for placement in found.placements:
        assert len(placement.ranks) == shards
        for rank in placement.ranks:
            loads[rank] += placement.seconds / shards if shards == 1 else placement.seconds
            hbm[rank] += placement.hbm_bytes
    assert max(hbm) <= found.hbm.limit_bytes
    assert max(loads) <= found.seconds * 1.001


@pytest.mark.parametrize("runtime", ["dynamicemb", "torchrec"])
def test_contradicting_pins_are_named(runtime: str) -> None:
    first, second, third, fourth = random_tables(4, 1)
    tables = (replace(first, ratio=0.25), second, replace(third, ratio=0.5), replace(fourth, ratio=0.75))
    with pytest.raises(InvalidInputError, match=r"contradicts 'table_0' .ratio 0.25") as caught:
        plan(request(tables, hbm_gib=20, runtime=runtime))
    assert caught.value.field == ("tables[3].ratio" if runtime == "dynamicemb" else "tables[2].ratio")
    modes = (replace(first, modes=(Mode.HBM_ONLY,)), second, replace(third, modes=(Mode.HOST_ONLY,)))
    if runtime == "dynamicemb":
        with pytest.raises(InvalidInputError, match=r"contradicts 'table_0' .modes HBM_ONLY") as caught:
            plan(request(modes, hbm_gib=20))
        assert caught.value.field == "tables[2].modes"
    else:
        assert plan(request(modes, hbm_gib=20, runtime=runtime)).status is Status.OPTIMAL


def test_absurd_values_are_refused_by_field() -> None:
    table = Table(name="t", rows=10**12, dim=32_768, pooled=True, ids_per_sample=1e6, features=100_000)
    asked = request((table,), hbm_gib=100, runtime="torchrec")
    topology = replace(asked.topology, ranks=65_536, ranks_per_host=8)
    asked = replace(asked, topology=topology, step=replace(asked.step, samples_per_rank=10**9))
    with pytest.raises(InvalidInputError, match="can be counted") as caught:
        plan(asked)
    assert caught.value.field == "tables[0].ids_per_sample"
