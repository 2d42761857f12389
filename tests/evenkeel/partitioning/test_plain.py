"""What plans while kernels are compiled: it sees the problem that they see, and balances as longest first does."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from evenkeel.partitioning import PartitionError, partition
from evenkeel.partitioning.plain import PLAIN
from evenkeel.partitioning.problem import COMPILED, make_problem
from tests.evenkeel.partitioning.test_api import calls


@settings(max_examples=150, deadline=None)
@given(calls())
def test_it_sees_the_problem_that_the_kernels_see(call: dict[str, Any]) -> None:
    how = {"sizes": None, "counts": "equal", "tolerance": 1e-3, "move_price": 0.01, "speeds": None, "nodes": None}
    how |= {name: value for name, value in call.items() if name not in ("strategy", "memory", "memory_caps")}
    plain, compiled = make_problem(**how, by=PLAIN), make_problem(**how, by=COMPILED)
    assert plain.bound == pytest.approx(compiled.bound, rel=1e-15)
    for name in ("arrays", "order", "home_counts", "home_loads"):
        one, other = (getattr(each, name) for each in (plain, compiled))
        for x, y in zip(one, other, strict=True) if name == "arrays" else [(one, other)]:
            np.testing.assert_allclose(x, y, rtol=1e-15)


def test_it_balances_as_longest_first() -> None:
    costs, homes = np.random.default_rng(0).integers(1, 5000, 640), np.repeat(np.arange(8), 80)
    for counts in ("equal", "free"):
        loads = [partition(costs, homes, 8, strategy=name, counts=counts).loads.max() for name in ("plain", "lpt")]
        assert loads[0] == loads[1]


@pytest.mark.parametrize("counts", ["equal", "free"])
def test_caps_are_kept_where_memory_is_not_cost(counts: str) -> None:
    rng = np.random.default_rng(1)
    costs, homes, memory = rng.integers(1, 100, 256), np.repeat(np.arange(8), 32), rng.integers(1, 100, 256)
    caps = np.full(8, np.ceil(memory.sum() / 8 * 1.02))
    found = partition(costs, homes, 8, strategy="plain", counts=counts, memory=memory, memory_caps=caps)
    assert (np.bincount(found.destinations, memory) <= caps).all()
    with pytest.raises(PartitionError, match="raise memory_caps"):
        partition([1, 1, 1], [0, 1, 1], 2, strategy="plain", memory=[3, 3, 3], memory_caps=[5, 5])


def test_no_kernel_is_compiled() -> None:
    program = """
import sys
import numpy as np
from numba.core.dispatcher import Dispatcher
from evenkeel.partitioning import partition
found = partition(np.arange(64.0), np.arange(64) % 4, 4, strategy="plain", memory=np.ones(64), memory_caps=[20] * 4,
                  counts="free", min_samples=2, nodes=[0, 0, 1, 1], speeds=[1, 1, 1, 2])
assert found.imbalance < 1.05
kernels = [value for name, module in list(sys.modules.items()) if name.startswith("evenkeel.")
           for value in vars(module).values() if isinstance(value, Dispatcher)]
assert len(kernels) > 10
assert not any(kernel.signatures for kernel in kernels)
"""
    subprocess.run([sys.executable, "-c", program], check=True)
