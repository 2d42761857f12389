from __future__ import annotations

from dataclasses import replace

import pytest

from evenkeel.placement import InvalidInputError, Mode, Status, Table, plan
from tests.evenkeel.placement.instances import random_tables, request


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
