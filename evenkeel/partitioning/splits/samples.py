"""What may be split: samples, what their positions cost and where they may be cut, and what splitting takes."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evenkeel.partitioning.compile import step
from evenkeel.partitioning.problem import SPLIT_ABOVE, SPLIT_PRICE

Numbers = NDArray[np.float64]
MOST = 32  # samples of a rank's batch that it offers, the heaviest
SHARE = 1 / 16  # of the batch's load on the rank, the least that such a sample costs
MAX_POSITIONS = 1 << 40
STEP_SECONDS = 0.0065
"""What a step of 8 layers took more on two H200 because a sample was split in it, beside the exchange."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitOptions:
    """When samples are split over ranks.

    A sample is split only where no assignment of whole samples comes near an even division of the batch, or where it
    fits no rank's memory cap; and only where that takes less time, the exchange of keys and values included.

    Attributes:
        above: By how much of an even division the lower bound of whole samples must exceed it, 0 to 1000.
        within: What it takes to send the keys and values of one position to one rank of the same node, and to get their
            gradients back, in units of cost: their bytes, over the rate of the exchange, times the cost that a rank
            computes in a second.
        between: The same to another node, where they go once: to each of its ranks that see them an equal share, which
            it passes on to the others at the price inside a node.
        fixed: What a step takes more because samples are split in it, beside all that, in units of cost: launches,
            smaller kernels, ranks that wait for each other in each layer.
    """

    above: float = 0.05
    within: float = 0.0
    between: float = 0.0
    fixed: float = 0.0

    def __post_init__(self) -> None:
        for name, allowed, unit in (
            ("above", SPLIT_ABOVE, "a share of an even division"),
            ("within", SPLIT_PRICE, "units of cost"),
            ("between", SPLIT_PRICE, "units of cost"),
            ("fixed", SPLIT_PRICE, "units of cost"),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not allowed.holds(value):
                raise ValueError(f"split.{name} is {value!r}; use {unit}, {allowed}")

    @classmethod
    def at_rates(
        cls,
        *,
        position_bytes: float,
        within: float,
        between: float,
        cost_per_second: float,
        step_seconds: float = STEP_SECONDS,
        above: float = 0.05,
    ) -> SplitOptions:
        """Prices of the exchange from what it sends and how fast.

        Args:
            position_bytes: Bytes of a position's keys and values in all layers, and of their gradients: with L layers
                and H heads of width D, 4 * L * H * D numbers.
            within: Bytes per second of a rank, to ranks of the same node.
            between: The same to other nodes, by its own network adapter.
            cost_per_second: Units of cost that a rank computes in a second; with costs in FLOPs, FLOP per second.
            step_seconds: What a step takes more because samples are split in it, beside the exchange.
            above: See the attributes.

        Raises:
            ValueError: If a number is out of range.
        """
        for name, value in (("within", within), ("between", between)):
            if not value > 0:
                raise ValueError(f"{name} is {value!r}; use bytes per second, above 0")
        if not step_seconds >= 0:
            raise ValueError(f"step_seconds is {step_seconds!r}; use seconds, 0 or more")
        worth = float(position_bytes) * float(cost_per_second)
        fixed = float(step_seconds) * float(cost_per_second)
        return cls(above=above, within=worth / within, between=worth / between, fixed=fixed)


def cost_before(span: Any, position: Any) -> Any:
    """What the positions before one cost; `span` has the numbers of a sample, or arrays of them, as `SpanCosts` has."""
    history = span.positions - span.candidates
    in_context = np.minimum(position, span.context)
    last = np.minimum(np.maximum(position, span.context), history)  # of the history, the positions from context to last
    seen = in_context * history + (last * (last + 1) - span.context * (span.context + 1)) / 2
    seen = seen + np.maximum(position - history, 0.0) * (history + 1)
    targets = np.maximum(position - (span.positions - span.targets), 0.0)
    return span.per_position * position + span.per_pair * seen + span.per_target * targets


step_before = step(cost_before)  # here, so that kernels are compiled again when it changes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SpanCosts:
    """What any positions of each sample cost.

    A sample of s positions has c contextual ones, then its history, then k candidates. A position of the history sees
    itself and all before it, a contextual one the whole context and history, a candidate these and itself:

        seen(p) = s - k if p < c else p + 1 if p < s - k else s - k + 1
        cost(p) = per_position + per_pair * seen(p), and per_target more for the last `targets` positions

    The sample costs the sum over its positions, and `fixed`, which does not depend on them and goes with the last.

    Attributes:
        positions: (n,) s, whole numbers.
        context: (n,) c.
        candidates: (n,) k.
        per_position: (n,) cost of a position.
        per_pair: (n,) cost of a query that sees a key.
        targets: (n,) positions at the end that cost more, such as those that an output layer is computed for.
        per_target: (n,) what they cost more.
        fixed: (n,) cost of the sample beside its positions.
        head: (n,) positions at the beginning that stay together, at least the contextual ones.
        granule: (n,) positions behind the head that stay together, as the tokens of an item do.
    """

    positions: Numbers
    context: Numbers
    candidates: Numbers
    per_position: Numbers
    per_pair: Numbers
    targets: Numbers
    per_target: Numbers
    fixed: Numbers
    head: Numbers
    granule: Numbers

    @classmethod
    def of(
        cls,
        positions: ArrayLike,
        *,
        context: ArrayLike = 0,
        candidates: ArrayLike = 0,
        per_position: ArrayLike = 0,
        per_pair: ArrayLike = 0,
        targets: ArrayLike = 0,
        per_target: ArrayLike = 0,
        fixed: ArrayLike = 0,
        head: ArrayLike = 0,
        granule: ArrayLike = 1,
    ) -> SpanCosts:
        """Of numbers for each sample, or one number for all; see the attributes."""
        sizes = np.asarray(positions, np.float64)
        first = np.maximum(head, context)
        given = (context, candidates, per_position, per_pair, targets, per_target, fixed, first, granule)
        names = [field.name for field in fields(cls)][1:]
        arrays = [np.broadcast_to(np.asarray(value, np.float64), sizes.shape) for value in given]
        return cls(positions=sizes, **dict(zip(names, arrays, strict=True)))

    def __len__(self) -> int:
        return self.positions.size

    def take(self, samples: ArrayLike) -> SpanCosts:
        """Those of some samples, in this order."""
        chosen = np.asarray(samples)
        return SpanCosts(**{field.name: getattr(self, field.name)[chosen] for field in fields(self)})

    def before(self, position: ArrayLike) -> Numbers:
        """(n,) cost of the positions before a position of each sample, the end for all; without `fixed`."""
        cost: Numbers = cost_before(self, np.asarray(position, np.float64))
        return cost

    def of_spans(self, begin: ArrayLike, end: ArrayLike) -> Numbers:
        """(n,) cost of the positions from `begin` to before `end`; of the last span with `fixed`."""
        fixed = np.where(np.asarray(end) >= self.positions, self.fixed, 0.0)
        return self.before(end) - self.before(begin) + fixed

    @property
    def whole(self) -> Numbers:
        """(n,) cost of the samples."""
        return self.before(self.positions) + self.fixed

    @property
    def first_cut(self) -> Numbers:
        """(n,) the first position before which a sample may be cut, a granule behind its head."""
        return self.head + self.granule

    @property
    def num_cuts(self) -> NDArray[np.int64]:
        """(n,) places where a sample may be cut, a granule apart; candidates and targets stay together."""
        tail = np.maximum(np.maximum(self.candidates, self.targets), 1)
        cuts = np.floor((self.positions - tail - self.head) / self.granule)
        return np.maximum(cuts, 0).astype(np.int64)


_SPANS = tuple(field.name for field in fields(SpanCosts))
_WHOLE = ("positions", "context", "candidates", "targets", "head", "granule")
WIDTH = 2 + len(_SPANS)
"""Numbers of a sample."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Divisible:
    """Samples that may be split.

    Attributes:
        samples: (m,) int64, which; ascending.
        first_items: (m,) float64, the position of each one's item 0: behind the contextual positions, unless these are
            items too.
        spans: What their positions cost.
    """

    samples: NDArray[np.int64]
    first_items: NDArray[np.float64]
    spans: SpanCosts

    def __len__(self) -> int:
        return self.samples.size

    @property
    def table(self) -> NDArray[np.float64]:
        """(m, WIDTH) all of it as numbers, which `of_table` reads."""
        columns = (self.samples.astype(np.float64), self.first_items, *(getattr(self.spans, name) for name in _SPANS))
        return np.ascontiguousarray(np.stack(columns, axis=1), np.float64)

    @classmethod
    def of_table(cls, table: NDArray[np.float64]) -> Divisible:
        """Reads what `table` gave."""
        samples, first_items, *columns = np.ascontiguousarray(table.T)
        spans = SpanCosts(**dict(zip(_SPANS, columns, strict=True)))
        return cls(samples=samples.astype(np.int64), first_items=first_items, spans=spans)

    def take(self, which: NDArray[np.int64] | NDArray[np.bool_]) -> Divisible:
        """Some of them, in their order."""
        return Divisible(samples=self.samples[which], first_items=self.first_items[which], spans=self.spans.take(which))


def check_table(table: NDArray[np.float64], costs: NDArray[np.int64] | NDArray[np.float64]) -> str:
    """What is wrong with a rank's table of samples that may be split: place and reason; empty if nothing is."""
    if not len(table):
        return ""
    bad = np.flatnonzero(~((table >= 0) & (table <= 1e300)).all(axis=1))  # NaN is neither
    if bad.size:
        return f"[{bad[0]}] has numbers that are not finite and at least 0"
    if not (np.diff(table[:, 0], prepend=-1) > 0).all() or table[-1, 0] >= len(costs) or (table[:, 0] % 1).any():
        return f" names samples that are not ascending numbers from 0 to {len(costs) - 1}"
    divisible = Divisible.of_table(table)
    spans = divisible.spans
    for name in _WHOLE:
        values = getattr(spans, name)
        bad = np.flatnonzero((values % 1 != 0) | (values > MAX_POSITIONS) | (values < (name == "granule")))
        if bad.size:
            return f"[{bad[0]}] has {name} {values[bad[0]]:g}, not a whole number up to 2^40"
    fits = (spans.context + spans.candidates <= spans.positions) & (spans.head >= spans.context)
    fits &= (spans.targets <= spans.positions) & ((spans.head - divisible.first_items) % spans.granule == 0)
    fits &= divisible.first_items <= spans.head
    if not fits.all():
        return f"[{int(fits.argmin())}] has context, candidates, targets or head that do not fit its positions"
    agrees = np.isclose(spans.whole, costs[divisible.samples].astype(np.float64), rtol=1e-6)
    if not agrees.all():
        at = int(agrees.argmin())
        cost = costs[divisible.samples[at]]
        return f"[{at}] costs {spans.whole[at]:g} by its positions, but {cost:g} as a sample"
    return ""
