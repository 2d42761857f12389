"""Distributions of sequence lengths, in tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from trainer_client.checks import check_number, check_whole


class Lengths(Protocol):
    """A distribution of whole numbers with a largest value."""

    @property
    def maximum(self) -> int:
        """No drawn length is larger."""
        ...

    def draw(self, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        """(count,) lengths."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class UniformLengths:
    """Every length from `minimum` to `maximum`, both included, is equally likely."""

    minimum: int = 1
    maximum: int = 4096

    def __post_init__(self) -> None:
        _check_range(self)

    def draw(self, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        """(count,) lengths."""
        return rng.integers(self.minimum, self.maximum + 1, count)


@dataclass(frozen=True, slots=True, kw_only=True)
class NormalLengths:
    """Normal with `mean` and `deviation` tokens, rounded and clipped to [minimum, maximum]."""

    mean: float = 1024.0
    deviation: float = 256.0
    minimum: int = 1
    maximum: int = 4096

    def __post_init__(self) -> None:
        _check_range(self)
        check_number("mean", self.mean, above=0)
        check_number("deviation", self.deviation, above=0)

    def draw(self, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        """(count,) lengths."""
        return _clip(rng.normal(self.mean, self.deviation, count), self.minimum, self.maximum)


@dataclass(frozen=True, slots=True, kw_only=True)
class ZipfLengths:
    """P(length = k) ∝ k^-exponent for k = 1, 2, …, clipped to [minimum, maximum]; heavy tails pile up at the cap."""

    exponent: float = 1.2
    minimum: int = 1
    maximum: int = 4096

    def __post_init__(self) -> None:
        _check_range(self)
        check_number("exponent", self.exponent, above=1)

    def draw(self, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        """(count,) lengths."""
        return np.clip(rng.zipf(self.exponent, count), self.minimum, self.maximum)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogNormalLengths:
    """Log-normal with mean `mean` tokens; `sigma` is the deviation of the logarithm. Clipped to [minimum, maximum]."""

    mean: float = 600.0
    sigma: float = 1.0
    minimum: int = 1
    maximum: int = 4096

    def __post_init__(self) -> None:
        _check_range(self)
        check_number("mean", self.mean, above=0)
        check_number("sigma", self.sigma, above=0)

    def draw(self, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        """(count,) lengths."""
        location = math.log(self.mean) - self.sigma**2 / 2
        return _clip(rng.lognormal(location, self.sigma, count), self.minimum, self.maximum)


DISTRIBUTIONS = ("equal", "uniform", "normal", "zipf", "lognormal")


def lengths_named(
    name: str, *, maximum: int = 4096, mean: float | None = None, exponent: float = 1.2, sigma: float = 1.0
) -> Lengths:
    """A distribution by the name that a flag gives it.

    Args:
        name: `equal`, `uniform`, `normal`, `zipf` or `lognormal`, in any case.
        maximum: Longest sequence, in tokens.
        mean: All lengths of `equal`; mean of `normal` (default maximum / 2, deviation a quarter of it) and `lognormal`;
            600 by default but for `normal`.
        exponent: Of `zipf`.
        sigma: Of `lognormal`.

    Raises:
        ValueError: If there is none of that name, or a parameter is out of range.
    """
    match name.lower():
        case "equal":
            length = round(mean) if mean is not None else 600
            return UniformLengths(minimum=length, maximum=length)
        case "uniform":
            return UniformLengths(maximum=maximum)
        case "normal":
            center = mean if mean is not None else maximum / 2
            return NormalLengths(mean=center, deviation=center / 4, maximum=maximum)
        case "zipf":
            return ZipfLengths(exponent=exponent, maximum=maximum)
        case "lognormal":
            return LogNormalLengths(mean=mean if mean is not None else 600.0, sigma=sigma, maximum=maximum)
    raise ValueError(f"the distribution of lengths is {name!r}; use one of {', '.join(DISTRIBUTIONS)}")


def _clip(values: NDArray[np.float64], minimum: int, maximum: int) -> NDArray[np.int64]:
    clipped: NDArray[np.int64] = np.clip(np.rint(values), minimum, maximum).astype(np.int64)
    return clipped


def _check_range(lengths: UniformLengths | NormalLengths | ZipfLengths | LogNormalLengths) -> None:
    check_whole(lengths, minimum=0, maximum=0)
    if lengths.minimum > lengths.maximum:
        raise ValueError(f"minimum is {lengths.minimum} and maximum is {lengths.maximum}; use a higher maximum")
