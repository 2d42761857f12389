"""Instances of partitions, windows and slices at the ends of what they may be, and what must hold of every answer."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning import Partition, PartitionError, partition, plan_digest, slice_plan
from evenkeel.partitioning.ranges import MAX_SUM, MAX_TOTAL
from evenkeel.partitioning.windows import partition_window

Rng = np.random.Generator
STRATEGIES = ("minimal_move", "minimal_move", "karmarkar_karp", "lpt")
SEARCHED_THROUGH = 130  # assignments up to which an answer is held against all there are
ROUNDING = Fraction(1, 10**12)  # relative, by which fractions of memory may exceed a cap


def _one(rng: Rng, choices: Any) -> Any:
    return choices[int(rng.integers(len(choices)))]


def _shape(rng: Rng) -> tuple[int, int]:
    """Samples and ranks: mostly tiny, some ordinary, few that reach what only many ranks or samples reach."""
    kind = rng.random()
    if kind < 0.70:
        return int(rng.integers(0, 7)), int(rng.integers(1, 5))
    if kind < 0.96:
        return int(rng.integers(0, 30)), int(rng.integers(1, 12))
    if kind < 0.998:
        return int(rng.integers(0, 300)), int(rng.integers(1, 33))
    return int(rng.integers(0, 3000)), int(rng.integers(90, 140))


def amounts(rng: Rng, n: int) -> NDArray[Any]:
    """(n,) numbers, int64 or float64, whose sum is allowed."""
    kind = int(rng.integers(12))
    if kind == 0:
        return np.zeros(n, np.int64 if rng.random() < 0.5 else np.float64)
    if kind == 1:
        return np.full(n, rng.integers(1, 100))
    if kind == 2:
        return rng.integers(0, 4, n)
    if kind == 3:
        return rng.integers(0, 10**6, n)
    if kind == 4:  # as large as their sum allows
        most = (MAX_TOTAL - 1) // max(n, 1)
        return np.where(rng.random(n) < 0.7, most, rng.integers(0, most + 1, n)).astype(np.int64)
    if kind == 5:
        values = rng.lognormal(4, 2, n).astype(np.int64)
        return values**2
    if kind == 6:
        return rng.lognormal(4, 2, n)
    if kind == 7:  # over all of float64
        return np.minimum(10.0 ** rng.uniform(-323, 300, n), MAX_SUM / max(n, 1) / 2)
    if kind == 8:
        return np.full(n, 10.0 ** rng.uniform(-323, 298) / max(n, 1))
    if kind == 9:
        return np.where(rng.random(n) < 0.2, 0.0, 5e-324 * rng.integers(1, 9, n))
    if kind == 10:  # one outweighs all others
        fractions = rng.random(n)
        fractions[: min(n, 1)] = 10.0 ** rng.uniform(0, 290)
        return rng.permutation(fractions)
    return rng.integers(0, 1000, n) * 0.1


def _homes(rng: Rng, n: int, num_ranks: int) -> NDArray[np.int32]:
    kind = int(rng.integers(4))
    if kind == 0:
        return (np.arange(n) * num_ranks // max(n, 1)).astype(np.int32)
    if kind == 1:
        return np.full(n, rng.integers(num_ranks), np.int32)
    if kind == 2:
        few = rng.integers(0, num_ranks, 2)
        return np.sort(few[rng.integers(0, 2, n)]).astype(np.int32)
    return np.sort(rng.integers(0, num_ranks, n)).astype(np.int32)


def _speeds(rng: Rng, num_ranks: int) -> NDArray[np.float64]:
    kind = int(rng.integers(5))
    if kind == 0:
        return np.full(num_ranks, _one(rng, [1e-6, 0.1, 1.0, 1e6]))
    if kind == 1:
        return np.where(rng.random(num_ranks) < 0.5, 1e-6, 1e6)
    if kind == 2:
        return np.clip(10.0 ** rng.uniform(-6, 6, num_ranks), 1e-6, 1e6)
    if kind == 3:
        return np.where(rng.random(num_ranks) < 0.2, 0.1, 1.0)
    return rng.choice([0.5, 1.0, 1.0 + 1e-15, 3.0], num_ranks)


def _caps(rng: Rng, memory: NDArray[Any], num_ranks: int, homes: NDArray[np.int32]) -> NDArray[np.float64]:
    kind = int(rng.integers(5))
    held = np.zeros(num_ranks)
    np.add.at(held, rng.permutation(homes) if kind == 0 else rng.integers(0, num_ranks, memory.size), memory)
    if kind <= 1:  # exactly what some assignment needs
        return held
    if kind == 2:
        return np.full(num_ranks, float(held.max(initial=0.0)) * rng.uniform(0.5, 1.5))
    if kind == 3:
        return np.where(rng.random(num_ranks) < 0.5, np.inf, held)
    return np.where(rng.random(num_ranks) < 0.3, 0.0, 10.0 ** rng.uniform(-300, 300, num_ranks))


def options_of(rng: Rng, costs: NDArray[Any], homes: NDArray[np.int32], num_ranks: int) -> dict[str, Any]:
    """Each option given or not, at all scales."""
    n = costs.size
    given: dict[str, Any] = {"strategy": _one(rng, STRATEGIES), "counts": _one(rng, ["equal", "free"])}
    if rng.random() < 0.4:
        given["tolerance"] = _one(rng, [0.0, 1e-15, 1e-3, 0.05, 1.0])
    if rng.random() < 0.4:
        given["speeds"] = _speeds(rng, num_ranks)
    if rng.random() < 0.4:
        given["nodes"] = rng.integers(0, _one(rng, [1, 2, 3, num_ranks]), num_ranks) * _one(rng, [1, 10**6])
    if rng.random() < 0.4:
        given["sizes"] = amounts(rng, n)
    if rng.random() < 0.35:
        given["memory"] = amounts(rng, n)
        given["memory_caps"] = _caps(rng, given["memory"], num_ranks, homes)
    return given


def _allowed_counts(homes: NDArray[np.int32], num_ranks: int, counts: str) -> tuple[NDArray[np.int64], ...]:
    n, held = homes.size, np.bincount(homes, minlength=num_ranks)
    if counts == "free":
        return np.zeros_like(held), np.full_like(held, n)
    if held.max() - held.min() <= 1:
        return held, held
    return np.full_like(held, n // num_ranks), np.full_like(held, -(-n // num_ranks))


def _exact(values: NDArray[Any]) -> list[Fraction]:
    return [Fraction(value) for value in values.tolist()]


def _sums(values: list[Fraction], ranks: Any, num_ranks: int) -> list[Fraction]:
    sums = [Fraction(0)] * num_ranks
    for value, rank in zip(values, ranks, strict=True):
        sums[rank] += value
    return sums


def _within(used: list[Fraction], caps: NDArray[np.float64], allowance: Fraction) -> bool:
    return all(
        cap == math.inf or held <= Fraction(cap) * (1 + allowance)
        for held, cap in zip(used, caps.tolist(), strict=True)
    )


def check_answer(
    found: Partition, costs: NDArray[Any], homes: NDArray[np.int32], num_ranks: int, given: dict[str, Any]
) -> None:
    """What holds of every partition."""
    ranks = found.destinations
    assert ranks.dtype == np.int32
    assert ranks.shape == costs.shape
    assert not ranks.size or (ranks.min() >= 0 and ranks.max() < num_ranks)
    held = np.bincount(ranks, minlength=num_ranks)
    fewest, most = _allowed_counts(homes, num_ranks, given["counts"])
    assert (held >= fewest).all(), held
    assert (held <= most).all(), held
    for loads, places in ((found.loads, ranks), (found.home_loads, homes)):
        expected = np.zeros(num_ranks, costs.dtype)
        np.add.at(expected, places, costs)
        assert (loads == expected).all()
    speeds = np.asarray(given.get("speeds", np.ones(num_ranks)))
    largest = float((found.loads / speeds).max())
    assert np.isfinite(found.lower_bound)
    assert found.lower_bound <= largest * (1 + 1e-12) + 1e-323
    assert np.isfinite(found.imbalance)
    assert found.imbalance >= 1 - 1e-9 or largest < 1e-300
    moved = ranks != homes
    assert found.moved_samples == moved.sum()
    sizes = np.asarray(given.get("sizes", costs), np.float64)
    assert math.isclose(found.moved_size, math.fsum(sizes[moved].tolist()), rel_tol=1e-9, abs_tol=1e-320)
    if "memory" in given:
        used = _sums(_exact(given["memory"]), ranks, num_ranks)
        assert _within(used, given["memory_caps"], ROUNDING), "a memory cap is exceeded"


def _all_assignments(homes: NDArray[np.int32], num_ranks: int, counts: str) -> Any:
    fewest, most = _allowed_counts(homes, num_ranks, counts)
    for ranks in itertools.product(range(num_ranks), repeat=homes.size):
        held = np.bincount(np.array(ranks, np.int64), minlength=num_ranks)
        if (held >= fewest).all() and (held <= most).all():
            yield ranks


def check_partition(rng: Rng) -> str:
    """One instance, twice; small ones beside every assignment there is."""
    n, num_ranks = _shape(rng)
    costs, homes = amounts(rng, n), _homes(rng, n, num_ranks)
    given = options_of(rng, costs, homes, num_ranks)
    small = num_ranks**n <= SEARCHED_THROUGH and ("memory" in given or rng.random() < 0.25)
    try:
        found = partition(costs, homes, num_ranks, **given)
    except PartitionError as error:
        refusal = type(error).__name__
    else:
        refusal = ""
    if refusal:
        memory = _exact(given["memory"])
        # What the search takes for whole units: so close to a cap it may miss an assignment, but must not disprove it.
        unit = Fraction(0) if refusal == "ImpossiblePartitionError" else 2 * n * max(memory) / 2**58
        for ranks in _all_assignments(homes, num_ranks, given["counts"]) if small else ():
            used = [held + n * unit if held else held for held in _sums(memory, ranks, num_ranks)]
            assert not _within(used, given["memory_caps"], Fraction(0)), f"{refusal}, but {ranks} is within the caps"
        return refusal
    check_answer(found, costs, homes, num_ranks, given)
    again = partition(costs, homes, num_ranks, **given)
    assert (again.destinations == found.destinations).all(), "the same call gave another answer"
    if small and n:
        speeds = [Fraction(s) for s in np.asarray(given.get("speeds", np.ones(num_ranks)), float).tolist()]
        values = _exact(costs)
        best = min(
            max(load / speed for load, speed in zip(_sums(values, ranks, num_ranks), speeds, strict=True))
            for ranks in _all_assignments(homes, num_ranks, given["counts"])
        )
        assert Fraction(found.lower_bound) <= best * (1 + ROUNDING) + Fraction(1, 10**320), "the bound is none"
    return "partitioned"


def check_window(rng: Rng) -> str:
    """Several batches together: each keeps its number of samples, and the sum of their times does not rise."""
    num_steps, num_ranks = int(rng.integers(1, 5)), int(rng.integers(1, 9))
    n = int(rng.integers(0, 40))
    costs, homes = amounts(rng, n), _homes(rng, n, num_ranks)
    given = options_of(rng, costs, homes, num_ranks)
    steps = rng.integers(0, num_steps, n)
    try:
        found = partition_window(costs, homes, steps, num_ranks, num_steps, **given)
    except PartitionError as error:
        return type(error).__name__
    assert found.steps is not None
    assert (np.bincount(found.steps, minlength=num_steps) == np.bincount(steps, minlength=num_steps)).all()
    assert len(found.partitions) == num_steps
    for step, part in enumerate(found.partitions):
        own = found.steps == step
        cut = {key: value[own] if key in ("sizes", "memory") else value for key, value in given.items()}
        loaded = np.bincount(homes[steps == step], costs[steps == step], num_ranks)
        assert np.allclose(part.home_loads, loaded, rtol=1e-9, atol=0), "as the batch was loaded"
        at_home = np.zeros(num_ranks, costs.dtype)
        np.add.at(at_home, homes[own], costs[own])
        check_answer(replace(part, home_loads=at_home), costs[own], homes[own], num_ranks, cut)
        assert (found.destinations[own] == part.destinations).all()
    lengths = rng.integers(0, 2**31, (n, 2))
    at_home = np.bincount(homes, minlength=num_ranks)
    order = np.lexsort((steps, homes))
    ordered = partition_window(
        costs[order], homes[order], steps[order], num_ranks, num_steps,
        **{key: value[order] if key in ("sizes", "memory") else value for key, value in given.items()},
    )  # fmt: skip
    slices = slice_plan(ordered.destinations, at_home, lengths, ordered.steps, num_steps)
    assert sum(int(piece.source_counts.sum()) for rank in range(num_ranks) for piece in slices.batches_of(rank)) == n
    return "partitioned"


def check_slices(rng: Rng) -> str:
    """A random plan, cut into slices, beside plain sums over it."""
    num_ranks, num_fields = int(rng.integers(1, 9)), int(rng.integers(0, 4))
    counts = rng.integers(0, 7, num_ranks) * (rng.random(num_ranks) < 0.8)
    n = int(counts.sum())
    homes, ranks = np.repeat(np.arange(num_ranks), counts), rng.integers(0, num_ranks, n)
    dtype = _one(rng, [np.int64, np.int32, np.uint32, np.int16])
    info = np.iinfo(dtype)
    lengths = rng.integers(0, min(info.max, 2**55), (n, num_fields), endpoint=True).astype(dtype)
    slices = slice_plan(ranks, counts, lengths)
    for rank, piece in enumerate(slices):
        assert (piece.destinations == ranks[homes == rank]).all()
        mine = ranks == rank
        assert piece.sources.tolist() == sorted(set(homes[mine].tolist()))
        for source, count, totals in zip(piece.sources, piece.source_counts, piece.source_totals, strict=True):
            pair = mine & (homes == source)
            assert count == pair.sum()
            assert (totals == lengths[pair].astype(np.int64).sum(axis=0)).all()
    assert plan_digest(ranks, counts, lengths) == plan_digest(ranks.astype(np.int32), counts, lengths.astype(np.int64))
    return "cut"
