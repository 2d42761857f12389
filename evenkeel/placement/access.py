"""How often the keys of a table are looked up: a Zipf law, a histogram, or a measured miss-ratio curve."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Annotated, ClassVar

import numpy as np
import numpy.typing as npt

from evenkeel.placement.bounds import Length, Range, Share, check_bounds
from evenkeel.placement.invalid_input import require

FloatArray = npt.NDArray[np.float64]

_MAX_BINS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Zipf:
    """Key `i` of `rows` keys is looked up with a probability proportional to `i ** -exponent`.

    Attributes:
        exponent: Zero is uniform; recommendation data is usually between 0.6 and 1.3.
    """

    kind: ClassVar[str] = "zipf"
    exponent: Annotated[float, Range(0, 10)] = 1.05

    def __post_init__(self) -> None:
        check_bounds(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Observed frequencies: bin `b` holds `keys[b]` keys that were looked up `lookups[b]` times together.

    Keys of the table that are in no bin count as never looked up.

    Attributes:
        keys: Number of distinct keys of each bin.
        lookups: Number of lookups of all keys of each bin together.
    """

    kind: ClassVar[str] = "histogram"
    keys: Annotated[tuple[Annotated[float, Range(1e-9, 1e18)], ...], Length(1, _MAX_BINS)]
    lookups: Annotated[tuple[Annotated[float, Range(0, 1e18)], ...], Length(1, _MAX_BINS)]

    def __post_init__(self) -> None:
        same = len(self.keys) == len(self.lookups)
        require(same, "lookups", len(self.lookups), f"has not the {len(self.keys)} bins of keys", "give one per bin")
        check_bounds(self)
        require(sum(self.lookups) >= 1e-9, "lookups", 0, "has no lookup at all", "observe at least one batch")


@dataclass(frozen=True, slots=True, kw_only=True)
class MissCurve:
    """A measured miss-ratio curve: what fraction of the unique keys of a step misses in a cache of a given size.

    Attributes:
        cache_fractions: Cache sizes as fractions of the table's rows, ascending, in (0, 1].
        miss_rates: Miss rate at each size, among the unique keys of a step.
        unique_fraction: Unique keys of a step (all ranks) over its lookups.
    """

    kind: ClassVar[str] = "miss_curve"
    cache_fractions: Annotated[tuple[Annotated[float, Range(0, 1, above=True)], ...], Length(1, _MAX_BINS)]
    miss_rates: Annotated[tuple[Share, ...], Length(1, _MAX_BINS)]
    unique_fraction: Annotated[float, Range(0, 1, above=True)]

    def __post_init__(self) -> None:
        check_bounds(self)
        same = len(self.cache_fractions) == len(self.miss_rates)
        require(same, "miss_rates", len(self.miss_rates), "has not as many points as cache_fractions", "give one each")
        for index, (last, fraction) in enumerate(pairwise(self.cache_fractions), start=1):
            require(last < fraction, f"cache_fractions[{index}]", fraction, "does not ascend", "sort the sizes")


Access = Zipf | Histogram | MissCurve


@dataclass(frozen=True, slots=True)
class Popularity:
    """Keys in bins of equal popularity, most popular first.

    Attributes:
        keys: Number of keys of each bin.
        probability: Chance that one lookup is for one given key of the bin. `sum(keys * probability)` is one.
    """

    keys: FloatArray
    probability: FloatArray


def popularity(access: Zipf | Histogram, rows: int) -> Popularity:
    """Bins of equal popularity of the keys of a table with `rows` rows."""
    return _zipf(access.exponent, rows) if isinstance(access, Zipf) else _observed(access, rows)


def power_law(exponent: float, rows: int) -> Histogram:
    """Keys that are the integer parts of a continuous power law on [1, rows + 1], as generators of load draw them.

    The most popular keys are a little less popular than under a Zipf law of the same exponent.
    """
    head = np.arange(1, min(rows, 64) + 1, dtype=np.float64)
    edges = np.unique(np.round(np.geomspace(len(head) + 1, rows + 1, 400)))
    low, high = np.concatenate([head, edges[:-1]]), np.concatenate([head + 1, edges[1:]])
    mass = np.log(high / low) if exponent == 1 else (low ** (1 - exponent) - high ** (1 - exponent)) / (exponent - 1)
    return Histogram(keys=tuple((high - low).tolist()), lookups=tuple(mass.tolist()))


@lru_cache(maxsize=4096)
def _zipf(exponent: float, rows: int, exact: int = 64, per_e: int = 16) -> Popularity:
    """The first ranks one by one, then log-spaced bins, each with the mean probability of its ranks."""
    head = np.arange(1, min(rows, exact) + 1, dtype=np.float64)
    keys, weight = np.ones_like(head), head**-exponent
    if rows > exact:
        bins = max(1, math.ceil(per_e * math.log(rows / exact)))
        edges = np.unique(np.round(np.geomspace(exact, rows, bins + 1)))
        low, high = edges[:-1] + 0.5, edges[1:] + 0.5
        if abs(exponent - 1) < 1e-9:
            mass = np.log(high / low)
        else:
            mass = (high ** (1 - exponent) - low ** (1 - exponent)) / (1 - exponent)
        keys = np.concatenate([keys, high - low])
        weight = np.concatenate([weight, mass / (high - low)])
    return Popularity(keys, weight / float(keys @ weight))


@lru_cache(maxsize=4096)
def _observed(access: Histogram, rows: int) -> Popularity:
    """Bins sorted by lookups a key, cut off at the rows of the table (the rarest keys are dropped)."""
    keys, lookups = np.array(access.keys, dtype=np.float64), np.array(access.lookups, dtype=np.float64)
    order = np.argsort(-lookups / keys, kind="stable")
    keys, lookups = keys[order], lookups[order]
    room = np.clip(rows - (np.cumsum(keys) - keys), 0, keys)
    seen = (room > 0) & (lookups > 0)
    keys, lookups = room[seen], (lookups * room / keys)[seen]
    return Popularity(keys, lookups / lookups.sum() / keys)
