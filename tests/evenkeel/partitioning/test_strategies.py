"""Strategies beside plain transcriptions of them; and without kernels."""

import subprocess
import sys

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenkeel.partitioning import partition
from evenkeel.partitioning.karmarkar_karp import difference
from evenkeel.partitioning.problem import ascending_order
from tests.evenkeel.partitioning.reference import karmarkar_karp_sets, lpt_loads

INTEGERS = st.lists(st.one_of(st.integers(0, 3), st.integers(0, 2**40)), max_size=40)


def _check(costs: np.ndarray, num_sets: int) -> None:
    order = ascending_order(costs)
    assert difference(costs, order, num_sets, True).tolist() == karmarkar_karp_sets(costs, num_sets, equal=True)
    assert difference(costs, order, num_sets, False).tolist() == karmarkar_karp_sets(costs, num_sets, equal=False)


@settings(max_examples=150)
@given(INTEGERS, st.integers(1, 9))
def test_integer_costs_match_the_transcription(costs: list[int], num_sets: int) -> None:
    _check(np.array(costs, np.int64), num_sets)


@pytest.mark.parametrize("distinct", [1, 2, 50, 10**6])
def test_many_sets_match_the_transcription(distinct: int) -> None:
    """Enough sets for the radix sort to take over from insertion, with and without long runs of equal sums."""
    rng = np.random.default_rng(distinct)
    _check(rng.integers(0, distinct, 330), 61)
    _check(rng.integers(0, distinct, 330) * 7, 130)


@settings(max_examples=200)
@given(st.lists(st.integers(0, 50), max_size=40), st.integers(1, 7), st.sampled_from(["equal", "free"]))
def test_longest_first_matches_the_transcription(costs: list[int], num_ranks: int, counts: str) -> None:
    floor, remainder = divmod(len(costs), num_ranks)
    for strategy in ("lpt", "plain"):
        result = partition(np.array(costs, np.int64), [0] * len(costs), num_ranks, strategy=strategy, counts=counts)
        allowed = (0, len(costs)) if counts == "free" else (floor, floor + (remainder > 0))
        assert sorted(result.loads.tolist()) == sorted(lpt_loads(costs, num_ranks, *allowed))


@pytest.mark.skipif(numba.config.DISABLE_JIT, reason="kernels are not to be compiled")
def test_no_kernel_is_compiled_nor_interpreted() -> None:
    """Interpreted, those with loops take a hundred times as long, and Python is held meanwhile."""
    program = """
import dis
import sys
import numpy as np
from numba.core.dispatcher import Dispatcher
from evenkeel.partitioning import partition
from evenkeel.partitioning.slices import slices_of
kernels = [value for name, module in list(sys.modules.items()) if name.startswith("evenkeel.")
           for value in vars(module).values() if isinstance(value, Dispatcher)]
has_loop = lambda kernel: any(one.opname == "JUMP_BACKWARD" for one in dis.get_instructions(kernel.py_func))
loops = list(filter(has_loop, kernels))
assert len(loops) > 10
for kernel in loops:
    kernel.py_func.__code__ = (lambda *_: 1 / 0).__code__
for costs in (np.arange(64), np.arange(64.0)):
    found = partition(costs, np.arange(64) % 4, 4, strategy="plain", memory=np.ones(64), memory_caps=[20] * 4,
                      counts="free", min_samples=2, nodes=[0, 0, 1, 1], speeds=[1, 1, 1, 2])
    assert found.imbalance < 1.05
    slices_of(found.destinations, np.full(4, 16), np.ones((64, 2), np.int64), None, 1, compiled=False)
assert not any(kernel.signatures for kernel in kernels)
"""
    subprocess.run([sys.executable, "-c", program], check=True)
