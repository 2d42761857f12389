from __future__ import annotations

import pytest

from evenkeel.placement import Mode, OwnPlacement, Table, compare, plan
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


def test_an_own_plan_that_does_not_fit_says_by_how_much() -> None:
    tables = random_tables(8, 6)
    own = tuple(OwnPlacement(table=t.name, mode=Mode.HBM_ONLY) for t in tables)
    answer = compare(request(tables, hbm_gib=1), own)
    assert not answer.fits
    assert any("GiB more HBM" in problem for problem in answer.problems)
    assert answer.own is not None
    barely = request(tables, hbm_gib=(answer.own.hbm.used_bytes + answer.own.workspace_bytes - 8192) / 2**30)
    assert compare(barely, own).problems == ("takes 0.01 GiB more HBM on a rank than there is",)
