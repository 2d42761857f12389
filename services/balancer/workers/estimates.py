"""How long a partition will take: a model of its size, corrected by what the session's earlier ones took."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from evenkeel.partitioning.rounds import CHEAP_STRATEGY
from services.balancer.effects import PlanInput

_MAX_SESSIONS = 4096  # that are remembered
_DOUBT = 4.0  # by which a first estimate may be too high
_RELAX = 0.95  # a round that got the cheap search brings the full one this much nearer
_MOST = 1e6


class Size(NamedTuple):
    """What the time of a partition depends on.

    Attributes:
        ranks: How many ranks the session has.
        samples: Of all ranks.
        values: Samples times jagged fields.
        window: Batches of the round.
        strategy: That the session asks for.
    """

    ranks: int
    samples: int
    values: int
    window: int
    strategy: str

    @classmethod
    def of(cls, inputs: PlanInput) -> Size:
        """The size of a round."""
        samples = sum(len(part.costs) for part in inputs.parts)
        fields = inputs.parts[0].lengths.shape[1]
        return cls(len(inputs.nodes), samples, samples * fields, inputs.window, inputs.options.strategy)


@lru_cache(maxsize=4096)
def full_seconds(size: Size) -> float:
    """The search that was asked for, on the machine that the model was fitted on."""
    return _sum(full_features(size), _FULL.get(size.strategy, _FULL["minimal_move"]))


@lru_cache(maxsize=4096)
def cheap_seconds(size: Size) -> float:
    """The cheapest search, on the same machine."""
    return _sum(cheap_features(size), _CHEAP)


def full_features(size: Size) -> list[float]:
    """What the time of the search that was asked for is a sum of.

    Sorting and slicing go with the samples; exchanges are hard where a rank has few samples to exchange, and go with
    the ranks then. A window is partitioned as loaded, and again after its heavy samples have met, which is harder.
    """
    per_batch = size.samples / size.window
    few = min(1.0, _FEW_SAMPLES * size.ranks / max(1.0, per_batch))
    return [*cheap_features(size), size.window * (4.0 if size.window > 1 else 1.0) * size.ranks * few]


def cheap_features(size: Size) -> list[float]:
    """What the time of the cheapest search is a sum of."""
    attempts = size.window * (2.0 if size.window > 1 else 1.0)
    return [1.0, attempts, attempts * size.samples / size.window, float(size.values), float(size.ranks * size.window)]


def _sum(features: list[float], coefficients: tuple[float, ...]) -> float:
    return sum(feature * coefficient for feature, coefficient in zip(features, coefficients, strict=True))


_FEW_SAMPLES = 4.0  # of a rank in a batch, up to which exchanges are hard
# Seconds, near what `python -m benchmarks.estimates --fit` gives, rather above than below it.
_CHEAP = (7e-5, 9e-5, 1.8e-7, 8e-9, 6e-7)
_FULL = {
    "minimal_move": (*_CHEAP, 6e-5),
    "karmarkar_karp": (*_CHEAP, 1e-5),
    "lpt": (*_CHEAP, 1e-5),
}


@dataclass(slots=True)
class _Known:
    full: float = 1.0
    cheap: float = 1.0
    full_seen: bool = False
    cheap_seen: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """The search that a round gets.

    Attributes:
        seconds: That it is expected to take.
        is_cheap: The cheapest instead of the one that was asked for.
        full: Seconds that the one that was asked for is expected to take.
    """

    seconds: float
    is_cheap: bool
    full: float


class Estimator:
    """What partitions of each session took beside what the model says.

    Attributes:
        speed: Of this machine beside the one that the model was fitted on.
    """

    def __init__(self, speed: float = 1.0) -> None:
        self.speed = speed
        self._known: OrderedDict[Hashable, _Known] = OrderedDict()

    def choose(self, session: Hashable, size: Size, available: float) -> Choice | None:
        """The search for a round that has `available` seconds; None if even the cheapest takes longer.

        A first estimate is not trusted to refuse a round: the search is tried unless the estimate is far too high.
        """
        known = self._known.get(session) or _Known()
        full, cheap = self._full(known, size), self._cheap(known, size)
        if full <= available:
            return Choice(full, is_cheap=False, full=full)
        if not known.full_seen and full <= _DOUBT * available:
            return Choice(available, is_cheap=False, full=full)
        if cheap <= available * (1.0 if known.cheap_seen else _DOUBT):
            return Choice(min(cheap, available), is_cheap=True, full=full)
        return None

    def usual_seconds(self, size: Size, *, is_cheap: bool) -> float:
        """What a partition of this size takes on this machine, whatever others of its session took."""
        return self._base(cheap_seconds(size) if is_cheap else full_seconds(size))

    def learn(self, session: Hashable, size: Size, seconds: float, *, is_cheap: bool) -> None:
        """Takes into account what a partition took."""
        known = self._remember(session)
        if is_cheap:
            known.cheap = _follow(known.cheap if known.cheap_seen else 0.0, seconds / self._base(cheap_seconds(size)))
            known.cheap_seen = True
            if known.full_seen:
                known.full *= _RELAX
        else:
            known.full = _follow(known.full if known.full_seen else 0.0, seconds / self._base(full_seconds(size)))
            known.full_seen = True

    def overrun(self, session: Hashable, size: Size, seconds: float, *, is_cheap: bool) -> None:
        """Takes into account that a partition was given up after this time; each doubles the next estimate."""
        known = self._remember(session)
        if is_cheap:
            took = seconds / self._base(cheap_seconds(size))
            known.cheap, known.cheap_seen = min(_MOST, 2.0 * max(known.cheap, took)), True
        else:
            took = seconds / self._base(full_seconds(size))
            known.full, known.full_seen = min(_MOST, 2.0 * max(known.full, took)), True

    def refused(self, session: Hashable) -> None:
        """A round was too costly: after some of them the session is tried again."""
        known = self._remember(session)
        known.cheap *= _RELAX
        known.full *= _RELAX

    def _full(self, known: _Known, size: Size) -> float:
        return known.full * self._base(full_seconds(size))

    def _cheap(self, known: _Known, size: Size) -> float:
        return known.cheap * self._base(cheap_seconds(size))

    def _base(self, seconds: float) -> float:
        return seconds / self.speed

    def _remember(self, session: Hashable) -> _Known:
        known = self._known.setdefault(session, _Known())
        self._known.move_to_end(session)
        if len(self._known) > _MAX_SESSIONS:
            self._known.popitem(last=False)
        return known


def _follow(before: float, now: float) -> float:
    """Up at once, down slowly."""
    return max(now, 0.7 * before + 0.3 * now)


def describe_cheaper(size: Size, choice: Choice, available: float) -> str:
    """The `detail` of a plan that was made by the cheapest search."""
    window = ", each batch of the window by itself," if size.window > 1 else ""
    return (
        f"planned by {CHEAP_STRATEGY}{window} instead of {size.strategy}, "
        f"which would take about {choice.full:.2g} s of the {available:.2g} s that there were"
    )
