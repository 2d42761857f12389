import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from evenkeel.partitioning import partition
from evenkeel.partitioning.problem import BITS, exponent_for, whole_units

FLOATS = st.lists(st.one_of(st.sampled_from([0.0, -0.0, 5e-324, 1e308]), st.floats(0, 1e308)), min_size=1, max_size=60)


@settings(max_examples=200, deadline=None)
@given(FLOATS)
def test_units_keep_order_and_nearly_all_of_the_value(values: list[float]) -> None:
    array = np.array(values)
    exponent = exponent_for(float(array.max()), array.size)
    units = whole_units(array, exponent)
    assert sum(units.tolist()) <= 2**BITS
    assert (np.diff(units[np.argsort(array)]) >= 0).all()
    if array.max() > 0:
        assert units.max() >= 2 ** (BITS - 8)
        assert (abs(np.ldexp(units.astype(np.float64), -exponent) - array) <= array.max() * 2.0**-52).all()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 10**6), min_size=4, max_size=40), st.sampled_from([0.5, 2.0**-1000, 2.0**900]))
def test_a_power_of_two_changes_nothing(costs: list[int], unit: float) -> None:
    homes = np.arange(len(costs)) % 3
    for strategy in ("karmarkar_karp", "lpt"):
        whole = partition(np.array(costs), homes, 3, strategy=strategy, sizes=np.ones(len(costs)))
        scaled = partition(np.array(costs) * unit, homes, 3, strategy=strategy, sizes=np.ones(len(costs)))
        assert scaled.destinations.tolist() == whole.destinations.tolist()
        assert scaled.loads.tolist() == (whole.loads * unit).tolist()
        assert scaled.lower_bound == whole.lower_bound * unit


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=4, max_size=40), st.sampled_from([1e-310, 0.37, 1e290]))
def test_costs_of_any_magnitude_are_balanced(costs: list[float], unit: float) -> None:
    values, homes = np.array(costs) * unit, np.zeros(len(costs), np.int32)
    results = {s: partition(values, homes, 3, strategy=s) for s in ("karmarkar_karp", "lpt", "minimal_move")}
    best = min(float(result.loads.max()) for result in results.values())
    assert results["minimal_move"].loads.max() <= max(best, results["lpt"].lower_bound) * (1 + 1.01e-3)
