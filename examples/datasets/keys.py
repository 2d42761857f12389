"""Which items occur: keys of an embedding table, with a popularity that may drift."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from trainer_client.checks import check_number, check_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """Items of a catalogue, drawn with popularity ∝ place^-exponent; exponent 0 draws them uniformly.

    The places are spread over the whole table, so that popular keys are not neighbours. With `drift`, the places move
    on by that many items a batch: what was popular slowly ceases to be, as in real traffic.

    Attributes:
        count: Size of the catalogue; keys are 0 to count − 1.
        exponent: Of the power law; 0: uniform.
        drift: Places by which the popularity moves with each batch.
    """

    count: int
    exponent: float = 0.0
    drift: float = 0.0

    def __post_init__(self) -> None:
        check_whole(self, count=1)
        check_number("exponent", self.exponent, least=0)
        check_number("drift", self.drift, least=0)

    def draw(self, rng: np.random.Generator, size: int, batch: int = 0) -> NDArray[np.int64]:
        """(size,) keys of the given batch."""
        if self.exponent == 0:
            places = rng.integers(0, self.count, size)
        else:
            places = np.searchsorted(_cumulative(self.count, self.exponent), rng.random(size), side="right")
            places = np.minimum(places, self.count - 1)
        return self.at_places(places, batch)

    def at_places(self, places: NDArray[np.int64], batch: int = 0) -> NDArray[np.int64]:
        """The keys at places of the popularity list of a batch; 0 is the most popular."""
        moved = (places + math.floor(self.drift * batch)) % self.count
        keys: NDArray[np.int64] = moved * _stride(self.count) % self.count
        return keys


@lru_cache(maxsize=8)
def _cumulative(count: int, exponent: float) -> NDArray[np.float64]:
    weights = np.arange(1, count + 1, dtype=np.float64) ** -exponent
    cumulative: NDArray[np.float64] = np.cumsum(weights) / weights.sum()
    return cumulative


@lru_cache(maxsize=64)
def _stride(count: int) -> int:
    """A step near the golden section that visits every key once."""
    stride = max(1, round(count * 0.6180339887))
    while math.gcd(stride, count) != 1:
        stride += 1
    return stride
