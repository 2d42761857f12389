"""Random instances at the ends of what kernels may be given, each answer held against what must be true of it.

Small ones are held against every assignment there is. A process of its own runs instances under bounds checks: an index
beyond an array raises there. `python -m tests.evenkeel.partitioning.test_fuzz FIRST COUNT` runs more of them.
"""

import math
import os
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from evenkeel.partitioning import ImpossiblePartitionError, Partition, PartitionError, partition
from evenkeel.partitioning.minimal_move import between_nodes, kept_at_home
from evenkeel.partitioning.problem import make_problem, with_crowding
from evenkeel.partitioning.refinements import plan_round
from evenkeel.partitioning.rounds import RoundPlan, partition_batches
from evenkeel.partitioning.split_search import split_heavy
from evenkeel.partitioning.splits import SpanCosts
from evenkeel.partitioning.windows import regroup
from tests.evenkeel.partitioning.instances import (
    Rng,
    draw_amounts,
    draw_homes,
    draw_options,
    draw_shape,
    draw_split,
    one_of,
    round_of,
)
from tests.evenkeel.partitioning.reference import Traffic, allowed_counts, assignments, rows_of

SEARCHED_THROUGH = 130  # assignments up to which an answer is held against all there are
ROUNDING = Fraction(1, 10**12)  # relative, by which fractions of memory may exceed a cap


def _sums(values: NDArray[Any], ranks: Any, num_ranks: int) -> list[Fraction]:
    sums = [Fraction(0)] * num_ranks
    for value, rank in zip(values.tolist(), ranks, strict=True):
        sums[rank] += Fraction(value)
    return sums


def _within(used: list[Fraction], caps: NDArray[np.float64], allowance: Fraction) -> bool:
    return all(cap == math.inf or x <= Fraction(cap) * (1 + allowance) for x, cap in zip(used, caps, strict=True))


def _loads(costs: NDArray[Any], ranks: NDArray[Any], num_ranks: int) -> NDArray[Any]:
    loads = np.zeros(num_ranks, costs.dtype)
    np.add.at(loads, ranks, costs)
    return loads


