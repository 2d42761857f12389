"""Bounds by sets of openings and by what a rank can hold, and shards that only just fit."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenkeel.placement import Mode, PlanRequest, Sharding, SolverOptions, Status, Table, plan
from evenkeel.placement.building import build_problem
from evenkeel.placement.incumbent import Incumbent
from evenkeel.placement.limits import Watch
from evenkeel.placement.patterns import Patterns
from evenkeel.placement.ranks import Machines, Shards, loads, place_shards
from tests.evenkeel.placement.instances import random_tables, request
from tests.evenkeel.placement.test_sharding import ask, brute_force

WAYS = (Sharding.TABLE_WISE, Sharding.COLUMN_WISE, Sharding.TABLE_ROW_WISE, Sharding.GRID)


def patterns_of(asked: PlanRequest) -> Patterns:
    problem = build_problem(asked)
    whole = Incumbent(asked, problem, Watch())
    found = Patterns.of(problem, whole.whole, whole.machines)
    assert found is not None
    return found


@given(st.integers(0, 10_000), st.floats(0.3, 1.0), st.sampled_from(WAYS), st.sampled_from([None, 2.0]))
@settings(max_examples=8, deadline=None)
def test_no_plan_is_below_the_bound_of_patterns(
    seed: int, part: float, sharding: Sharding, host_gib: float | None
) -> None:
    modes = (Mode.HBM_ONLY, Mode.HOST_ONLY)
    tables = random_tables(3, seed, pooled=True, modes=modes, sharding=(sharding, Sharding.ROW_WISE))
    size = sum(table.rows * table.dim * 12 for table in tables) / 2**30
    asked = ask(tables, 2.01 + part * size / 4, host_gib=host_gib)
    best = brute_force(asked)
    patterns = patterns_of(asked)
    patterns.raise_at(np.array([1e-7, 1e-8]))
    patterns.prove(best if np.isfinite(best) else 1.0, Watch())
    assert patterns.bound <= best * (1 + 1e-9)
    assert patterns.bound > 0


def test_fewer_openings_are_found_where_they_are_better() -> None:
    tables = random_tables(10, 4, sharding=Sharding.TABLE_WISE)
    asked = request(tables, hbm_gib=5, runtime="torchrec", ranks=4, solver=SolverOptions(time_limit_s=20))
    found = plan(asked, split=False, clock=time.process_time)
    assert found.status is Status.OPTIMAL
    assert [module.mode for module in found.modules] == [Mode.CACHING]


def test_what_one_rank_can_hold_proves_that_five_tables_on_four_ranks_take_two_turns() -> None:
    one = Table(
        name="t", rows=1_000_000, dim=64, ids_per_sample=20, sharding=Sharding.TABLE_WISE, modes=(Mode.HBM_ONLY,)
    )
    tables = tuple(replace(one, name=f"t{index}") for index in range(5))
    asked = request(tables, hbm_gib=8, runtime="torchrec", ranks=4)
    patterns = patterns_of(asked)
    patterns.raise_at(np.zeros(2))
    average = patterns.bound
    found = plan(asked, split=False)
    assert found.seconds is not None
    patterns.prove(found.seconds, Watch())
    assert average < 0.9 * found.seconds
    assert patterns.bound == pytest.approx(found.seconds, rel=0.005)
    assert patterns.bound <= found.seconds


@pytest.mark.parametrize("wide", [False, True])
def test_shards_that_only_just_fit_are_placed(wide: bool) -> None:
    draw = np.random.default_rng(3)
    ranks, local = 8, 4
    per_rank = [
        np.append(cuts[0], np.diff(np.append(cuts, 100.0))) for cuts in np.sort(draw.uniform(0, 100, (ranks, 6)))
    ]
    hbm = np.concatenate(per_rank)
    order = draw.permutation(len(hbm))
    shards = Shards(
        np.arange(len(hbm)),
        draw.uniform(1, 2, len(hbm)),
        hbm[order],
        np.zeros(len(hbm)),
        np.arange(len(hbm)) < (2 if wide else 0),
    )
    spread = np.where(shards.wide, local, 1)
    machines = Machines(ranks, local, float((spread * shards.hbm).sum()) / ranks * 1.004, np.inf)
    found = place_shards(shards, machines)
    assert found is not None
    held = loads(shards, found[0], machines)
    assert held.hbm.max() <= machines.hbm_room + 1e-6
    assert found[1] == pytest.approx(held.seconds.max())


def test_shards_of_a_table_stay_apart() -> None:
    owner = np.repeat(np.arange(6), 4)
    seconds = np.repeat(np.array([5.0, 4.0, 3.0, 2.0, 1.5, 1.0]), 4)
    size = np.repeat(np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]), 4)
    shards = Shards(owner, seconds, size, np.zeros(24), np.zeros(24, dtype=bool))
    found = place_shards(shards, Machines(5, 5, 18.0, np.inf))
    assert found is not None
    for table in range(6):
        assert len(set(found[0][owner == table].tolist())) == 4


@pytest.mark.parametrize("host_gib", [None, 0.0])
@pytest.mark.parametrize(("ranks", "impossible"), [(4, True), (5, False)])
def test_tables_of_which_a_rank_holds_only_one_need_as_many_ranks(
    ranks: int, impossible: bool, host_gib: float | None
) -> None:
    modes = (Mode.HBM_ONLY,) if host_gib is None else ()
    one = Table(name="t", rows=5_000_000, dim=64, sharding=Sharding.TABLE_WISE, modes=modes)
    tables = tuple(replace(one, name=f"t{index}") for index in range(5))
    asked = request(tables, hbm_gib=8, host_gib=host_gib, runtime="torchrec", ranks=ranks)
    problem = build_problem(asked)
    assert 0.5 < problem.groups[0].hbm[0].max() * ranks / problem.budget[0] < 1
    assert patterns_of(asked).cannot_fit(Watch()) is impossible
    assert plan(asked, split=False).status is (Status.INFEASIBLE if impossible else Status.OPTIMAL)


def test_patterns_that_hold_all_tables_are_made_plans() -> None:
    tables = random_tables(19, 1, pooled=True, sharding=Sharding.COLUMN_WISE)
    size = sum(table.rows * table.dim * 8 for table in tables) / 2**30
    asked = request(
        tables, hbm_gib=2.05 + 0.1 * size, runtime="torchrec", ranks=4, solver=SolverOptions(time_limit_s=6)
    )
    found = plan(asked, split=False, clock=time.process_time)
    assert found.gap is not None
    assert found.gap < 0.2, "without patterns 0.36"


def test_least_memory_of_whole_tables_is_proved_by_what_ranks_can_hold() -> None:
    one = Table(name="t", rows=5_000_000, dim=64, sharding=Sharding.TABLE_WISE, modes=(Mode.HBM_ONLY,))
    asked = request(tuple(replace(one, name=f"t{i}") for i in range(9)), hbm_gib=5, runtime="torchrec", ranks=4)
    smaller = build_problem(asked).minimising(0)
    whole = Incumbent(asked, smaller, Watch())
    patterns = Patterns.of(smaller, whole.whole, whole.machines)
    assert patterns is not None
    three = 3 * float(whole.whole[0][0].min())
    patterns.raise_at(np.zeros(2))
    assert patterns.bound < 0.9 * three
    patterns.prove(three, Watch())
    assert 0.995 * three <= patterns.bound <= three
