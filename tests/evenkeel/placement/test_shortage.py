from __future__ import annotations

import time
from dataclasses import replace

import pytest

from evenkeel.placement import Mode, Sharding, SolverOptions, Status, Table, plan
from tests.evenkeel.placement.instances import random_tables, request


@pytest.mark.parametrize(("runtime", "count", "host_gib"), [("dynamicemb", 10, 4), ("torchrec", 5, 2)])
def test_what_does_not_fit_names_budgets_that_do(runtime: str, count: int, host_gib: float) -> None:
    patient = SolverOptions(time_limit_s=100)
    asked = request(random_tables(count, 2), hbm_gib=1.1, host_gib=host_gib, runtime=runtime, solver=patient)
    found = plan(asked, clock=time.process_time)
    assert found.status is Status.INFEASIBLE
    shortage = found.shortage
    assert shortage.smallest_hbm_bytes is not None
    assert shortage.tables
    enough = replace(asked, topology=replace(asked.topology, hbm_bytes=shortage.smallest_hbm_bytes))
    assert plan(enough, clock=time.process_time).status is Status.OPTIMAL
    assert shortage.least_hbm_bytes == shortage.smallest_hbm_bytes
    less = replace(asked, topology=replace(asked.topology, hbm_bytes=shortage.least_hbm_bytes - 4096))
    assert plan(less, clock=time.process_time).status is Status.INFEASIBLE


def test_reservations_are_taken_off_and_put_back() -> None:
    asked = request(random_tables(10, 2), hbm_gib=1, host_gib=1)
    topology = replace(
        asked.topology, hbm_reserved_fraction=0.3, hbm_reserved_bytes=1 << 30, host_reserved_fraction=0.2
    )
    shortage = plan(replace(asked, topology=topology)).shortage
    assert shortage.smallest_hbm_bytes is not None
    enough = replace(topology, hbm_bytes=shortage.smallest_hbm_bytes)
    assert plan(replace(asked, topology=enough)).status is Status.OPTIMAL
    assert " of HBM on every GPU (with what is reserved of it)" in shortage.explanation
    assert ",;" not in shortage.explanation
    assert ",." not in shortage.explanation


@pytest.mark.parametrize("sharding", [Sharding.ROW_WISE, Sharding.TABLE_WISE])
def test_memory_of_hosts_without_limit_is_nothing_to_raise(sharding: Sharding) -> None:
    tables = random_tables(5, 2, sharding=sharding, modes=(Mode.HBM_ONLY,))
    shortage = plan(request(tables, hbm_gib=2.01, runtime="torchrec")).shortage
    assert shortage.smallest_hbm_bytes is not None
    assert (shortage.smallest_host_bytes, shortage.least_host_bytes, shortage.host_shortfall_bytes) == (None,) * 3
    assert "on every host" not in shortage.explanation


@pytest.mark.parametrize("reserved", [0.0, 1.0])
def test_no_budget_is_named_where_none_that_there_may_be_does(reserved: float) -> None:
    tables = (Table(name="t", rows=10**12, dim=32_768, modes=(Mode.HBM_ONLY,)),)
    asked = request(tables, hbm_gib=80, runtime="torchrec", ranks=2)
    topology = replace(asked.topology, hbm_reserved_fraction=reserved)
    shortage = plan(replace(asked, topology=topology)).shortage
    assert (shortage.smallest_hbm_bytes, shortage.least_hbm_bytes) == (None, None)
    assert "no HBM of a rank is enough" in shortage.explanation


def test_without_gpus_only_memory_of_hosts_is_named() -> None:
    asked = request(random_tables(4, 2), hbm_gib=0, host_gib=0.1)
    shortage = plan(asked).shortage
    assert shortage.smallest_host_bytes is not None
    assert (shortage.smallest_hbm_bytes, shortage.least_hbm_bytes, shortage.hbm_shortfall_bytes) == (None,) * 3
    assert "HBM" not in shortage.explanation
    enough = replace(asked, topology=replace(asked.topology, host_bytes=shortage.smallest_host_bytes))
    assert plan(enough).status is Status.OPTIMAL


def test_a_table_that_fits_no_rank_is_named() -> None:
    small, large = (Table(name=name, rows=rows, dim=128) for name, rows in (("small", 1000), ("large", 40_000_000)))
    tables = tuple(replace(table, sharding=Sharding.TABLE_WISE) for table in (small, large))
    asked = request(tables, hbm_gib=4, host_gib=40, runtime="torchrec", ranks=2)
    found = plan(asked)
    assert found.status is Status.INFEASIBLE
    assert found.shortage.tables[0] == "large"
    assert "no shard fits on a rank (large)" in found.shortage.explanation
    assert found.shortage.smallest_host_bytes is not None
    enough = replace(asked, topology=replace(asked.topology, host_bytes=found.shortage.smallest_host_bytes))
    assert plan(enough).seconds is not None
    less = replace(asked, topology=replace(asked.topology, host_bytes=found.shortage.least_host_bytes - 4096))
    assert plan(less).status is Status.INFEASIBLE
