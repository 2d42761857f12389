"""Partitions: how near the bound, how much they move; how long they take, `benchmarks.balance_gap` says.

    python -m benchmarks.partitioning --json benchmarks/results/partitioning.json
    python -m benchmarks.partitioning --quick

Each cell of a grid is the mean of some draws: the largest load over the lower bound, and the share of the bytes that
change rank, of the library's search, of its Karmarkar-Karp and of longest first. Moves are free there, but for ties.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.harness.results import read_options, write
from evenkeel.partitioning import partition, warm_up

Lengths = NDArray[np.int64]
STRATEGIES = ("karmarkar_karp", "lpt", "minimal_move")
RANKS, SAMPLES = (8, 64, 256, 1024), (8, 32, 128, 512)
LONGEST = 4096
MOST_SEEDS, DRAWN = 20, 200_000  # draws of a cell: as many, or as give so many samples, at least 2


def _zipf(exponent: float) -> Callable[[np.random.Generator, int], Lengths]:
    values = np.arange(1, LONGEST + 1)
    share = values**-exponent
    return lambda rng, n: rng.choice(values, n, p=share / share.sum())


def _clipped(values: NDArray[np.float64]) -> Lengths:
    return np.clip(values, 1, LONGEST).astype(np.int64)


def _one_giant(rng: np.random.Generator, n: int) -> Lengths:
    values = rng.integers(1, 257, n)
    values[rng.integers(n)] = 4 * LONGEST
    return values


LENGTHS: dict[str, Callable[[np.random.Generator, int], Lengths]] = {
    "uniform": lambda rng, n: rng.integers(1, LONGEST + 1, n),
    "normal": lambda rng, n: _clipped(rng.normal(1024, 256, n)),
    "lognormal": lambda rng, n: _clipped(rng.lognormal(6, 1, n)),
    "zipf_1.2": _zipf(1.2),
    "zipf_1.5": _zipf(1.5),
    "zipf_1.2_heaped": lambda rng, n: np.minimum(rng.zipf(1.2, n), LONGEST),  # a sixth of the samples at the clip
    "weibull_0.5": lambda rng, n: _clipped(300 * rng.weibull(0.5, n)),
    "bimodal": lambda rng, n: _clipped(np.where(rng.random(n) < 0.1, rng.normal(3500, 200, n), rng.normal(100, 20, n))),
    "constant": lambda _, n: np.full(n, 777),
    "one_giant": _one_giant,
    "many_zeros": lambda rng, n: np.where(rng.random(n) < 0.8, 0, _clipped(rng.lognormal(6, 1, n))),
}
COSTS: dict[str, Callable[[Lengths], NDArray[Any]]] = {
    "L": lambda lengths: lengths,
    "L+L²/5120": lambda lengths: lengths + lengths**2 / 5120,
    "L²+1024L": lambda lengths: lengths**2 + 1024 * lengths,
    "L²": lambda lengths: lengths**2,
}


def measure_cell(ranks: int, samples: int, lengths: str, cost: str, most_seeds: int) -> dict[str, Any]:
    """One cell of the grid."""
    seeds = max(2, min(most_seeds, DRAWN // (ranks * samples)))
    homes = np.repeat(np.arange(ranks, dtype=np.int32), samples)
    over: dict[str, list[float]] = {strategy: [] for strategy in STRATEGIES}
    moved: dict[str, list[float]] = {strategy: [] for strategy in STRATEGIES}
    before = []
    for seed in range(seeds):
        sizes = LENGTHS[lengths](np.random.default_rng(seed), ranks * samples)
        costs = COSTS[cost](sizes)
        for strategy in STRATEGIES:
            result = partition(costs, homes, ranks, strategy=strategy, sizes=sizes)
            over[strategy].append(float(result.loads.max()) / (result.lower_bound or 1.0))
            moved[strategy].append(result.moved_size / max(1, int(sizes.sum())))
        before.append(result.home_imbalance)
    ours, best = np.array(over["minimal_move"]), np.minimum(over["karmarkar_karp"], over["lpt"])
    return {
        "ranks": ranks, "samples": samples, "lengths": lengths, "cost": cost, "seeds": seeds,
        "home_imbalance": statistics.mean(before),
        "over_bound": {strategy: statistics.mean(values) for strategy, values in over.items()},
        "moved_share": {strategy: statistics.mean(values) for strategy, values in moved.items()},
        "worst_over_best_other": float((ours / best).max()),
    }  # fmt: skip


def show(console: Console, grid: list[dict[str, Any]]) -> None:
    table = Table(title="Largest load over the lower bound, and shares moved; means over ranks, costs and draws")
    for column in ("samples", "lengths", "before", "KK", "LPT", "ours", "worst over best other", "moved", "by KK"):
        table.add_column(column, justify="left" if column == "lengths" else "right")
    for samples, lengths in dict.fromkeys((cell["samples"], cell["lengths"]) for cell in grid):
        group = [cell for cell in grid if (cell["samples"], cell["lengths"]) == (samples, lengths)]
        table.add_row(
            str(samples), lengths, f"{statistics.mean(cell['home_imbalance'] for cell in group):.2f}",
            *(f"{statistics.mean(cell['over_bound'][name] for cell in group):.4f}" for name in STRATEGIES),
            f"{max(cell['worst_over_best_other'] for cell in group):.4f}",
            *(f"{statistics.mean(cell['moved_share'][name] for cell in group):.1%}"
              for name in ("minimal_move", "karmarkar_karp")),
        )  # fmt: skip
    console.print(table)


def main() -> None:
    options = read_options(__doc__, quick="small shapes, two draws")
    quick, console = options.quick, Console(width=150)
    warm_up()
    cells = list(itertools.product(SAMPLES[: 1 if quick else 4], LENGTHS, RANKS[: 1 if quick else 4], COSTS))
    grid = [
        measure_cell(count, size, lengths, cost, 2 if quick else MOST_SEEDS)
        for size, lengths, count, cost in track(cells, "grid", console=console)
    ]
    show(console, grid)
    write(options.json, {"grid": grid})


if __name__ == "__main__":
    main()
