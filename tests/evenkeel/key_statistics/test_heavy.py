from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenkeel.key_statistics import KeySampler, KeyTrace, heavy_hitters
from evenkeel.placement import InvalidInputError


def _trace(steps: list[list[int]], most: int = 2_000_000) -> KeyTrace:
    sampler = KeySampler(["table"], max_references=most)
    for step in steps:
        sampler.observe([(np.array(step, dtype=np.int64), np.array([[0, 0, len(step)]]))], 1)
    return sampler.traces()["table"]


_KEYS = st.one_of(st.integers(-9, 9), st.integers(-(2**63), 2**63 - 1))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(_KEYS, max_size=20), max_size=4))
def test_keys_come_back_with_the_share_of_steps_that_looked_them_up(steps: list[list[int]]) -> None:
    keys, wanted = heavy_hitters(_trace(steps))
    every = {key for step in steps for key in step}
    expected = {key: sum(key in step for step in steps) / len(steps) for key in every}
    assert dict(zip(keys.tolist(), wanted.tolist(), strict=True)) == pytest.approx(expected)
    assert (np.diff(wanted) <= 0).all()


def test_a_sample_of_the_keys_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"share: of the keys .* observe fewer steps"):
        heavy_hitters(_trace([list(range(10_000))], most=1 << 12))
