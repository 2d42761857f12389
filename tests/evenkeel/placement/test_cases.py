"""Sequence tables of a collection are cut at one width, and no number of parts that may be given is left out."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenkeel.placement import InvalidInputError, Mode, Plan, PlanRequest, Runtime, Sharding, Status, Table, plan
from evenkeel.placement.application import torchrec_options
from evenkeel.placement.cases import MOST_CASES, at_each_width
from tests.evenkeel.placement.instances import random_tables
from tests.evenkeel.placement.test_sharding import ask

LISTS = (
    (Sharding.COLUMN_WISE,),
    (Sharding.TABLE_WISE, Sharding.COLUMN_WISE),
    (Sharding.ROW_WISE, Sharding.COLUMN_WISE),
    (Sharding.DATA_PARALLEL, Sharding.TABLE_WISE, Sharding.COLUMN_WISE),
)


def drawn(seed: int, part: float, count: int = 2, *, pooled: bool = False) -> PlanRequest:
    """Some tables of one width, each with a list, on 4 ranks with room for a part of them."""
    draw = np.random.default_rng(seed)
    modes = (Mode.HBM_ONLY, Mode.HOST_ONLY)
    dim = int(draw.choice([16, 24, 64, 96]))
    tables = tuple(
        replace(table, dim=dim, sharding=LISTS[draw.integers(len(LISTS))])
        for table in random_tables(count, seed, pooled=pooled, modes=modes)
    )
    size = sum(table.rows * table.dim * 12 for table in tables) / 2**30
    return ask(tables, 2.01 + part * size / 4)


def widths(request: PlanRequest, found: Plan) -> set[int]:
    pairs = zip(request.tables, found.placements, strict=True)
    return {t.dim // p.column_shards for t, p in pairs if p.sharding is Sharding.COLUMN_WISE}


def pinned(request: PlanRequest, parts: int) -> PlanRequest:
    return replace(request, tables=tuple(replace(table, column_shards=parts) for table in request.tables))


@given(st.integers(0, 10_000), st.floats(0.1, 1.0), st.booleans())
@settings(max_examples=6, deadline=None)
def test_no_number_of_parts_that_is_given_makes_a_faster_plan(seed: int, part: float, pooled: bool) -> None:
    request = drawn(seed, part, pooled=pooled)
    found = plan(request, split=False, clock=time.process_time)
    for parts in (2, 3, 4):
        if request.tables[0].dim % (4 * parts):
            continue
        other = plan(pinned(request, parts), split=False, clock=time.process_time)
        if other.seconds is None:
            continue
        assert found.status is Status.OPTIMAL
        assert found.seconds is not None
        assert found.bound_seconds is not None
        assert found.seconds <= other.seconds * (1 + 2e-4)
        assert found.bound_seconds <= other.seconds * (1 + 1e-9)


@given(st.integers(0, 10_000), st.floats(0.1, 1.0))
@settings(max_examples=6, deadline=None)
def test_what_is_planned_for_sequences_can_be_applied(seed: int, part: float) -> None:
    request = drawn(seed, part, 3)
    found = plan(request, split=False, clock=time.process_time)
    if found.seconds is not None:
        assert len(widths(request, found)) <= 1
        assert set(torchrec_options(request, found)) == {table.name for table in request.tables}


def test_a_width_narrower_than_others_is_taken_where_only_it_fits() -> None:
    """Also in what is said to be the least memory that does."""
    table = Table(name="t", rows=3_000_000, dim=64, ids_per_sample=300.0, modes=(Mode.HBM_ONLY,))
    request = ask((replace(table, sharding=(Sharding.TABLE_WISE, Sharding.COLUMN_WISE)),), 3.0)
    found = plan(request, split=False)
    assert found.placements[0].column_shards == 4
    request = replace(request, topology=replace(request.topology, hbm_bytes=2 << 30))
    least = plan(request, split=False).shortage
    other = plan(pinned(request, 4), split=False).shortage
    assert least is not None
    assert other is not None
    assert least.smallest_hbm_bytes == other.smallest_hbm_bytes


def test_a_width_that_is_given_is_that_of_the_whole_collection() -> None:
    tables = tuple(Table(name=f"t{i}", rows=10**6, dim=64 * (1 + i % 2), sharding=LISTS[0]) for i in range(4))
    given = (replace(tables[0], column_shards=2), *tables[1:])
    (asked,) = at_each_width(ask(given, 24.0))
    assert [table.dim // table.column_shards for table in asked.tables] == [32] * 4
    lonely = ask((tables[0], replace(tables[1], group="other"), replace(tables[2], pooled=True)), 24.0)
    assert at_each_width(lonely) == (lonely,), "tables that share no collection share no width"
    assert at_each_width(replace(lonely, runtime=Runtime.TORCHREC, tables=())) == (replace(lonely, tables=()),)


def test_tables_without_a_common_width_are_refused() -> None:
    tables = tuple(Table(name=f"t{dim}", rows=10**6, dim=dim, sharding=LISTS[0]) for dim in (48, 32))
    with pytest.raises(InvalidInputError, match=r"tables\[1\].sharding.*'t32' no width that 't48'"):
        plan(ask(tables, 24.0, 2, 2))
    assert plan(ask(tables, 24.0, 4, 4), split=False).placements[0].column_shards == 3
    free = (tables[0], replace(tables[1], sharding=LISTS[2]))
    placed = plan(ask(free, 24.0, 2, 2), split=False).placements
    assert [p.sharding for p in placed] == [Sharding.COLUMN_WISE, Sharding.ROW_WISE]


def test_the_cases_of_many_collections_are_few() -> None:
    table = Table(name="t", rows=10**6, dim=64, sharding=LISTS[1])
    tables = tuple(replace(table, name=f"t{i}", rows=10**6 + i, group=f"{i // 2}") for i in range(12))
    found = at_each_width(ask(tables, 24.0, 8, 8))
    assert 1 < len(found) <= MOST_CASES
    for asked in found:
        for first, second in zip(asked.tables[::2], asked.tables[1::2], strict=True):
            assert first.column_shards == second.column_shards
