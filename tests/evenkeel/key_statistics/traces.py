"""Traces of given keys."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from hypothesis import strategies as st

from evenkeel.key_statistics import KeySampler, KeyTrace

KEYS = st.one_of(st.integers(-9, 9), st.integers(-(2**63), 2**63 - 1))


def trace_of(steps: Iterable[Any], most: int = 2_000_000, rank: int = 0, ranks: int = 1) -> KeyTrace:
    """What a rank of some sees of the keys of steps, as if each were of a sample."""
    sampler = KeySampler(["other", "table"], max_references=most)
    for step in steps:
        own = np.asarray(step, np.int64)[rank::ranks]
        sampler.observe([(own, np.array([[1, 0, len(own)]]))], len(own))
    return sampler.traces()["table"]
