"""Times of the partitioning benchmark: whole calls, and the differencing alone beside the published C++."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.partitioning_draws import COSTS, LENGTHS, as_problem
from evenkeel.partitioning import partition
from evenkeel.partitioning.exchange import exchange_from
from evenkeel.partitioning.karmarkar_karp import difference
from evenkeel.partitioning.lpt import at_home
from evenkeel.partitioning.problem import Problem, ascending_order

STRATEGIES = ("karmarkar_karp", "lpt", "minimal_move")
# Milliseconds of a C++ Karmarkar-Karp with equal counts on a machine of the same kind, published with its sources.
CPP_MS = {(8, 128): 0.17, (64, 128): 1.7, (64, 512): 7.2, (256, 256): 15.0, (1024, 256): 64.0}


def plain_search_suffices(problem: Problem) -> bool:
    """Whether the first stage of `minimal_move` ends with every rank within its limit."""
    return exchange_from(problem, at_home(problem))[1] <= 0


def median_ms(call: Callable[[], object], repeats: int) -> float:
    """Median milliseconds of a call."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def _difference(costs: NDArray[np.int64], ranks: int) -> None:
    difference(costs, ascending_order(costs), ranks, True)


def measure_times(shapes: list[tuple[int, int]], repeats: int, seeds: int) -> list[dict[str, Any]]:
    """Median milliseconds of a whole call of `partition`, arguments checked and sets matched to ranks.

    Of several draws the median, also by whether the plain search sufficed; and the differencing alone with its sort,
    which is what the published times are of.
    """
    entries = []
    for ranks, samples in shapes:
        homes = np.repeat(np.arange(ranks, dtype=np.int32), samples)
        for lengths in ("lognormal", "zipf_1.2"):
            times: dict[str, list[float]] = {strategy: [] for strategy in (*STRATEGIES, "karmarkar_karp_search")}
            ratios: dict[bool, list[float]] = {True: [], False: []}
            for seed in range(seeds):
                sizes = LENGTHS[lengths](np.random.default_rng(seed), ranks * samples)
                costs = COSTS["L²+1024L"](sizes)
                for strategy in STRATEGIES:
                    call = partial(partition, costs, homes, ranks, strategy=strategy, sizes=sizes)
                    times[strategy].append(median_ms(call, repeats))
                times["karmarkar_karp_search"].append(median_ms(partial(_difference, costs, ranks), repeats))
                plain = plain_search_suffices(as_problem(costs, homes, ranks, sizes))
                ratios[plain].append(times["minimal_move"][-1] / times["karmarkar_karp"][-1])
            entry: dict[str, Any] = {"ranks": ranks, "samples": samples, "lengths": lengths, "seeds": seeds}
            entry |= {name: statistics.median(values) for name, values in times.items()}
            entry["plain_suffices"] = len(ratios[True])
            entry["over_karmarkar_karp_plain"] = statistics.median(ratios[True]) if ratios[True] else None
            entry["over_karmarkar_karp_searched"] = statistics.median(ratios[False]) if ratios[False] else None
            entry["published_cpp"] = CPP_MS.get((ranks, samples))
            entries.append(entry)
    return entries
