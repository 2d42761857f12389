"""How often the keys of a table are looked up, how many differ in a step, and what caches of them miss.

With `p_i` the popularity of key `i` and `n` lookups a step, a step touches key `i` with the chance
`q_i = 1 - (1 - p_i) ** n`. A cache works on the unique keys of a step, so rates are among unique keys.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import pairwise
from typing import Annotated, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from evenkeel.placement.fields import Checked, Length, Range, Share, check_fields, require

FloatArray: TypeAlias = npt.NDArray[np.float64]
IntArray: TypeAlias = npt.NDArray[np.int64]
BoolArray: TypeAlias = npt.NDArray[np.bool_]

DIST_TYPES = ("continuous", "roundrobin", "hash_roundrobin")
_MAX_BINS = 100_000
_MAX_HOT = 4096
_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Zipf(Checked):
    """Key `i` of `rows` keys is looked up with a probability proportional to `i ** -exponent`.

    Attributes:
        exponent: Zero is uniform; recommendation data is usually between 0.6 and 1.3.
    """

    kind: ClassVar[str] = "zipf"
    exponent: Annotated[float, Range(0, 10)] = 1.05


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
        check_fields(self)
        require(sum(self.lookups) >= 1e-9, "lookups", 0, "has no lookup at all", "observe at least one batch")


@dataclass(frozen=True, slots=True, kw_only=True)
class MissCurve:
    """A measured miss-ratio curve: what fraction of the unique keys of a step misses in a cache of a given size.

    What is known of single keys says how much more than its share the fullest rank of a row-wise table is asked for;
    where `row_quantiles` are empty nothing is.

    Attributes:
        cache_fractions: Cache sizes as fractions of the table's rows, ascending, in (0, 1].
        miss_rates: Miss rate at each size, among the unique keys of a step.
        unique_fraction: Unique keys of a step (all ranks) over its lookups.
        hot_keys: The most popular keys.
        hot_shares: Share of the lookups of each of them.
        row_quantiles: Parts of the rows, ascending, between two of which an equal share of the other lookups goes.
    """

    kind: ClassVar[str] = "miss_curve"
    cache_fractions: Annotated[tuple[Annotated[float, Range(0, 1, above=True)], ...], Length(1, _MAX_BINS)]
    miss_rates: Annotated[tuple[Share, ...], Length(1, _MAX_BINS)]
    unique_fraction: Annotated[float, Range(0, 1, above=True)]
    hot_keys: Annotated[tuple[Annotated[int, Range(-(2**63), 2**63 - 1)], ...], Length(0, _MAX_HOT)] = ()
    hot_shares: Annotated[tuple[Share, ...], Length(0, _MAX_HOT)] = ()
    row_quantiles: Annotated[tuple[Share, ...], Length(0, _MAX_HOT)] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        same = len(self.hot_keys) == len(self.hot_shares)
        require(same, "hot_shares", len(self.hot_shares), "has not as many shares as hot_keys", "give one each")
        hot = sum(self.hot_shares)
        require(hot <= 1 + _ROUNDING, "hot_shares", hot, "is more than all lookups", "give shares of all lookups")
        given = len(self.row_quantiles)
        enough = given > 1 or not (given or self.hot_keys)
        require(enough, "row_quantiles", given, "are too few", "give at least two; 0 and 1 where other rows are alike")
        for index, (last, part) in enumerate(pairwise(self.row_quantiles), start=1):
            require(last <= part, f"row_quantiles[{index}]", part, "does not ascend", "sort them")
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

    def touched(self, lookups: float) -> FloatArray:
        """The chance `q_i` that a step of independent `lookups` touches one key of each bin."""
        with np.errstate(divide="ignore"):
            chance: FloatArray = -np.expm1(lookups * np.log1p(-np.minimum(self.probability, 1 - 1e-16)))
        return chance

    def unique(self, lookups: float) -> float:
        """Expected number of different keys among independent `lookups`."""
        return float(self.keys @ self.touched(lookups))


def popularity(access: Access, rows: int, lookups: float = 0.0) -> Popularity:
    """Bins of equal popularity of the keys of a table with `rows` rows.

    Of a miss curve, by the Zipf law under which as many keys of a step of `lookups` differ.
    """
    if isinstance(access, Histogram):
        return _observed(access, rows)
    if isinstance(access, Zipf):
        return _zipf(access.exponent, rows)
    wanted = access.unique_fraction * lookups
    at = bisect(_EXPONENTS, -wanted, key=lambda e: -_zipf(e, rows).unique(lookups))
    return _zipf(_EXPONENTS[min(at, len(_EXPONENTS) - 1)], rows)


_EXPONENTS = tuple(step / 16 for step in range(49))


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


class Eviction(StrEnum):
    """Which row a full cache gives up."""

    LRU = "lru"
    LFU = "lfu"


@dataclass(frozen=True, slots=True)
class StepKeys:
    """What a step asks of one table, over all ranks.

    Attributes:
        lookups: Lookups of a step.
        unique: Expected number of different keys among them.
        cached: Cache sizes in rows, ascending, at which `miss_rate` is tabulated.
        miss_rate: Fraction of a step's unique keys that are not in a cache of that size.
    """

    lookups: float
    unique: float
    cached: FloatArray
    miss_rate: FloatArray

    def misses(self, cache_rows: FloatArray) -> FloatArray:
        """Miss rate among unique keys for caches of `cache_rows` rows (all ranks together)."""
        return np.clip(np.interp(cache_rows, self.cached, self.miss_rate, left=1.0), 0.0, 1.0)


def che_curve(keys: Popularity, lookups: float, points: int = 160) -> tuple[FloatArray, FloatArray]:
    """Cache sizes and LRU miss rates among unique keys of a step, by Che's approximation.

    A cache of `K` rows holds what was touched in the last `T` steps, where `T` solves
    `sum(1 - (1 - q_i) ** T) = K`; the step then hits `sum(q_i * (1 - (1 - q_i) ** T))` rows. Both sides are
    tabulated over `T`, which is what makes one table of a curve as cheap as one point.

    Source: Che, Tung and Wang 2002; Fricker, Robert and Roberts, arXiv 1202.3974.
    """
    touched = keys.touched(lookups)
    unique = float(keys.keys @ touched)
    with np.errstate(divide="ignore"):
        log_missed = lookups * np.log1p(-np.minimum(keys.probability, 1 - 1e-16))
        longest = -np.log(1e-9) / max(float(np.min(np.abs(log_missed))), 1e-200)
    steps = np.geomspace(1e-3, min(max(1.0, longest), 1e200), points)
    held, hits = np.empty(points), np.empty(points)
    at_once = max(1, _BLOCK // len(touched))
    with np.errstate(under="ignore", over="ignore"):
        for first in range(0, points, at_once):
            part = slice(first, first + at_once)
            present = -np.expm1(steps[part, None] * log_missed[None, :])
            held[part] = present @ keys.keys
            hits[part] = present @ (keys.keys * touched)
    return np.concatenate([[0.0], held]), np.concatenate([[1.0], np.clip(1 - hits / unique, 0.0, 1.0)])


def lfu_curve(keys: Popularity, lookups: float) -> tuple[FloatArray, FloatArray]:
    """Cache sizes and miss rates among unique keys when the cache holds the most popular keys."""
    touched = keys.keys * keys.touched(lookups)
    held = np.concatenate([[0.0], np.cumsum(keys.keys)])
    return held, np.clip(1 - np.concatenate([[0.0], np.cumsum(touched)]) / touched.sum(), 0.0, 1.0)


def shared_cache(tables: Sequence[StepKeys], rows: Sequence[int], slots: FloatArray) -> FloatArray:
    """Rows of each table in one LRU cache of all of them.

    Keys of all tables leave the cache after the same number of steps without a lookup. A table whose own cache of `C`
    rows misses `m(C)` keys a step has filled one after `integral of dC / m(C)` steps, since what misses comes in.

    Args:
        tables: What a step asks of each.
        rows: Rows of each.
        slots: Sizes of the cache, in rows.

    Returns:
        (tables, sizes) rows.

    Source: Denning and Schwartz 1972: the miss rate of a working set is the slope of its size over time.
    """
    steps = np.concatenate([[0.0], np.geomspace(1e-3, 1e9, _AGES)])
    held = np.empty((len(tables), len(steps)))
    for row, (keys, most) in enumerate(zip(tables, rows, strict=True)):
        missed = np.maximum(keys.unique * keys.miss_rate, _LEAST_LOOKUPS)
        ages = np.concatenate([[0.0], np.cumsum(2 * np.diff(keys.cached) / (missed[1:] + missed[:-1]))])
        beyond = np.maximum(steps - ages[-1], 0.0) * missed[-1]
        held[row] = np.minimum(np.interp(steps, ages, keys.cached) + beyond, most)
    total = held.sum(axis=0)
    return np.stack([np.interp(slots, total, own) for own in held])


_AGES = 400
_LEAST_LOOKUPS = 1e-9
_HEAD, _DRAWS = 512, 16
_BLOCK = 1 << 20


@lru_cache(maxsize=8192)
def step_keys(access: Access, rows: int, lookups: float, eviction: Eviction) -> StepKeys:
    """What a step of `lookups` lookups (all ranks) asks of a table of `rows` rows."""
    if lookups < _LEAST_LOOKUPS:
        return StepKeys(0.0, 0.0, np.array([0.0]), np.array([0.0]))
    if isinstance(access, MissCurve):
        sizes = np.concatenate([[0.0], np.array(access.cache_fractions) * rows])
        rates = np.concatenate([[1.0], np.array(access.miss_rates)])
        unique = min(access.unique_fraction * lookups, float(rows))
        return StepKeys(lookups, unique, sizes, np.minimum.accumulate(rates))
    keys = popularity(access, rows)
    held, missed = (che_curve if eviction is Eviction.LRU else lfu_curve)(keys, lookups)
    return StepKeys(lookups, keys.unique(lookups), held, missed)


@lru_cache(maxsize=8192)
def different_share(access: Access, rows: int, lookups: float, among: float) -> float:
    """Expected share of different keys among `among` lookups that follow each other in a step of `lookups`.

    A miss curve says how many keys of a whole step differ, and nothing of fewer lookups: those are taken to be of the
    Zipf law under which as many differ.
    """
    among = min(among, lookups)
    if among <= 1:
        return 1.0
    return popularity(access, rows, lookups).unique(among) / among


@lru_cache(maxsize=8192)
def fullest_rank(access: Access, rows: int, lookups: float, ranks: int, routing: str = "hash_roundrobin") -> float:
    """Lookups of the rank that gets most of a step, over the mean, where keys are spread over ranks.

    Key `i` of share `p_i` puts it all on one rank `r(i)`, and the keys that are not among the most popular ones add
    `o_r` to rank `r`: the fullest one gets `ranks * max_r(o_r + sum(p_i, r(i) = r))`. Where a measured curve names
    keys, `r(i)` is their owner under `routing`, and `o_r` as its quantiles of rows have it (`continuous`) or even (the
    others). Where only popularity is known, `r(i)` is by chance, as a hash makes it, `o_r` even, and what is returned
    the expectation: the mean over some draws. A curve of unknown keys is of the Zipf law under which as many differ.

    Only lookups are uneven: of rows that are read once for all their lookups a popular one is no more than another.
    """
    if ranks == 1 or lookups < _LEAST_LOOKUPS:
        return 1.0
    if isinstance(access, MissCurve) and access.row_quantiles:
        others = np.full(ranks, 1 / ranks)
        if routing == "continuous":
            ends = np.minimum(np.arange(ranks + 1) * -(-rows // ranks), rows) / rows
            others = np.diff(np.interp(ends, access.row_quantiles, np.linspace(0, 1, len(access.row_quantiles))))
        owners = owners_of(np.array(access.hot_keys, dtype=np.int64), rows, ranks, routing)
        hot = np.bincount(owners, access.hot_shares, ranks)
        return float(ranks * (hot + max(0.0, 1.0 - hot.sum()) * others).max())
    keys = popularity(access, rows, lookups)
    single = np.repeat(keys.probability, np.minimum(keys.keys, _HEAD).astype(np.int64))[:_HEAD]
    places = (np.random.default_rng(0).random((_DRAWS, len(single))) * ranks).astype(np.int64)
    fullest = [np.bincount(place, single).max(initial=0.0) for place in places]
    return float(ranks * np.mean(fullest) + max(0.0, 1.0 - float(single.sum())))


def owners_of(keys: IntArray, rows: int, ranks: int, routing: str) -> IntArray:
    """(keys,) the rank that owns each key; `trainer_client.embedding.routing` has the definition."""
    assert routing in DIST_TYPES, routing
    key, block, count = keys.view(np.uint64), np.uint64(-(-rows // ranks)), np.uint64(ranks)
    owner = (_fmix64(key) if routing == "hash_roundrobin" else key) % count
    if routing == "continuous":
        owner = np.where(key < block * count, key // block, owner)
    return owner.astype(np.int64)


def _fmix64(key: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """MurmurHash3's 64-bit finaliser."""
    for factor in (np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)):
        key = (key ^ (key >> np.uint64(33))) * factor
    return key ^ (key >> np.uint64(33))
