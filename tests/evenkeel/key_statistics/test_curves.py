from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks.key_traces import LATER, TRACES, simulated
from benchmarks.key_traces_unseen import UNSEEN
from evenkeel.key_statistics import KeySampler, KeyTrace, dumps, loads, merge, miss_curve
from evenkeel.key_statistics.curves import _TESTED, checked
from evenkeel.key_statistics.exchangeable import Exchangeable
from evenkeel.key_statistics.ranks import observed
from evenkeel.key_statistics.sets import in_sets
from evenkeel.placement import Eviction, InvalidInputError

STEPS, LOOKUPS = 80, 2_000


def _trace(steps: list[np.ndarray], most: int = 2_000_000, rank: int = 0, ranks: int = 1) -> KeyTrace:
    sampler = KeySampler(["other", "table"], max_references=most)
    for step in steps:
        own = step[rank::ranks]
        sampler.observe([(own, np.array([[1, 0, len(own)]]))], len(own))
    return sampler.traces()["table"]


def _lru(steps: list[np.ndarray], size: int, begin: int) -> float:
    """A real LRU cache that looks up a step's unique keys at once."""
    held: OrderedDict[int, None] = OrderedDict()
    draw = np.random.default_rng(0)
    missed = total = 0
    for step, keys in enumerate(steps):
        for key in np.unique(keys).tolist():
            if step >= begin:
                total, missed = total + 1, missed + (key not in held)
        for key in draw.permutation(np.unique(keys)).tolist():
            held[key] = None
            held.move_to_end(key)
        while len(held) > size:
            held.popitem(last=False)
    return missed / total


