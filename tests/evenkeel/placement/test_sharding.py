"""How tables are spread over ranks: chosen exactly where that can be checked, and near a bound where it cannot."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenkeel.placement import (
    InvalidInputError,
    Mode,
    Optimizer,
    PlanRequest,
    Runtime,
    Sharding,
    SolverOptions,
    Status,
    Step,
    Table,
    Topology,
    Zipf,
    plan,
)
from evenkeel.placement.access import fullest_rank
from evenkeel.placement.fields import decode, encode
from evenkeel.placement.hardware import builtin_profile
from evenkeel.placement.layouts import Layout
from evenkeel.placement.options import RankLoad, exchange_seconds
from tests.evenkeel.placement.instances import brute_force, random_tables, request

ALL = tuple(Sharding)


def ask(
    tables: tuple[Table, ...],
    hbm_gib: float,
    ranks: int = 4,
    local: int = 2,
    host_gib: float | None = None,
    **solver: float,
) -> PlanRequest:
    options = SolverOptions(**{"ratio_steps": 2, "time_limit_s": 60, **solver})  # type: ignore[arg-type]
    return request(
        tables, hbm_gib=hbm_gib, host_gib=host_gib, ranks=ranks, ranks_per_host=local, runtime="torchrec",
        solver=options,
    )  # fmt: skip


@given(st.integers(0, 10_000), st.floats(0.2, 1.0), st.sampled_from([None, 1.0, 40.0]))
@settings(max_examples=5, deadline=None)
def test_small_models_get_the_best_of_all_plans(seed: int, part: float, host_gib: float | None) -> None:
    draw = np.random.default_rng(seed)
    drawn = random_tables(3, seed, pooled=True, modes=(Mode.HBM_ONLY, Mode.HOST_ONLY))
    tables = tuple(
        replace(
            table, sharding=tuple(Sharding(kind) for kind in draw.choice(ALL, size=draw.integers(1, 6), replace=False))
        )
        for table in drawn
    )
    size = sum(table.rows * table.dim * 12 for table in tables) / 2**30
    asked = ask(tables, 2.01 + part * size / 4, host_gib=host_gib)
    best = brute_force(asked)
    found = plan(asked, clock=time.process_time)
    if not np.isfinite(best):
        assert found.status in (Status.INFEASIBLE, Status.UNKNOWN)
        return
    assert found.status is not Status.INFEASIBLE
    assert found.bound_seconds <= best * (1 + 1e-9)
    assert best * (1 - 1e-9) <= found.seconds <= best * (1.0002 if found.status is Status.OPTIMAL else 1.15)
    pinned = tuple(replace(each, sharding=p.sharding) for each, p in zip(tables, found.placements, strict=True))
    alike = plan(replace(asked, tables=pinned), clock=time.process_time)
    assert found.seconds <= alike.seconds * (1 + 1e-9), "with its own layouts a plan is no faster"


@given(st.integers(0, 10_000), st.floats(0.0, 0.3), st.sampled_from([None, 1.0, 3.0]))
@settings(max_examples=20, deadline=None)
def test_nothing_fits_below_what_is_called_the_least(seed: int, part: float, host_gib: float | None) -> None:
    """Also where no shard of a table fits at first, so that nothing tells there of ranks to put shards on."""
    draw = np.random.default_rng(seed)
    drawn = random_tables(2, seed, pooled=True, modes=(Mode.HBM_ONLY, Mode.HOST_ONLY))
    kinds = [draw.choice(ALL, size=draw.integers(1, 4), replace=False) for _ in drawn]
    tables = tuple(
        replace(table, rows=8 * table.rows, sharding=tuple(map(Sharding, kind)))
        for table, kind in zip(drawn, kinds, strict=True)
    )
    asked = ask(tables, 2.0 + part, host_gib=host_gib, time_limit_s=4)
    found = plan(asked, clock=time.process_time)
    if found.status is not Status.INFEASIBLE:
        return
    short = found.shortage

    def given(**sizes: int) -> PlanRequest:
        return replace(asked, topology=replace(asked.topology, **sizes))

    if short.least_hbm_bytes:
        assert not np.isfinite(brute_force(given(hbm_bytes=short.least_hbm_bytes - 4096)))
    if host_gib is not None and short.least_host_bytes:
        assert not np.isfinite(brute_force(given(host_bytes=short.least_host_bytes - 4096)))
    if short.smallest_hbm_bytes is not None:
        assert np.isfinite(brute_force(given(hbm_bytes=short.smallest_hbm_bytes)))
    if host_gib is not None and short.smallest_host_bytes is not None:
        assert np.isfinite(brute_force(given(host_bytes=short.smallest_host_bytes)))
    if short.binding == "hbm":
        assert not np.isfinite(brute_force(given(host_bytes=2**50)))
    if short.binding == "host":
        assert not np.isfinite(brute_force(given(hbm_bytes=2**50)))


def test_tables_of_which_only_larger_shards_would_do_are_in_the_proof() -> None:
    table = Table(name="t", rows=40_000_000, dim=128, pooled=True, optimizer=Optimizer.ROWWISE_ADAGRAD)
    kinds = (Sharding.ROW_WISE, Sharding.TABLE_WISE)
    tables = tuple(replace(table, name=f"t{index}", sharding=kinds) for index in range(5))
    asked = ask(tables, 2.1, 16, 8, time_limit_s=6)
    short = plan(asked).shortage
    assert short.least_hbm_bytes <= 2.23 * 2**30, "at which all tables are on single ranks"
    for size in (2.23 * 2**30, short.smallest_hbm_bytes):
        enough = replace(asked, topology=replace(asked.topology, hbm_bytes=int(size)))
        assert plan(enough).seconds is not None
    advised = float(short.explanation.split("all else equal: ")[1].split(" GiB")[0])
    assert short.smallest_hbm_bytes <= advised * 2**30 < short.smallest_hbm_bytes + 2**30 / 100


def test_large_tables_with_more_modes_get_no_slower_a_plan() -> None:
    # What is best on the average rank without caches fits no ranks: of DLRMv4's tables a few fill a rank each.
    kinds = (Sharding.ROW_WISE, Sharding.TABLE_WISE, Sharding.COLUMN_WISE, Sharding.DATA_PARALLEL)
    millions = (1, 100, 40, 24, 40, 32, 2, 40, 9.4, 1.3, 3.4)
    tables = tuple(
        Table(
            name=f"t{n}", rows=int(rows * 1e6), dim=512, ids_per_sample=2660 if n > 7 else 1, pooled=False,
            optimizer=Optimizer.ROWWISE_ADAGRAD, sharding=kinds,
        )
        for n, rows in enumerate(millions)
    )  # fmt: skip
    asked = ask(tables, 67, ranks=8, local=8, host_gib=1024, gap=1e-4, time_limit_s=4)
    asked = replace(asked, step=replace(asked.step, samples_per_rank=1024))
    uncached = replace(asked, tables=tuple(replace(table, modes=(Mode.HBM_ONLY, Mode.HOST_ONLY)) for table in tables))
    seconds = [plan(one, clock=time.process_time).seconds for one in (asked, uncached)]
    assert None not in seconds
    assert seconds[0] <= 1.02 * seconds[1]


def test_widths_that_a_runtime_refuses_are_refused() -> None:
    table = Table(name="t", rows=10, dim=37, pooled=True, sharding=ALL)
    with pytest.raises(InvalidInputError, match="make it 40") as caught:
        ask((table,), 1)
    assert caught.value.field == "tables[0].dim"
    with pytest.raises(InvalidInputError, match=r"parts of 34 elements.*divisor of 34") as caught:
        ask((replace(table, dim=136, column_shards=4),), 1)
    assert caught.value.field == "tables[0].column_shards"
    assert plan(ask((replace(table, sharding=Sharding.DATA_PARALLEL),), 4)).status is Status.OPTIMAL
    assert plan(ask((replace(table, dim=136, column_shards=2),), 4)).status is Status.OPTIMAL
    wide = ask((replace(table, dim=1028),), 4)
    with pytest.raises(InvalidInputError, match="1024 at most") as caught:
        replace(wide, runtime=Runtime.DYNAMICEMB)
    assert caught.value.field == "tables[0].dim"


@pytest.mark.parametrize("sharding", [Sharding.GRID, ALL, (Sharding.TABLE_WISE,)])
def test_a_choice_is_read_as_it_was_written(sharding: Sharding | tuple[Sharding, ...]) -> None:
    table = Table(name="t", rows=10, dim=8, pooled=True, sharding=sharding)
    assert decode(Table, encode(table)) == table
    for wrong in ("nothing", ["nothing"], 5):
        with pytest.raises(InvalidInputError, match="sharding"):
            decode(Table, {**encode(table), "sharding": wrong})


def test_collectives_cost_what_their_bytes_take() -> None:
    profile = replace(builtin_profile("h200"), intra_host_bytes_per_s=1e9, inter_host_bytes_per_s=1e8)
    topology = Topology(ranks=8, ranks_per_host=4, hbm_bytes=0)
    table = Table(name="t", rows=125, dim=16, ids_per_sample=10.0, access=Zipf(exponent=0.0), pooled=True)
    keys, sums = 10 * 100 * 8.0, 100 * 64.0  # of 100 samples on a rank

    def seconds(sharding: Sharding, *, training: bool = False, ranks: int = 8, **changes: object) -> float:
        layout, own = Layout(sharding), replace(table, sharding=sharding, **changes)  # type: ignore[arg-type]
        machines = replace(topology, ranks=ranks, ranks_per_host=min(ranks, 4))
        step = Step(samples_per_rank=100, training=training)
        request = PlanRequest(tables=(own,), topology=machines, hardware=profile, runtime=Runtime.TORCHREC, step=step)
        return exchange_seconds(RankLoad(request, own, layout))

    def skew(parts: int) -> float:
        return fullest_rank(table.access, table.rows, 8000.0, parts)

    assert seconds(Sharding.TABLE_WISE) == pytest.approx((keys + sums) * 4 / 1e8)
    ring = max(sums * 8 * 7 / 8 * 3 / 4 / 1e9, sums * 8 * 7 / 8 / 4 / 1e8)
    assert seconds(Sharding.ROW_WISE) == pytest.approx(skew(8) * keys / 8 * 4 / 1e8 + ring)
    inside = sums * 8 * 3 / 4 / 1e9 + sums / 1e8
    assert seconds(Sharding.TABLE_ROW_WISE) == pytest.approx(skew(4) * keys / 4 * 4 / 1e8 + inside)
    assert seconds(Sharding.DATA_PARALLEL) == 0.0
    assert seconds(Sharding.DATA_PARALLEL, training=True) == pytest.approx(2 * 8000 * 7 / 8 / 4 / 1e8)
    sequence = skew(8) * (keys + 1000 * 64.0) / 8 * 4 / 1e8
    assert seconds(Sharding.ROW_WISE, pooled=False) == pytest.approx(sequence)
    assert seconds(Sharding.TABLE_WISE, training=True) == pytest.approx((keys + 2 * sums) * 4 / 1e8)
    assert seconds(Sharding.TABLE_WISE, ranks=1) == 0.0
    assert 1.0 < skew(4) < skew(8), "the fullest rank gets more than the mean"
