"""What the partitioning benchmark draws: lengths, costs of lengths, and problems made of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.problem import Problem, make_problem

Lengths = NDArray[np.int64]
LONGEST = 4096


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


def as_problem(costs: NDArray[Any], homes: NDArray[np.int32], ranks: int, sizes: Lengths) -> Problem:
    return make_problem(
        costs, homes, ranks, sizes=sizes, counts="equal", tolerance=1e-3, move_price=0.01,
        speeds=None, nodes=None,
    )  # fmt: skip
