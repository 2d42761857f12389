"""More memory gives no slower plan: the best plan of any smaller budget is a plan."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenkeel.placement import Sharding, SolverOptions, Status, plan
from tests.evenkeel.placement.instances import random_tables, request

SOLVER = SolverOptions(ratio_steps=10, time_limit_s=20)


@given(
    st.integers(1, 12),
    st.integers(1, 4),
    st.integers(0, 5_000),
    st.sampled_from(["dynamicemb", "torchrec"]),
    st.lists(st.floats(0, 1), min_size=2, max_size=2),
    st.lists(st.floats(0.3, 1.3), min_size=2, max_size=2),
)
@settings(max_examples=8, deadline=None)
def test_row_wise_plans_never_get_slower(
    count: int, groups: int, seed: int, runtime: str, hbm: list[float], host: list[float]
) -> None:
    drawn = random_tables(count, seed)
    tables = tuple(replace(table, group=f"m{index % groups}") for index, table in enumerate(drawn))
    size = sum(table.rows * table.dim * 12 for table in tables) / 2**30
    small, large = (
        plan(
            request(tables, hbm_gib=1.2 + part * size / 8, host_gib=rest * size, runtime=runtime, solver=SOLVER),
            clock=time.process_time,
        )
        for part, rest in zip(sorted(hbm), sorted(host), strict=True)
    )
    if small.seconds is not None:
        assert small.status is Status.OPTIMAL
        assert large.seconds is not None
        assert large.seconds <= small.seconds * (1 + 1e-9)
        assert large.bound_seconds is not None
        assert large.bound_seconds <= small.seconds * (1 + 1e-9)


_CHOSEN = (Sharding.ROW_WISE, Sharding.TABLE_WISE, Sharding.COLUMN_WISE, Sharding.DATA_PARALLEL)


@pytest.mark.parametrize("sharding", [Sharding.TABLE_WISE, Sharding.COLUMN_WISE, _CHOSEN])
def test_plans_of_whole_shards_get_no_slower_than_their_gap(sharding: Sharding | tuple[Sharding, ...]) -> None:
    cut = {Sharding.COLUMN_WISE: 2, _CHOSEN: 0}.get(sharding, 1)
    tables = random_tables(12, 0, sharding=sharding, column_shards=cut, pooled=sharding == _CHOSEN)
    best = float("inf")
    for hbm_gib in (3.5, 5, 6.5) if sharding == _CHOSEN else (4.5, 5, 5.5, 6, 6.5, 7):
        asked = request(tables, hbm_gib=hbm_gib, runtime="torchrec", ranks=4, solver=SolverOptions(time_limit_s=3))
        found = plan(asked, clock=time.process_time)
        assert found.seconds is not None
        assert found.bound_seconds is not None
        assert found.bound_seconds <= best * (1 + 1e-9)
        assert found.seconds <= best * 1.01
        best = min(best, found.seconds)