def check_answer(
    found: Partition, costs: NDArray[Any], homes: NDArray[np.int32], num_ranks: int, given: dict[str, Any]
) -> None:
    """What holds of every partition."""
    ranks = found.destinations
    assert (ranks.dtype, ranks.shape, found.strategy) == (np.int32, costs.shape, given["strategy"])
    counts = np.bincount(ranks, minlength=num_ranks).tolist()
    allowed = allowed_counts(homes.tolist(), num_ranks, given["counts"])
    assert all(count in each for count, each in zip(counts, allowed, strict=True))
    assert "memory" in given or min(counts) >= min(given["min_samples"], costs.size // num_ranks)
    for loads, places in ((found.loads, ranks), (found.home_loads, homes)):
        assert (loads == _loads(costs, places, num_ranks)).all()
        assert loads.dtype == costs.dtype
    speeds = np.asarray(given.get("speeds", np.ones(num_ranks)))
    for loads, told in ((found.home_loads, found.home_imbalance), (found.loads, found.imbalance)):
        times = loads / speeds
        largest = float(times.max())
        imbalance = largest / times.mean() if largest > 1e-290 else told if largest else 1.0
        assert math.isclose(told, imbalance, rel_tol=1e-9)
    assert found.lower_bound <= largest * (1 + 1e-12) + 1e-323
    assert found.imbalance >= 1 - 1e-9 or largest < 1e-300
    moved, sizes = ranks != homes, np.asarray(given.get("sizes", costs), np.float64)
    assert found.moved_samples == moved.sum()
    nodes = np.asarray(given.get("nodes", np.zeros(num_ranks)))
    crossing = nodes[ranks] != nodes[homes]
    for size, of in ((found.size, sizes), (found.moved_size, sizes[moved]),
                     (found.moved_size_between_nodes, sizes[crossing])):  # fmt: skip
        assert math.isclose(size, math.fsum(of.tolist()), rel_tol=1e-9, abs_tol=1e-320)
    if "memory" in given:
        assert _within(_sums(given["memory"], ranks, num_ranks), given["memory_caps"], ROUNDING), "above a cap"


def check_problem(costs: NDArray[Any], homes: NDArray[np.int32], num_ranks: int, given: dict[str, Any]) -> None:
    """Limits are loads that a rank can have; what is computed without kernels is what kernels compute."""
    how = {name: given.get(name) for name in ("sizes", "counts", "tolerance", "move_price", "speeds", "nodes")}
    plain, compiled = (make_problem(costs, homes, num_ranks, **how, compiled=each) for each in (False, True))
    assert math.isclose(plain.bound, compiled.bound, rel_tol=1e-14)
    for name in ("order", "home_counts", "home_loads"):
        assert (getattr(plain, name) == getattr(compiled, name)).all()
    for one, other in zip(plain.arrays, compiled.arrays, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-14)
    made = [compiled, with_crowding(compiled)]
    if compiled.num_nodes > 1:
        made.append(between_nodes(compiled, kept_at_home(compiled)))
    for each in made:  # beyond int64 a limit would wrap around to a negative one
        assert (each.arrays.limits >= 0).all()
        assert (each.arrays.limits <= each.arrays.costs.sum()).all()


def check_strategies(costs: NDArray[Any], homes: NDArray[np.int32], num_ranks: int, given: dict[str, Any]) -> None:
    """The default is never worse than the others by more than the tolerance, nor load and moves worse than staying."""
    speeds = np.asarray(given.get("speeds", np.ones(num_ranks)))
    given = {name: value for name, value in given.items() if name not in ("memory", "memory_caps", "min_samples")}
    largest = {
        strategy: float((partition(costs, homes, num_ranks, **given | {"strategy": strategy, "move_price": 0.0}).loads
                         / speeds).max()) for strategy in ("karmarkar_karp", "lpt", "minimal_move")
    }  # fmt: skip
    unit = 1.0 + float((1 / speeds).max()) * bool((speeds != 1).any())  # limits are rounded up rank by rank
    best = min(largest["karmarkar_karp"], largest["lpt"])
    assert largest["minimal_move"] <= best * (1 + given["tolerance"]) * (1 + 1e-9) + unit
    part = partition(costs, homes, num_ranks, **given | {"strategy": "minimal_move"})
    held = np.bincount(homes, minlength=num_ranks)
    if part.lower_bound > 0 and "nodes" not in given and (given["counts"] == "free" or np.ptp(held) <= 1):
        price = given["move_price"] * part.moved_size / part.size if part.size else 0.0
        took, staying = ((loads / speeds).max() / part.lower_bound for loads in (part.loads, part.home_loads))
        assert took + price <= (staying + given["tolerance"]) * (1 + 1e-9) + unit / part.lower_bound


def check_partition(rng: Rng) -> None:
    """One instance, twice; small ones beside every assignment there is."""
    n, num_ranks = draw_shape(rng)
    costs, homes = draw_amounts(rng, n), draw_homes(rng, n, num_ranks)
    given = draw_options(rng, costs, homes, num_ranks)
    is_possible = given.pop("is_possible", False)
    check_problem(costs, homes, num_ranks, given)
    if costs.dtype == np.int64 and costs.sum() < 1 << 40 and n < 100:
        check_strategies(costs, homes, num_ranks, given)
    every = list(assignments(homes.tolist(), num_ranks, given["counts"])) if num_ranks**n <= SEARCHED_THROUGH else []
    refusal: PartitionError | None = None
    try:
        found = partition(costs, homes, num_ranks, **given)
    except PartitionError as error:
        refusal = error
    if refusal is not None:
        proven, least, amounts = isinstance(refusal, ImpossiblePartitionError), math.inf, given["memory"]
        assert not (proven and is_possible), "caps that an assignment keeps, down to the rounding of their sums"
        roomy = float(amounts.max()) + float(amounts.sum()) / num_ranks  # the emptiest rank has room for any sample
        assert given["counts"] == "equal" or given["memory_caps"].min() < roomy * (1 + 1e-9), refusal
        for ranks in every if proven else ():
            used = _sums(amounts, ranks, num_ranks)
            assert not _within(used, given["memory_caps"], Fraction(0)), f"{refusal}, but {ranks} is within the caps"
            least = min(least, float(np.maximum(np.array(used, float) - given["memory_caps"], 0).sum()))
        is_exact = amounts.dtype == np.int64 and amounts.sum() < 1 << 50
        if every and is_exact and isinstance(refusal, ImpossiblePartitionError):
            assert 0 < refusal.shortfall <= least * (1 + 1e-9)
        return
    check_answer(found, costs, homes, num_ranks, given)
    assert (partition(costs, homes, num_ranks, **given).destinations == found.destinations).all()
    is_plain = given["strategy"] in ("karmarkar_karp", "lpt") and not given.keys() & {"memory", "speeds"}
    if is_plain and costs.dtype == np.int64 and costs.sum() < 1 << 50:
        unit, given["sizes"] = 2.0 ** one_of(rng, -1, -1000, 900), given.get("sizes", costs)
        scaled = partition(costs * unit, homes, num_ranks, **given)
        assert (scaled.destinations == found.destinations).all()
        assert (scaled.loads == found.loads * unit).all()
        assert scaled.lower_bound == found.lower_bound * unit
    speeds = [Fraction(float(speed)) for speed in given.get("speeds", np.ones(num_ranks))]
    fewest = min(allowed[0] for allowed in allowed_counts(homes.tolist(), num_ranks, given["counts"]))
    company = sorted(map(Fraction, costs.tolist()))[: max(fewest - 1, 0)]
    heaviest = (max(map(Fraction, costs.tolist()), default=Fraction(0)) + sum(company)) / max(speeds)
    least = max(sum(map(Fraction, costs.tolist())) / sum(speeds), heaviest)
    assert Fraction(found.lower_bound) >= least * (1 - ROUNDING) - Fraction(1, 10**320), "a bound that is no use"
    for ranks in every:
        largest = max(x / speed for x, speed in zip(_sums(costs, ranks, num_ranks), speeds, strict=True))
        assert Fraction(found.lower_bound) <= largest * (1 + ROUNDING) + Fraction(1, 10**320), "the bound is none"


def _means_and_bounds(
    costs: NDArray[Any], steps: NDArray[Any], num_steps: int, speeds: NDArray[np.float64], counts: str
) -> NDArray[np.float64]:
    """(2, num_steps) an even division of each batch, and the lower bound."""
    batches = [costs[steps == step] for step in range(num_steps)]
    found = [partition(own, np.zeros(own.size, np.int64), speeds.size, counts=counts, speeds=speeds) for own in batches]
    return np.array([[one.loads.sum() / speeds.sum(), one.lower_bound] for one in found]).T


def check_window(rng: Rng) -> None:
    """Several batches: each keeps its number of samples, no bound rises, and steps take no longer than one by one."""
    num_steps, num_ranks, n = int(rng.integers(1, 5)), int(rng.integers(1, 9)), int(rng.integers(0, 40))
    costs, homes, steps = draw_amounts(rng, n), draw_homes(rng, n, num_ranks), rng.integers(0, num_steps, n)
    giants = one_of(rng, 0, 1 + rng.integers(100, 10**6))
    if giants and costs.dtype == np.int64 and costs.sum() < 1 << 40:
        costs = costs + giants * (rng.random(n) < 0.2)
    steps = steps[np.lexsort((steps, homes))]
    given = draw_options(rng, costs, homes, num_ranks)
    samples, options = round_of(costs, homes, num_ranks, steps=steps, num_steps=num_steps, **given)
    speeds, equal = np.asarray(given.get("speeds", np.ones(num_ranks))), given["counts"] == "equal"
    mean, bound = _means_and_bounds(costs, steps, num_steps, speeds, given["counts"])
    moved = regroup(costs, steps.astype(np.int32), num_steps, speeds, equal=equal, fill=rng.uniform(0.5, 1.0))
    assert (_means_and_bounds(costs, moved, num_steps, speeds, given["counts"])[1] <= bound * (1 + 1e-9)).all()
    batches = partition_batches(samples, options)
    alone = None if any(isinstance(one, PartitionError) for one in batches.plans) else batches.joined(samples)
    try:
        found = plan_round(samples, options)
    except PartitionError:
        assert alone is None
        return
    assert (plan_round(samples, options).destinations == found.destinations).all()
    of = steps if found.steps is None else found.steps
    assert (of != steps).any() or (alone is not None and (found.destinations == alone.destinations).all())
    may_change = alone is None or (bound > 1.02 * (1 - 1e-9) * mean).any()
    assert may_change or (of == steps).all(), "samples change their batch, and none has a giant"
    for step, figures in enumerate(found.batches):
        own, loaded = np.flatnonzero(of == step), steps == step
        assert own.size == loaded.sum()
        loads = _loads(costs[own], found.destinations[own], num_ranks)
        at_home = np.bincount(homes[loaded], costs[loaded], num_ranks)
        if "memory" in given:
            assert _within(
                _sums(given["memory"][own], found.destinations[own], num_ranks), given["memory_caps"], ROUNDING
            )
        assert np.allclose(loads, found.loads_after[step])
        assert np.allclose(at_home, found.loads_before[step])
        largest = float((found.loads_after[step] / speeds).max())
        assert math.isclose(figures.max_load_after, largest, rel_tol=1e-9, abs_tol=1e-320)
        if equal and (of != steps).any():
            assert np.ptp(np.bincount(found.destinations[own], minlength=num_ranks)) <= 1
    if alone is not None:
        took, before = (
            sum(one.max_load_after for one in plan.batches)
            + options.move_price * plan.figures.moved_size / max(plan.figures.size, 1)
            * sum(one.lower_bound for one in plan.batches)
            for plan in (found, alone)
        )  # fmt: skip
        assert took <= before * (1 + 1e-9), "steps and moves together take longer than without windows"


def check_users(rng: Rng) -> None:
    """Users: in no batch has a rank more to do, no cap is broken, and fewer rows are looked up, or nothing changes."""
    n, num_ranks = draw_shape(rng)
    num_steps = one_of(rng, 1, 1, 2, 3)
    costs, homes, steps = draw_amounts(rng, n), draw_homes(rng, n, num_ranks), rng.integers(0, num_steps, n)
    if rng.random() < 0.5:  # many samples of a user, alike
        costs = rng.lognormal(4, one_of(rng, 0.2, 1.0), 60).astype(np.int64)[np.arange(n) % 60] + 1
    given = draw_options(rng, costs, homes, num_ranks)
    users = rng.integers(0, one_of(rng, 2, 20, 60, 1 << 32), n)
    steps = steps[np.lexsort((steps, homes))]
    samples, options = round_of(costs, homes, num_ranks, users=users, steps=steps, num_steps=num_steps, **given)
    try:
        found, without = plan_round(samples, options), plan_round(replace(samples, users=None), options)
    except PartitionError:
        return
    assert (plan_round(samples, options).destinations == found.destinations).all()
    alone = plan_round(replace(samples, users=np.arange(n, dtype=np.uint32)), options)
    assert (alone.destinations == without.destinations).all(), "users of one sample each change something"
    assert np.array_equal(found.steps, without.steps)
    assert (found.loads_before == without.loads_before).all()
    of, sizes = steps if found.steps is None else found.steps, np.asarray(samples.moving_sizes, np.float64)
    for step, (figures, before) in enumerate(zip(found.batches, without.batches, strict=True)):
        own = of == step
        ranks, ranks_before = found.destinations[own], without.destinations[own]
        assert np.bincount(ranks).tolist() == np.bincount(ranks_before).tolist()
        assert figures.max_load_after <= before.max_load_after
        assert (figures.lower_bound, figures.samples) == (before.lower_bound, before.samples)
        assert np.allclose(found.loads_after[step], _loads(costs[own], ranks, num_ranks), atol=0)
        moved = ranks != homes[own]
        assert figures.moved_samples == moved.sum()
        assert math.isclose(figures.moved_size, math.fsum(sizes[own][moved].tolist()), rel_tol=1e-9, abs_tol=0.5)
        if (ranks != ranks_before).any():
            assert rows_of(users[own], sizes[own], ranks) < rows_of(users[own], sizes[own], ranks_before)
        if "memory" in given:
            assert _within(_sums(given["memory"][own], ranks, num_ranks), given["memory_caps"], Fraction(1, 10**9))


def check_split(rng: Rng) -> None:
    """Samples in parts: every position once, at cuts that are allowed, within caps, and in less time than whole."""
    spans, homes, num_ranks, options = draw_split(rng)
    samples, how = round_of(spans.whole, homes, num_ranks, **options)
    (found,) = partition_batches(samples, how).plans
    plan = split_heavy(samples, how, found)
    if isinstance(plan, PartitionError) or plan is found:
        return
    check_parts(plan, spans, set(samples.divisible[:, 0].tolist()), options, num_ranks)
    again = split_heavy(samples, how, found)
    assert isinstance(again, RoundPlan)
    assert (plan.destinations == again.destinations).all()
    counts = np.bincount(plan.destinations, minlength=num_ranks)
    assert counts.min() >= how.min_samples or len(spans) < how.min_samples * num_ranks
    speeds, (figures,) = np.asarray(how.speeds or np.ones(num_ranks)), plan.batches
    even = float(spans.whole.sum() / speeds.sum())
    assert even * (1 - 1e-9) <= figures.max_load_after
    if isinstance(found, RoundPlan):
        assert figures.max_load_after < found.batches[0].max_load_after == figures.max_load_whole
        assert found.batches[0].lower_bound > (1 + how.split.above) * even * (1 - 1e-9)


def check_parts(plan: RoundPlan, spans: SpanCosts, which: set[int], options: Any, num_ranks: int) -> None:
    """Every position once, where it may be cut, on one rank a part, within the caps; loads and traffic are counted."""
    pieces, (figures,) = plan.parts.pieces, plan.batches
    of = np.cumsum(plan.parts.begins == 0) - 1
    assert of[-1] + 1 == len(spans)
    parts = dict.fromkeys(zip(of.tolist(), plan.destinations.tolist(), strict=True))
    assert len(parts) == of.size, "two parts of a sample on a rank"
    used, loads, split = np.zeros(num_ranks), np.zeros(num_ranks), options["split"]
    nodes, travelled = options.get("nodes", np.zeros(num_ranks)), [0, 0]
    traffic = Traffic(num_ranks, nodes, split.within, split.between)
    for sample in range(len(spans)):
        one, own = spans.take([sample]), pieces[pieces[:, 1] == sample]
        ranks, (end,) = plan.destinations[of == sample].tolist(), one.positions
        if not len(own):
            (rank,) = ranks
            used[rank] += end
            loads[rank] += one.whole[0]
            continue
        begins, ends = own[:, 6], own[:, 7]
        assert own[:, 4].tolist() == ranks
        assert sample in which, "a part of what may not be split"
        assert len(own) > 1
        assert (begins[0], ends[-1]) == (0, end)
        assert (begins[1:] == ends[:-1]).all(), "positions that are missing or come twice"
        assert (begins < ends).all(), "a part of nothing"
        cuts = (begins[1:] - one.first_cut) / one.granule
        assert ((cuts >= 0) & (cuts < one.num_cuts) & (cuts % 1 == 0)).all(), "a cut that is not allowed"
        for number, (rank, begin, stop) in enumerate(zip(ranks, begins.tolist(), ends.tolist(), strict=True)):
            used[rank] += stop - begin
            loads[rank] += one.of_spans(begin, stop)[0]
            keys, later = max(min(stop, end - one.candidates[0]) - begin, 0), ranks[number + 1 :]
            far = len({nodes[target] for target in later} - {nodes[rank]})
            travelled[0] += int(keys) * (len(later) - far)
            travelled[1] += int(keys) * far
            traffic.add(keys, rank, later)
    np.testing.assert_allclose(plan.loads_after[0], loads, rtol=1e-6, atol=1e-9 * loads.max())
    assert (figures.exchanged, figures.exchanged_between_nodes) == (sum(travelled), travelled[1])
    assert (figures.split_samples, figures.pieces) == (len(set(pieces[:, 1].tolist())), len(pieces))
    time = (plan.loads_after[0] / np.asarray(options.get("speeds", np.ones(num_ranks))) + traffic.times()).max()
    assert math.isclose(figures.max_load_after, time + split.fixed, rel_tol=1e-6)
    assert "memory_caps" not in options or (used <= np.asarray(options["memory_caps"]) * (1 + 1e-9)).all()


def run(first: int, count: int) -> None:
    """Runs instances, each a function of its number."""
    for number in range(first, first + count):
        rng = np.random.default_rng([7, number])
        print("instance", number)  # shown where one fails
        one_of(rng, *[check_partition] * 5, check_window, check_split, check_users)(rng)


@pytest.mark.parametrize("first", range(0, 1200, 300))
def test_answers_hold(first: int) -> None:
    run(first, 300)


@pytest.mark.timeout(900)
def test_no_kernel_reads_beyond_its_arrays() -> None:
    folder = Path(__file__).parents[3] / "out" / "bounds-checked-kernels"  # they take half a minute, and are kept
    # Without any optimization numba could not keep them.
    environment = os.environ | {"NUMBA_BOUNDSCHECK": "1", "NUMBA_OPT": "1", "EVENKEEL_CACHE_DIR": str(folder)}
    subprocess.run([sys.executable, "-m", __name__, "2000", "120"], env=environment, check=True)


if __name__ == "__main__":
    run(int(sys.argv[1]), int(sys.argv[2]))
