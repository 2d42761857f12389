from collections import OrderedDict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.references.key_traces import TRACES, simulated
from evenkeel.key_statistics import KeySampler, dumps, heavy_hitters, loads, merge, miss_curve
from evenkeel.key_statistics.curves import in_sets, miss_rates
from evenkeel.placement import Eviction, InvalidInputError
from tests.evenkeel.key_statistics.traces import KEYS, trace_of

STEPS, LOOKUPS = 80, 2_000


@pytest.mark.parametrize("eviction", Eviction)
@pytest.mark.parametrize("name", ["zipf", "sessions", "scan", "drift"])
def test_the_second_half_is_seen_as_caches_saw_it_also_by_a_sample(name: str, eviction: Eviction) -> None:
    steps = list(TRACES[name](np.random.default_rng(5), STEPS, LOOKUPS))
    keys = len(np.unique(np.concatenate(steps)))
    sizes = np.array([0.02, 0.1, 0.25, 0.5, 1.0]) * keys
    actual = simulated(steps, sizes, STEPS // 2, eviction)
    for most, within in ((2_000_000, 0.003), (40_000, 0.06)):
        found = miss_rates(trace_of(steps, most), eviction, sizes, STEPS // 2, STEPS)
        assert found.tolist() == pytest.approx(actual.tolist(), abs=within)


def test_error_and_drift_tell_keys_that_stay_from_keys_that_change() -> None:
    steady = list(TRACES["zipf"](np.random.default_rng(1), STEPS, LOOKUPS))
    others = steady[: STEPS // 2] + [step + 10_000_000 for step in steady[STEPS // 2 :]]
    stays, changes = (miss_curve(trace_of(steps), 20_000_000) for steps in (steady, others))
    assert stays.drift < 0.05
    assert stays.error < 0.1
    assert changes.drift > 0.5
    drifting = miss_curve(trace_of(list(TRACES["shifting"](np.random.default_rng(1), STEPS, LOOKUPS))), 20_000_000)
    assert stays.drift < drifting.drift
    assert list(stays.access.miss_rates) == sorted(stays.access.miss_rates, reverse=True)
    assert stays.access.miss_rates[0] > 0.95
    assert 0.4 < stays.access.unique_fraction < 0.8


def test_caches_in_sets_miss_more() -> None:
    steps = list(TRACES["zipf"](np.random.default_rng(4), STEPS, LOOKUPS))
    sizes = np.geomspace(32, 40_000, 160)
    anywhere = miss_rates(trace_of(steps), Eviction.LRU, sizes, STEPS // 2, STEPS)
    found = in_sets(sizes, anywhere, 32)
    draw = np.random.default_rng(0)
    for size in (3_200, 12_800, 32_000):
        own = draw.permutation(200_000) % (size // 32)
        sets = [OrderedDict[int, None]() for _ in range(size // 32)]
        missed = total = 0
        for step, keys in enumerate(steps):
            unique = draw.permutation(np.unique(keys)).tolist()
            if step >= STEPS // 2:
                total, missed = total + len(unique), missed + sum(key not in sets[own[key]] for key in unique)
            for key in unique:
                sets[own[key]][key] = None
                sets[own[key]].move_to_end(key)
            for each in (sets[one] for one in {own[key] for key in unique}):
                while len(each) > 32:
                    each.popitem(last=False)
        assert float(np.interp(size, sizes, found)) == pytest.approx(missed / total, abs=0.004)
    assert float(np.max(found - anywhere)) > 0.005
    one = in_sets(sizes, anywhere, 1 << 20)
    assert one[1:].tolist() == pytest.approx(anywhere[1:].tolist(), abs=0.003)


def test_ranks_make_one_trace_of_what_each_of_them_saw() -> None:
    steps = list(TRACES["drift"](np.random.default_rng(2), 40, 4_000))
    whole = trace_of(steps)
    parts = [trace_of(steps, rank=rank, ranks=4) for rank in range(4)]
    one = merge({"table": part} for part in parts)["table"]
    assert (one.step.tolist(), one.key.tolist(), one.times.tolist()) == (
        whole.step.tolist(),
        whole.key.tolist(),
        whole.times.tolist(),
    )
    assert (one.samples, one.lookups, one.steps) == (whole.samples, whole.lookups, whole.steps)
    uneven = [trace_of(steps, most=9_000 * (rank + 1), rank=rank, ranks=4) for rank in range(4)]
    few = merge({"table": part} for part in uneven)["table"]
    assert few.limit == min(part.limit for part in uneven) < whole.limit
    for field in ("step", "key", "times"):
        assert getattr(few, field).tolist() == getattr(whole.thinned(few.limit), field).tolist()


def test_steps_are_joined_as_if_they_had_been_larger() -> None:
    steps = list(TRACES["sessions"](np.random.default_rng(2), 81, 1_000))
    larger = [np.concatenate(steps[at : at + 4]) for at in range(0, 80, 4)]
    joined, direct = trace_of(steps).joined(4), trace_of(larger)
    assert (joined.steps, joined.samples, joined.lookups) == (20, 80_000, 80_000)
    assert joined.key.tolist() == direct.key.tolist()
    assert joined.times.tolist() == direct.times.tolist()


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 6, 7, 10, 80, 1_000_000])
def test_tables_of_few_keys_have_curves(rows: int) -> None:
    """Also where the least and the largest cache of interest are the same."""
    keys = min(rows, 2)
    found = miss_curve(trace_of([np.arange(keys)] * 20), rows)
    assert found.access.cache_fractions[-1] == 1
    assert found.access.unique_fraction == 1


def test_a_file_holds_all_of_it_in_few_bytes() -> None:
    steps = list(TRACES["drift"](np.random.default_rng(2), 200, LOOKUPS))
    trace = trace_of(steps, most=100_000)
    content = dumps({"a": trace, "nothing": trace_of([np.zeros(0, dtype=np.int64)] * 3)})
    assert len(content) < 8 * len(trace.step)
    back = loads(content)
    assert list(back) == ["a", "nothing"]
    for field in ("step", "key", "times"):
        assert getattr(back["a"], field).tolist() == getattr(trace, field).tolist()
    assert (back["a"].limit, back["a"].excess) == (trace.limit, trace.excess)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 nothing", b'{"tables": []}'])
def test_other_files_are_refused(content: bytes) -> None:
    with pytest.raises(InvalidInputError, match="KeyStatistics"):
        loads(content)


def test_a_damaged_file_is_refused() -> None:
    content = bytearray(dumps({"a": trace_of([np.arange(10)] * 3)}))
    for at in range(0, len(content), 40):
        broken = content.copy()
        broken[at] ^= 0x55
        try:
            loads(bytes(broken))
        except InvalidInputError:
            continue


@pytest.mark.parametrize(
    "wrong",
    [{"samples": 0.0}, {"samples": -1.0}, {"samples": float("nan")}, {"lookups": float("inf")}, {"lookups": -1.0},
     {"limit": -1}, {"limit": 2**64}, {"excess": float("inf")}, {"times": np.zeros(3, dtype=np.uint32)}],
)  # fmt: skip
def test_numbers_that_nothing_observed_has_are_refused(wrong: dict[str, Any]) -> None:
    trace = replace(trace_of([np.arange(10)] * 9), **wrong)
    with pytest.raises(InvalidInputError, match="KeyStatistics"):
        loads(dumps({"a": trace}))


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="at least 8"):
        miss_curve(trace_of([np.arange(10)] * 3), 100)
    with pytest.raises(InvalidInputError, match="max_references"):
        KeySampler(["a", "b"], max_references=10)


@settings(max_examples=50)
@given(st.lists(st.lists(KEYS, max_size=20), max_size=4))
def test_keys_come_back_with_the_share_of_steps_that_looked_them_up(steps: list[list[int]]) -> None:
    keys, wanted = heavy_hitters(trace_of([np.array(step, dtype=np.int64) for step in steps]))
    every = {key for step in steps for key in step}
    expected = {key: sum(key in step for step in steps) / len(steps) for key in every}
    assert dict(zip(keys.tolist(), wanted.tolist(), strict=True)) == pytest.approx(expected)
    assert (np.diff(wanted) <= 0).all()


def test_a_sample_of_the_keys_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"share: of the keys .* observe fewer steps"):
        heavy_hitters(trace_of([np.arange(10_000)], most=1 << 13))
