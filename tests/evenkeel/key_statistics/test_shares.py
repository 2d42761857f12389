from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenkeel.key_statistics import dumps, loads, merge, miss_curve
from evenkeel.key_statistics.trace import HeavyKeys
from evenkeel.placement import InvalidInputError, MissCurve
from evenkeel.placement.access import fullest_rank, owners_of
from tests.evenkeel.key_statistics.traces import KEYS, trace_of
from trainer_client.embedding.routing.ownership import DIST_TYPES, DistType, Routing, block_size


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(DIST_TYPES), st.lists(KEYS, min_size=1), st.integers(1, 10**9), st.integers(1, 100))
def test_the_planner_knows_the_owner_of_a_key(routing: DistType, keys: list[int], rows: int, ranks: int) -> None:
    rule, block = Routing(dist_type=routing), block_size(rows, ranks)
    owners = owners_of(np.array(keys, dtype=np.int64), rows, ranks, routing)
    assert owners.tolist() == [rule.owner(key, world_size=ranks, block_size=block) for key in keys]


ROWS, LOOKUPS = 100_000, 4_000


@cache
def _seen(kind: str) -> tuple[np.ndarray, tuple[MissCurve, ...]]:
    """Keys of steps, and what is known of them by all, by a sample, and by two ranks together."""
    draw = np.random.default_rng(7)
    keys = (ROWS ** draw.random((40, LOOKUPS))).astype(np.int64) - 1
    if kind == "anywhere":
        keys = keys * 7_919 % ROWS
    elif kind != "by popularity":
        keys = draw.integers(0, ROWS, keys.shape)
    if kind == "in one owner":
        hot = draw.integers(0, 64, keys.shape) * (ROWS // 512)  # in the first eighth of the table
        keys = np.where(draw.random(keys.shape) < 0.26, hot, keys)
    halves = merge({"t": trace_of(part)} for part in np.split(keys, 2, axis=1))
    traces = trace_of(keys), trace_of(keys, most=20_000), loads(dumps(halves))["t"]
    assert [trace.share == 1 for trace in traces] == [True, False, True]
    return keys.ravel(), tuple(miss_curve(trace, ROWS).access for trace in traces)


@pytest.mark.parametrize("routing", DIST_TYPES)
@pytest.mark.parametrize("ranks", [2, 8, 32])
@pytest.mark.parametrize("kind", ["by popularity", "anywhere", "alike", "in one owner"])
def test_the_fullest_rank_of_observed_keys_is_the_one_that_is_counted(kind: str, ranks: int, routing: DistType) -> None:
    keys, curves = _seen(kind)
    asked = np.bincount(owners_of(keys, ROWS, ranks, routing), minlength=ranks)
    found = [fullest_rank(curve, ROWS, float(LOOKUPS), ranks, routing) for curve in curves]
    assert found == pytest.approx([asked.max() / asked.mean()] * 3, rel=0.1)


def test_statistics_without_counted_keys_are_read_and_planned_as_before() -> None:
    trace = replace(trace_of(np.arange(4_000).reshape(10, -1)), heavy=HeavyKeys())
    curve = miss_curve(loads(dumps({"t": trace}))["t"], ROWS).access
    assert (curve.hot_keys, curve.hot_shares, curve.row_quantiles) == ((), (), ())
    broken = replace(trace, heavy=HeavyKeys(keys=np.arange(2), times=np.array([3, 4]), lookups=6))
    with pytest.raises(InvalidInputError, match="do not fit together"):
        loads(dumps({"t": broken}))
