"""What costs fitted to the clock gain over a guess, by replay: real plans and real fits, made times.

    python -m benchmarks.learned_costs --json benchmarks/results/learned_costs.json

A rank's step takes a law's time, with noise, and in one of a hundred steps 1.5 to 5 times that. The laws are none that
a fit could find exactly: tokens at a power of 1.7, attention over blocks of 128 positions, tokens with a share for each
sample. Every 20 steps all ranks' latest 200 steps are fitted by samples, tokens and pairs, as a `LearnedCost` is. With
each law and kind of lengths the plans of 8 ranks with 32 samples each follow a guess (tokens, or pairs alone), the fit
that began from it, and the law itself; told is by how much the slowest rank's time, without noise, exceeds the mean,
over the steps behind the first 60. With `slow`, one rank takes twice as long for all it does, while plans take it for
as fast as the others: what the fit makes of its times is what matters here, so its own time is told without that.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from evenkeel.partitioning import partition
from trainer_client.balancing.costs.fits import FitOptions, fit_in_force, fit_ranks

Numbers = NDArray[np.float64]

RANKS, SAMPLES, BEFORE = 8, 32, 60
FIXED = 5.0  # milliseconds of a step
LAWS: dict[str, Callable[[Numbers], Numbers]] = {
    "power 1.7": lambda n: 4e-6 * n**1.7,
    "blocks of 128": lambda n: 5e-4 * n + 8e-7 * (np.ceil(n / 128) * 128) ** 2,
    "samples and tokens": lambda n: 0.1 + 1.5e-3 * n,
}
GUESSES: dict[str, Callable[[Numbers], Numbers]] = {"tokens": lambda n: n, "pairs": lambda n: n * (n + 1) / 2}
LENGTHS: dict[str, Callable[[np.random.Generator, int], Numbers]] = {
    "zipf": lambda rng, count: np.minimum(rng.zipf(1.2, count), 4096).astype(np.float64),
    "lognormal": lambda rng, count: np.clip(np.rint(rng.lognormal(6.0, 0.8, count)), 1, 4096),
}


def terms(lengths: Numbers) -> Numbers:
    """(n, 3) samples, tokens and pairs."""
    return np.column_stack([np.ones_like(lengths), lengths, lengths * (lengths + 1) / 2])


def weighed(coefficients: Numbers, lengths: Numbers) -> Numbers:
    """(n,) milliseconds by a fit."""
    return terms(lengths) @ coefficients


def excess(law: str, guess: str, drawn: str, way: str, steps: int, noise: float, slow: bool, seed: int) -> float:
    """Slowest rank over the mean, minus one, on average over the steps."""
    rng, options = np.random.default_rng(seed), FitOptions()
    homes = np.repeat(np.arange(RANKS, dtype=np.int32), SAMPLES)
    seen: list[deque[Numbers]] = [deque(maxlen=options.window) for _ in range(RANKS)]
    cost, used = LAWS[law] if way == "law" else GUESSES[guess], None
    found = []
    for step in range(steps):
        lengths = LENGTHS[drawn](rng, RANKS * SAMPLES)
        ranks = partition(cost(lengths), homes, RANKS, counts="free").destinations
        clock = FIXED + np.bincount(ranks, weights=LAWS[law](lengths), minlength=RANKS)
        sums = np.stack([np.bincount(ranks, weights=column, minlength=RANKS) for column in terms(lengths).T], axis=1)
        taken = clock * rng.lognormal(0, noise, RANKS)
        taken = np.where(rng.random(RANKS) < 0.01, taken * rng.uniform(1.5, 5, RANKS), taken)
        if slow:
            taken[0] *= 2
        for rank in range(RANKS):
            seen[rank].append(np.append(sums[rank], taken[rank]))
        if step >= BEFORE:
            found.append(float(clock.max() / clock.mean() - 1))
        if way == "fit" and (step + 1) % options.every == 0:
            fit = fit_ranks([np.array(table) for table in seen])
            if fit is not None:
                used = fit_in_force(fit, used, options)
                cost = GUESSES[guess] if used is None else partial(weighed, used.coefficients)
    return statistics.fmean(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", type=Path, help="where the result goes")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    console, table = Console(width=110), Table(title="The slowest rank over the mean")
    for column in ("law", "lengths", "noise", "slow", "guess", "by the guess", "fitted", "by the law"):
        table.add_column(column)
    for law in LAWS:
        for drawn in LENGTHS:
            for noise, slow in ((0.02, False), (0.04, False), (0.02, True)):
                for guess in GUESSES:
                    ways = {
                        way: excess(law, guess, drawn, way, options.steps, noise, slow, seed=1)
                        for way in ("guess", "fit", "law")
                    }
                    rows.append({"law": law, "lengths": drawn, "noise": noise, "slow": slow, "guess": guess, **ways})
                    table.add_row(
                        law,
                        drawn,
                        f"{noise:.0%}",
                        "yes" if slow else "",
                        guess,
                        *(f"{one:.2%}" for one in ways.values()),
                    )
    console.print(table)
    if options.json is not None:
        result = {"command": " ".join(["python -m benchmarks.learned_costs", *sys.argv[1:]]),
                  "machine": platform.machine(), "ranks": RANKS, "samples": SAMPLES, "steps": options.steps,
                  "rows": rows}  # fmt: skip
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
