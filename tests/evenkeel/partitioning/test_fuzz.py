"""Random instances at the ends of what kernels may be given, each answer held against what must be true of it.

Small ones are held against every assignment there is. A process of its own runs instances under bounds checks: an index
beyond an array raises there. `python -m tests.evenkeel.partitioning.test_fuzz FIRST COUNT` runs more of them.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from evenkeel.partitioning import ImpossiblePartitionError, Partition, PartitionError, memory, partition
from evenkeel.partitioning.problem import MAX_SUM, MAX_TOTAL, share_of_total
from evenkeel.partitioning.rounds import partition_batches
from evenkeel.partitioning.splits import Divisible, SpanCosts, SplitOptions, check_table
from evenkeel.partitioning.splits.stage import BatchParts, split_batch
from evenkeel.partitioning.stages import plan_round
from tests.evenkeel.partitioning.reference import allowed_counts, assignments
from tests.evenkeel.partitioning.rounds import round_of

Rng = np.random.Generator
STRATEGIES = ("minimal_move", "minimal_move", "karmarkar_karp", "lpt", "plain")
SEARCHED_THROUGH = 130  # assignments up to which an answer is held against all there are
ROUNDING = Fraction(1, 10**12)  # relative, by which fractions of memory may exceed a cap


def _one(rng: Rng, *choices: Any) -> Any:
    return choices[int(rng.integers(len(choices)))]


def _shape(rng: Rng) -> tuple[int, int]:
    """Samples and ranks: mostly tiny, some ordinary, few that reach what only many ranks or samples reach."""
    limits = ((0.7, 7, 1, 5), (0.96, 30, 1, 12), (0.998, 300, 1, 33), (2, 3000, 90, 140))
    kind = rng.random()
    _, n, least, most = next(each for each in limits if kind < each[0])
    return int(rng.integers(n)), int(rng.integers(least, most))


def _amounts(rng: Rng, n: int) -> NDArray[Any]:
    """(n,) numbers, int64 or float64, whose sum is allowed."""
    most, giant = (MAX_TOTAL - 1) // max(n, 1), rng.random(n)
    giant[: min(n, 1)] = 10.0 ** rng.uniform(0, 290)
    return _one(
        rng,
        np.zeros(n, _one(rng, np.int64, np.float64)),
        np.full(n, rng.integers(1, 100)),
        rng.integers(0, 4, n),
        rng.integers(0, 10**6, n),
        np.where(rng.random(n) < 0.7, most, rng.integers(0, most + 1, n)).astype(np.int64),  # as large as may be
        rng.lognormal(4, 2, n).astype(np.int64) ** 2,
        rng.lognormal(4, 2, n),
        np.minimum(10.0 ** rng.uniform(-323, 300, n), MAX_SUM / max(n, 1) / 2),  # over all of float64
        np.where(rng.random(n) < 0.2, 0.0, 5e-324 * rng.integers(1, 9, n)),
        rng.permutation(giant),  # one outweighs all others
        rng.integers(0, 1000, n) * 0.1,
    )


def _homes(rng: Rng, n: int, num_ranks: int) -> NDArray[np.int32]:
    few = rng.integers(0, num_ranks, 2)
    kinds = (
        np.arange(n) * num_ranks // max(n, 1), np.full(n, few[0]), few[rng.integers(0, 2, n)],
        rng.integers(0, num_ranks, n),
    )  # fmt: skip
    return np.sort(_one(rng, *kinds)).astype(np.int32)


def _options(rng: Rng, costs: NDArray[Any], homes: NDArray[np.int32], num_ranks: int) -> dict[str, Any]:
    """Each option given or not, at all scales."""
    n = costs.size
    given: dict[str, Any] = {"strategy": _one(rng, *STRATEGIES), "counts": _one(rng, "equal", "free")}
    given["tolerance"] = _one(rng, 0.0, 1e-15, 1e-3, 1e-3, 0.05, 1.0)
    if rng.random() < 0.4:
        given["speeds"] = _one(
            rng,
            np.full(num_ranks, _one(rng, 1e-6, 0.1, 1.0, 1e6)),
            np.clip(10.0 ** rng.uniform(-6, 6, num_ranks), 1e-6, 1e6),
            rng.choice([1e-6, 0.1, 0.5, 1.0, 1.0 + 1e-15, 3.0, 1e6], num_ranks),
        )
    if rng.random() < 0.4:
        given["nodes"] = rng.integers(0, _one(rng, 1, 2, 3, num_ranks), num_ranks) * _one(rng, 1, 10**6)
    if rng.random() < 0.4:
        given["sizes"] = _amounts(rng, n)
    if rng.random() < 0.35:
        given["memory"], used = _amounts(rng, n), np.zeros(num_ranks)
        np.add.at(used, _one(rng, rng.permutation(homes), rng.integers(0, num_ranks, n)), given["memory"])
        given["memory_caps"] = _one(
            rng,
            used,  # exactly what some assignment needs
            np.full(num_ranks, float(used.max(initial=0.0)) * rng.uniform(0.5, 1.5)),
            np.where(rng.random(num_ranks) < 0.5, np.inf, used),
            np.where(rng.random(num_ranks) < 0.3, 0.0, 10.0 ** rng.uniform(-300, 300, num_ranks)),
        )
    return given


def _sums(values: NDArray[Any], ranks: Any, num_ranks: int, more: Fraction = Fraction(0)) -> list[Fraction]:
    sums = [Fraction(0)] * num_ranks
    for value, rank in zip(values.tolist(), ranks, strict=True):
        sums[rank] += Fraction(value) + (more if value else 0)
    return sums


def _within(used: list[Fraction], caps: NDArray[np.float64], allowance: Fraction) -> bool:
    return all(cap == math.inf or x <= Fraction(cap) * (1 + allowance) for x, cap in zip(used, caps, strict=True))


def check_answer(
    found: Partition, costs: NDArray[Any], homes: NDArray[np.int32], num_ranks: int, given: dict[str, Any]
) -> None:
    """What holds of every partition."""
    ranks = found.destinations
    assert (ranks.dtype, ranks.shape, found.strategy) == (np.int32, costs.shape, given["strategy"])
    counts = np.bincount(ranks, minlength=num_ranks).tolist()
    allowed = allowed_counts(homes.tolist(), num_ranks, given["counts"])
    assert all(count in each for count, each in zip(counts, allowed, strict=True))
    for loads, places in ((found.loads, ranks), (found.home_loads, homes)):
        expected = np.zeros(num_ranks, costs.dtype)
        np.add.at(expected, places, costs)
        assert (loads == expected).all()
        assert loads.dtype == costs.dtype
    times = found.loads / np.asarray(given.get("speeds", np.ones(num_ranks)))
    largest = float(times.max())
    assert math.isclose(found.imbalance, largest / times.mean() if largest > 1e-290 else found.imbalance, rel_tol=1e-9)
    assert found.lower_bound <= largest * (1 + 1e-12) + 1e-323
    assert found.imbalance >= 1 - 1e-9 or largest < 1e-300
    moved, sizes = ranks != homes, np.asarray(given.get("sizes", costs), np.float64)
    assert found.moved_samples == moved.sum()
    nodes = np.asarray(given.get("nodes", np.zeros(num_ranks)))
    crossing = nodes[ranks] != nodes[homes]
    assert math.isclose(found.moved_size, math.fsum(sizes[moved].tolist()), rel_tol=1e-9, abs_tol=1e-320)
    assert math.isclose(
        found.moved_size_between_nodes, math.fsum(sizes[crossing].tolist()), rel_tol=1e-9, abs_tol=1e-320
    )
    if "memory" in given:
        assert _within(_sums(given["memory"], ranks, num_ranks), given["memory_caps"], ROUNDING), "above a cap"


def check_partition(rng: Rng) -> None:
    """One instance, twice; small ones beside every assignment there is."""
    n, num_ranks = _shape(rng)
    costs, homes = _amounts(rng, n), _homes(rng, n, num_ranks)
    given = _options(rng, costs, homes, num_ranks)
    every = list(assignments(homes.tolist(), num_ranks, given["counts"])) if num_ranks**n <= SEARCHED_THROUGH else []
    refusal: type[PartitionError] | None = None
    try:
        found = partition(costs, homes, num_ranks, **given)
    except PartitionError as error:
        refusal = type(error)
    if refusal is not None:
        # Of whole units the search may miss an assignment this close to a cap, but must not disprove it.
        doubt = 0 if refusal is ImpossiblePartitionError else 2 * n * Fraction(float(given["memory"].max())) / 2**58
        for ranks in every if given["strategy"] != "plain" or not doubt else ():
            used = _sums(given["memory"], ranks, num_ranks, Fraction(n * doubt))
            assert not _within(used, given["memory_caps"], Fraction(0)), f"{refusal}, but {ranks} is within the caps"
        return
    check_answer(found, costs, homes, num_ranks, given)
    assert (partition(costs, homes, num_ranks, **given).destinations == found.destinations).all()
    speeds = [Fraction(float(speed)) for speed in given.get("speeds", np.ones(num_ranks))]
    for ranks in every:
        largest = max(x / speed for x, speed in zip(_sums(costs, ranks, num_ranks), speeds, strict=True))
        assert Fraction(found.lower_bound) <= largest * (1 + ROUNDING) + Fraction(1, 10**320), "the bound is none"


def check_window(rng: Rng) -> None:
    """Several batches together: each keeps its number of samples, and is a partition."""
    num_steps, num_ranks, n = int(rng.integers(1, 5)), int(rng.integers(1, 9)), int(rng.integers(0, 40))
    costs, homes, steps = _amounts(rng, n), _homes(rng, n, num_ranks), rng.integers(0, num_steps, n)
    steps = steps[np.lexsort((steps, homes))]
    given = _options(rng, costs, homes, num_ranks)
    try:
        found = plan_round(*round_of(costs, homes, num_ranks, steps=steps, num_steps=num_steps, **given))
    except PartitionError:
        return
    of = steps if found.steps is None else found.steps
    for step in range(num_steps):
        own = of == step
        assert own.sum() == (steps == step).sum()
        loads = np.zeros(num_ranks)
        np.add.at(loads, found.destinations[own], costs[own])
        assert np.allclose(loads, found.loads_after[step])


def check_users(rng: Rng) -> None:
    """Users: no batch's largest load is above that of the plan without them, and no cap is broken."""
    n, num_ranks = _shape(rng)
    costs, homes = _amounts(rng, n), _homes(rng, n, num_ranks)
    given = _options(rng, costs, homes, num_ranks)
    samples, options = round_of(costs, homes, num_ranks, users=rng.integers(0, _one(rng, 2, 20, 1 << 32), n), **given)
    try:
        found, without = plan_round(samples, options), plan_round(replace(samples, users=None), options)
    except PartitionError:
        return
    assert found.figures.max_load_after <= without.figures.max_load_after
    assert np.bincount(found.destinations).tolist() == np.bincount(without.destinations).tolist()
    if "memory" in given:
        assert _within(_sums(given["memory"], found.destinations, num_ranks), given["memory_caps"], Fraction(1, 10**9))


