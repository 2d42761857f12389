from __future__ import annotations

import pytest

from evenkeel.placement import Mode, Optimizer, OwnPlacement, Sharding, Table, compare, plan
from tests.evenkeel.placement.instances import random_tables, request


def test_pooled_ratios_are_what_the_runtime_makes_of_them() -> None:
    small = Table(name="a", rows=1_000_000, dim=128)
    large = Table(name="b", rows=10_000_000, dim=128)
    asked = request((small, large), hbm_gib=40)
    own = (OwnPlacement(table="a", mode=Mode.HBM_ONLY), OwnPlacement(table="b", mode=Mode.HYBRID, ratio=0.1))
    answer = compare(asked, own)
    assert answer.own is not None
    assert {(p.mode, round(p.ratio, 4)) for p in answer.own.placements} == {(Mode.HYBRID, round(2 / 11, 4))}
    assert any("pooled" in problem for problem in answer.problems)
    assert answer.best.seconds is not None
    assert answer.own.seconds is not None
    assert answer.best.seconds < answer.own.seconds
    assert answer.differences[0].saves_seconds > 0


def test_an_own_plan_that_is_the_best_has_no_differences() -> None:
    asked = request(random_tables(8, 6), hbm_gib=2)
    best = plan(asked)
    own = tuple(OwnPlacement(table=p.table, mode=p.mode, ratio=p.ratio) for p in best.placements)
    answer = compare(asked, own)
    assert answer.fits
    assert not answer.differences
    assert answer.own is not None
    assert answer.own.seconds == pytest.approx(best.seconds)


def test_whole_tables_go_where_they_fit_although_others_are_faster_there() -> None:
    """The large tables are quick, and on one rank they leave the other one to the slow table."""
    way = {"dim": 64, "sharding": Sharding.TABLE_WISE, "optimizer": Optimizer.SGD}
    large = [Table(name=name, rows=10_000_000, ids_per_sample=0.1, **way) for name in "ab"]  # type: ignore[arg-type]
    slow = Table(name="c", rows=1000, ids_per_sample=20, **way)  # type: ignore[arg-type]
    asked = request((*large, slow), hbm_gib=6, runtime="torchrec", ranks=2)
    answer = compare(asked, tuple(OwnPlacement(table=name, mode=Mode.HBM_ONLY) for name in "abc"))
    assert (answer.fits, answer.problems) == (True, ())
    assert answer.own is not None
    assert {placement.ranks for placement in answer.own.placements[:2]} == {(0,), (1,)}


def test_without_gpus_no_hbm_is_taken() -> None:
    asked = request(random_tables(4, 6), hbm_gib=0, runtime="torchrec")
    answer = compare(asked, tuple(OwnPlacement(table=t.name, mode=Mode.HOST_ONLY, ratio=0) for t in asked.tables))
    assert (answer.fits, answer.problems, answer.differences) == (True, (), ())


def test_an_own_plan_that_does_not_fit_says_by_how_much() -> None:
    tables = random_tables(8, 6)
    own = tuple(OwnPlacement(table=t.name, mode=Mode.HBM_ONLY) for t in tables)
    answer = compare(request(tables, hbm_gib=1), own)
    assert not answer.fits
    assert any("GiB more HBM" in problem for problem in answer.problems)
    assert answer.own is not None
    barely = request(tables, hbm_gib=(answer.own.hbm.used_bytes + answer.own.workspace_bytes - 8192) / 2**30)
    assert compare(barely, own).problems == ("takes 0.01 GiB more HBM on a rank than there is",)
