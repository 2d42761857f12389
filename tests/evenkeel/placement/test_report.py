from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from evenkeel.placement import Mode, Plan, PlanRequest, Sharding, SolverOptions, plan
from evenkeel.placement.plan_text import PlanText
from evenkeel.placement.report import Report, make_report
from tests.evenkeel.placement.instances import random_tables, request

_KINDS = list(Sharding)


@cache
def _mixed(seed: int, training: bool) -> tuple[PlanRequest, Plan]:
    """Tables of every sharding, some of them with a cache or in host memory."""
    draw = np.random.default_rng(seed)
    tables = tuple(
        replace(
            table,
            rows=int(draw.integers(1_000_000, 3_000_000)),
            sharding=kind,
            column_shards=2 if kind is Sharding.COLUMN_WISE else 1,
            pooled=True,
            ratio={0: 0.6, 4: 0.6, 8: 0.6, 1: 0.0, 2: 0.6, 6: 0.0}.get(index),
        )
        for index, table in enumerate(random_tables(10, seed))
        for kind in [_KINDS[index % len(_KINDS)]]
    )
    solver = SolverOptions(ratio_steps=4, gap=0.02)
    asked = request(tables, hbm_gib=16, host_gib=800, ranks=4, ranks_per_host=2, runtime="torchrec", solver=solver)
    asked = replace(asked, step=replace(asked.step, training=training))
    return asked, plan(asked)


def _report(asked: PlanRequest, found: Plan) -> Report:
    report = make_report(asked, found)
    assert report is not None
    return report


@pytest.mark.parametrize("seed", range(2))
def test_ranks_and_hosts_add_up_to_the_plan(seed: int) -> None:
    asked, found = _mixed(seed, True)
    assert found.seconds is not None
    report = _report(asked, found)
    assert sorted(rank for entry in report.ranks for rank in entry.ranks) == list(range(4))
    assert max(entry.seconds for entry in report.ranks) == pytest.approx(found.seconds)
    assert max(entry.hbm_bytes for entry in report.ranks) == pytest.approx(found.hbm.used_bytes, abs=4096 * 10)
    assert max(entry.host_bytes for entry in report.hosts) == pytest.approx(found.host.used_bytes, abs=4096 * 10)
    for entry in report.ranks:
        placed = [p for p in found.placements if not p.ranks or set(p.ranks) & set(entry.ranks)]
        assert entry.tables == len(placed)
        assert sum(entry.shards.values()) >= len(placed)
    mean = sum(entry.seconds * len(entry.ranks) for entry in report.ranks) / 4
    (spread,) = (entry for entry in report.imbalance if entry.of == "seconds")
    assert spread.max_over_mean == pytest.approx(found.seconds / mean)


@pytest.mark.parametrize("training", [True, False])
def test_parts_of_a_table_add_up_to_its_time(training: bool) -> None:
    asked, found = _mixed(0, training)
    report = _report(asked, found)
    assert {placed.mode for placed in found.placements} == {Mode.HBM_ONLY, Mode.CACHING, Mode.HOST_ONLY}
    for placed, parts in zip(found.placements, report.tables, strict=True):
        split = (
            parts.forward_seconds,
            parts.backward_seconds,
            parts.communication_seconds,
            parts.prefetch_seconds,
        )
        assert min(split) >= 0
        assert sum(split) == pytest.approx(placed.seconds)
        assert parts.forward_seconds > 0
        assert (parts.backward_seconds > 0) is training
        assert (parts.prefetch_seconds > 0) is (placed.mode is Mode.CACHING and placed.miss_rate > 0)


def test_ranks_that_are_alike_are_one_entry() -> None:
    asked = request(random_tables(5, 0), hbm_gib=20, ranks=64)
    report = _report(asked, plan(asked))
    (entry,) = report.ranks
    assert entry.ranks == tuple(range(64))
    assert entry.shards == {"row_wise": 5}
    assert [row.max_over_mean for row in report.imbalance] == pytest.approx([1.0] * len(report.imbalance))


def test_nothing_that_fits_has_no_report() -> None:
    asked = request(random_tables(5, 0), hbm_gib=0.6, host_gib=0.1)
    assert make_report(asked, plan(asked)) is None


def test_the_text_tells_the_ranks_of_tables_that_are_not_on_all() -> None:
    first, second, third = random_tables(3, 0, pooled=True)
    tables = (
        replace(first, sharding=Sharding.TABLE_WISE, ratio=0.5),
        replace(second, sharding=Sharding.COLUMN_WISE, column_shards=2, ratio=1.0),
        replace(third, sharding=Sharding.DATA_PARALLEL),
    )
    found = plan(request(tables, hbm_gib=40, ranks=2, runtime="torchrec"))
    lines = str(PlanText(found, None)).splitlines()
    assert max(map(len, lines)) <= 80
    rows = [next(line for line in lines if table.name in line) for table in tables]
    assert f"CACHING 0.500   TW {found.placements[0].ranks[0]}  " in rows[0]
    assert "HBM_ONLY        CW 0-1" in rows[1]
    assert "HBM_ONLY        DP" in rows[2]
    assert "mode, ratio" not in str(PlanText(plan(request((replace(first, name="plain"),), hbm_gib=40)), None))


def test_a_plan_that_the_clock_has_chosen_is_shown_without_a_proof() -> None:
    found = replace(plan(request(random_tables(2, 0), hbm_gib=40)), gap=None)
    assert "not proved" in str(PlanText(found, None))
    assert found.placements[0].table in str(PlanText(found, None))