def check_split(rng: Rng) -> None:
    """Samples in parts: every position once, at cuts that are allowed, within caps, and in less time than whole."""
    n, num_ranks = int(rng.integers(1, 40)), int(rng.integers(2, 20))
    positions = _one(rng, rng.integers(0, 4, n), np.clip(rng.lognormal(5, 2, n), 0, 1e9).astype(np.int64),
                     np.where(rng.random(n) < 0.2, rng.integers(1, 1 << 40, n), rng.integers(0, 50, n)))  # fmt: skip
    context, candidates = rng.integers(0, _one(rng, 1, 4), n), rng.integers(0, _one(rng, 1, 9), n)
    total, scale = positions + context + candidates, 10.0 ** rng.uniform(-9, 9)
    how: dict[str, Any] = {name: scale * rng.integers(0, 5) for name in ("per_position", "per_pair", "fixed")}
    shape = {"context": context, "candidates": candidates, "granule": rng.integers(1, 5, n)}
    most = float(SpanCosts.of(total, **how, **shape).whole.sum()) / (share_of_total(num_ranks) / 2)
    spans = SpanCosts.of(total, **{name: value / max(most, 1.0) for name, value in how.items()}, **shape)
    homes = np.sort(rng.integers(0, num_ranks, n)).astype(np.int32)
    options: dict[str, Any] = {"counts": _one(rng, "free", "equal"), "sizes": spans.positions}
    if rng.random() < 0.3:
        options["speeds"] = 10.0 ** rng.uniform(-3, 3, num_ranks)
    if rng.random() < 0.3:
        options["nodes"] = rng.integers(0, 4, num_ranks)
    if rng.random() < 0.3:
        mean = float(spans.positions.sum()) / num_ranks
        options |= {"memory": spans.positions, "memory_caps": np.full(num_ranks, mean * rng.uniform(0.5, 4) + 1)}
    which = np.flatnonzero(rng.random(n) < 0.8)
    divisible = Divisible(samples=which, first_items=spans.head[which], spans=spans.take(which))
    assert check_table(divisible.table, spans.whole) == ""
    prices = np.where(rng.random(3) < 0.5, 0.0, 10.0 ** rng.uniform(-20, 20, 3)).tolist()
    split = SplitOptions(above=_one(rng, 0.0, 0.05, 1.0), within=prices[0], between=prices[1], fixed=prices[2])
    samples, how_ = round_of(spans.whole, homes, num_ranks, divisible=divisible.table, split=split, **options)
    found = partition_batches(samples, how_)
    plan = split_batch(samples, how_, found)
    if plan is not None:
        check_parts(plan, spans, set(which.tolist()), options, num_ranks)
        assert isinstance(found, PartitionError) or plan.figures.max_load_after < found.batches[0].max_load_after