@pytest.mark.parametrize("name", ["sessions", "scan"])
def test_a_trace_says_what_a_real_cache_missed(name: str) -> None:
    steps = list(TRACES[name](np.random.default_rng(3), STEPS, LOOKUPS))
    sizes = np.array([3_000.0, 10_000.0, 25_000.0])
    found = observed(_trace(steps), Eviction.LRU, sizes, STEPS // 2, STEPS)
    for size, rate in zip(sizes, found.rates, strict=True):
        assert rate == pytest.approx(_lru(steps, int(size), STEPS // 2), abs=0.01)


@pytest.mark.parametrize("name", ["zipf", "sessions", "scan"])
def test_the_second_half_is_predicted_from_the_first(name: str) -> None:
    steps = list(TRACES[name](np.random.default_rng(5), 2 * STEPS, LOOKUPS))
    keys = len(np.unique(np.concatenate(steps)))
    sizes = np.array([0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0]) * keys
    for most in (2_000_000, 60_000):
        found = checked(_trace(steps[:STEPS], most), Eviction.LRU, sizes, ahead=1.0, rows=1e12)[0].rates
        actual = simulated(steps, sizes, STEPS, Eviction.LRU)
        assert found.tolist() == pytest.approx(actual.tolist(), abs=0.02 if most > 60_000 else 0.04)


@pytest.mark.parametrize("name", ["zipf", "sessions"])
def test_lfu_counts_what_it_gave_up(name: str) -> None:
    steps = list(TRACES[name](np.random.default_rng(5), 2 * STEPS, LOOKUPS))
    keys = len(np.unique(np.concatenate(steps)))
    sizes = np.array([0.02, 0.1, 0.25, 0.5, 1.0]) * keys
    found, error = checked(_trace(steps[:STEPS]), Eviction.LFU, sizes, ahead=1.0, rows=1e12)
    actual = simulated(steps, sizes, STEPS, Eviction.LFU)
    assert found.rates.tolist() == pytest.approx(actual.tolist(), abs=min(0.025, error))
    exact = observed(_trace(steps), Eviction.LFU, sizes, STEPS, 2 * STEPS).rates
    assert exact.tolist() == pytest.approx(actual.tolist(), abs=0.003)


@pytest.mark.parametrize(("name", "within"), [("scan", 0.08), ("richer", 0.02)])
def test_lfu_is_predicted_where_counts_are_alike_for_long(name: str, within: float) -> None:
    steps = list((TRACES | LATER)[name](np.random.default_rng(7), 150, 1_024))
    keys = len(np.unique(np.concatenate(steps)))
    sizes = np.array([0.02, 0.1, 0.25, 0.5, 0.75, 1.0]) * keys
    found = checked(_trace(steps[:75]), Eviction.LFU, sizes, ahead=1.0, rows=keys)[0].rates
    assert found.tolist() == pytest.approx(simulated(steps, sizes, 75, Eviction.LFU).tolist(), abs=within)


@pytest.mark.parametrize("eviction", Eviction)
@pytest.mark.parametrize("name", ["zipf", "launch", "fading", "news", "members", "reshuffled"])
def test_predictions_are_off_by_no_more_than_is_told(name: str, eviction: Eviction) -> None:
    steps = list((TRACES | LATER | UNSEEN)[name](np.random.default_rng(9), 120, 1_024))
    keys = len(np.unique(np.concatenate(steps)))
    sizes = np.array([0.02, 0.1, 0.25, 0.5, 0.75, 0.9]) * keys
    found, error = checked(_trace(steps[:60]), eviction, sizes, ahead=1.0, rows=keys)
    assert np.abs(found.rates - simulated(steps, sizes, 60, eviction)).max() <= error
    if name == "zipf":
        assert error <= 0.1


@pytest.mark.parametrize("eviction", Eviction)
@pytest.mark.parametrize("part", [0.25, 0.5, 0.75])
def test_keys_that_changed_while_they_were_watched_make_the_error_large(part: float, eviction: Eviction) -> None:
    steps = list(TRACES["zipf"](np.random.default_rng(9), 120, 1_024))
    sizes = np.array([0.02, 0.1, 0.25, 0.5, 0.75]) * len(np.unique(np.concatenate(steps)))
    steady = checked(_trace(steps), eviction, sizes, ahead=1.0, rows=1e9)[1]
    # From then on all keys are other ones.
    changed = [keys + (at >= 120 * part) * 10_000_000 for at, keys in enumerate(steps)]
    assert checked(_trace(changed), eviction, sizes, ahead=1.0, rows=1e9)[1] >= steady + 0.1


@pytest.mark.parametrize("eviction", Eviction)
def test_long_traces_are_tested_on_a_part_of_their_keys(eviction: Eviction) -> None:
    steps = list(TRACES["zipf"](np.random.default_rng(9), 140, 8_192))
    trace = _trace(steps)
    assert len(trace.step) > 2 * _TESTED
    sizes = np.array([0.02, 0.1, 0.25, 0.5, 0.75]) * len(np.unique(trace.key))
    assert checked(trace, eviction, sizes, ahead=1.0, rows=1e9)[1] <= 0.07


def test_keys_of_constant_rates_are_told_from_their_counts() -> None:
    steps = list(TRACES["zipf"](np.random.default_rng(4), 2 * STEPS, LOOKUPS))
    keys = len(np.unique(np.concatenate(steps)))
    found = Exchangeable(_trace(steps[:STEPS]))
    assert found.keys(0.0) == pytest.approx(len(np.unique(np.concatenate(steps[:STEPS]))), rel=0.01)
    assert found.keys(1.0) == pytest.approx(keys, rel=0.02)
    sizes = np.array([0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0]) * keys
    assert found.lfu(sizes, 1.0).tolist() == pytest.approx(
        simulated(steps, sizes, STEPS, Eviction.LFU).tolist(), abs=0.015
    )
    nothing = Exchangeable(_trace([np.zeros(0, dtype=np.int64)] * 10))
    assert nothing.lfu(sizes, 1.0).tolist() == [1.0] * len(sizes)


def test_caches_in_sets_miss_more() -> None:
    steps = list(TRACES["zipf"](np.random.default_rng(4), STEPS, LOOKUPS))
    sizes = np.geomspace(32, 40_000, 160)
    anywhere = observed(_trace(steps), Eviction.LRU, sizes, STEPS // 2, STEPS).rates
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
            for each in sets:
                while len(each) > 32:
                    each.popitem(last=False)
        assert float(np.interp(size, sizes, found)) == pytest.approx(missed / total, abs=0.004)
    assert float(np.max(found - anywhere)) > 0.005
    one = in_sets(sizes, anywhere, 1 << 20)
    assert one[1:].tolist() == pytest.approx(anywhere[1:].tolist(), abs=0.003)


def test_ranks_make_one_trace_of_what_each_of_them_saw() -> None:
    steps = list(TRACES["drift"](np.random.default_rng(2), 40, 4_000))
    whole = _trace(steps)
    parts = [_trace(steps, rank=rank, ranks=4) for rank in range(4)]
    one = merge({"table": part} for part in parts)["table"]
    assert (one.step.tolist(), one.key.tolist(), one.times.tolist()) == (
        whole.step.tolist(),
        whole.key.tolist(),
        whole.times.tolist(),
    )
    assert (one.samples, one.lookups, one.steps) == (whole.samples, whole.lookups, whole.steps)
    uneven = [_trace(steps, most=9_000 * (rank + 1), rank=rank, ranks=4) for rank in range(4)]
    few = merge({"table": part} for part in uneven)["table"]
    assert few.limit == min(part.limit for part in uneven) < whole.limit
    for field in ("step", "key", "times"):
        assert getattr(few, field).tolist() == getattr(whole.thinned(few.limit), field).tolist()


def test_a_small_sample_knows_how_many_keys_a_step_has() -> None:
    steps = list(TRACES["zipf"](np.random.default_rng(2), 120, LOOKUPS))
    small = _trace(steps, most=10_000)
    assert small.share < 0.2
    assert len(small.step) <= 10_000
    unique = np.mean([len(np.unique(step)) for step in steps])
    found = observed(small, Eviction.LRU, np.array([1.0]), 0, 120).unique
    assert found == pytest.approx(unique, rel=0.03)


def test_steps_are_joined_as_if_they_had_been_larger() -> None:
    steps = list(TRACES["sessions"](np.random.default_rng(2), 81, 1_000))
    larger = [np.concatenate(steps[at : at + 4]) for at in range(0, 80, 4)]
    joined, direct = _trace(steps).joined(4), _trace(larger)
    assert (joined.steps, joined.samples, joined.lookups) == (20, 80_000, 80_000)
    assert joined.key.tolist() == direct.key.tolist()
    assert joined.times.tolist() == direct.times.tolist()


@pytest.mark.parametrize("count", [4, 30])
def test_small_samples_are_joined_too(count: int) -> None:
    steps = list(TRACES["zipf"](np.random.default_rng(2), 240, LOOKUPS))
    small = _trace(steps, most=10_000)
    joined = loads(dumps({"a": small.joined(count)}))["a"]
    assert joined.share < 0.2
    unique = np.mean([len(np.unique(np.concatenate(steps[at : at + count]))) for at in range(0, 240, count)])
    assert observed(joined, Eviction.LRU, np.array([1.0]), 0, joined.steps).unique == pytest.approx(unique, rel=0.04)
    assert miss_curve(joined, 200_000).access.unique_fraction == pytest.approx(unique / LOOKUPS / count, rel=0.1)


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 6, 7, 10, 80, 1_000_000])
def test_tables_of_few_keys_have_curves(rows: int) -> None:
    """Also where the least and the largest cache of interest are the same."""
    keys = min(rows, 2)
    found = miss_curve(_trace([np.arange(keys)] * 20), rows)
    assert found.access.cache_fractions[-1] == 1
    assert found.access.unique_fraction == 1


def test_the_error_told_is_that_of_the_halves() -> None:
    steady = list(TRACES["zipf"](np.random.default_rng(1), STEPS, LOOKUPS))
    jump = steady[: STEPS // 2] + [step + 10_000_000 for step in steady[STEPS // 2 :]]
    assert miss_curve(_trace(steady), 200_000).error < 0.04
    assert miss_curve(_trace(jump), 20_000_000).error > 0.15


def test_a_curve_is_one_for_the_planner() -> None:
    trace = _trace(list(TRACES["zipf"](np.random.default_rng(1), STEPS, LOOKUPS)))
    found = miss_curve(trace, 200_000)
    assert found.access.cache_fractions[-1] == 1
    assert list(found.access.miss_rates) == sorted(found.access.miss_rates, reverse=True)
    assert found.access.miss_rates[0] > 0.95
    assert 0.4 < found.access.unique_fraction < 0.8


def test_a_file_holds_all_of_it_in_few_bytes() -> None:
    steps = list(TRACES["drift"](np.random.default_rng(2), 200, LOOKUPS))
    trace = _trace(steps, most=100_000)
    content = dumps({"a": trace, "nothing": _trace([np.zeros(0, dtype=np.int64)] * 3)})
    assert len(content) < 8 * len(trace.step) + 24 * 4096
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
    content = bytearray(dumps({"a": _trace([np.arange(10)] * 3)}))
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
     {"limit": -1}, {"limit": 2**64}, {"known_excess": float("inf")}, {"sketches": {9: np.zeros(8, dtype=np.uint8)}}],
)  # fmt: skip
def test_numbers_that_nothing_observed_has_are_refused(wrong: dict[str, Any]) -> None:
    trace = replace(_trace([np.arange(10)] * 9), **wrong)
    with pytest.raises(InvalidInputError, match="KeyStatistics"):
        loads(dumps({"a": trace}))


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="at least 8"):
        miss_curve(_trace([np.arange(10)] * 3), 100)
    with pytest.raises(InvalidInputError, match="max_references"):
        KeySampler(["a", "b"], max_references=10)