def check_parts(plan: BatchParts, spans: SpanCosts, which: set[int], options: Any, num_ranks: int) -> None:
    """Every position once, where it may be cut, on one rank a part, within the caps."""
    covered, used, places = np.zeros(len(spans)), np.zeros(num_ranks), set()
    for sample, begin, end, rank, _ in np.sort(plan.parts, order=["sample", "begin"]).tolist():
        assert (sample, rank) not in places, "two parts of a sample on a rank"
        places.add((sample, rank))
        assert begin == covered[sample], "positions that are missing or come twice"
        covered[sample] = end if end else spans.positions[sample]
        assert not end or (end > begin and sample in which), "a part of nothing, or of what may not be split"
        cut = (begin - spans.first_cut[sample]) / spans.granule[sample]
        assert not begin or (0 <= cut < spans.num_cuts[sample] and cut % 1 == 0), "a cut that is not allowed"
        used[rank] += (end - begin) if end else spans.positions[sample]
    assert (covered == spans.positions).all(), "positions that nobody has"
    assert math.isclose(float(plan.loads.sum()), float(spans.whole.sum()), rel_tol=1e-6)
    assert "memory_caps" not in options or (used <= options["memory_caps"] * (1 + 1e-6)).all(), "above a cap"


def run(first: int, count: int) -> None:
    """Runs instances, each a function of its number."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "PLACEMENTS", 20_000)  # more than those need that are held against all assignments
        for number in range(first, first + count):
            rng = np.random.default_rng([7, number])
            print("instance", number)  # shown where one fails
            _one(rng, *[check_partition] * 8, check_window, check_split, check_users)(rng)


@pytest.mark.parametrize("first", range(0, 600, 200))
def test_answers_hold(first: int) -> None:
    run(first, 200)


@pytest.mark.timeout(900)
def test_no_kernel_reads_beyond_its_arrays(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp().parent / "bounds-checked-kernels"
    environment = os.environ | {"NUMBA_BOUNDSCHECK": "1", "EVENKEEL_CACHE_DIR": str(folder)}
    subprocess.run([sys.executable, "-m", __name__, "1000", "150"], env=environment, check=True)


if __name__ == "__main__":
    run(int(sys.argv[1]), int(sys.argv[2]))
