"""What part of a sample's work its positions are: the cost of spans, and where a sample may be cut."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import ArrayLike, NDArray

Numbers = NDArray[np.float64]


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
        at = np.asarray(position, np.float64)
        history = self.positions - self.candidates
        in_context = np.minimum(at, self.context)
        last = np.clip(at, self.context, history)  # of the history, the positions from context to last
        beyond = np.maximum(at - history, 0)
        seen = (
            in_context * history + (last * (last + 1) - self.context * (self.context + 1)) / 2 + beyond * (history + 1)
        )
        targets = np.maximum(at - (self.positions - self.targets), 0)
        return self.per_position * at + self.per_pair * seen + self.per_target * targets

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

    def cut_at(self, sample: int, costs: ArrayLike) -> NDArray[np.int64]:
        """Where to cut one sample so that the positions before the cuts cost as near to `costs` as may be.

        Args:
            sample: Which, one that can be cut.
            costs: (m,) ascending, fewer than the sample's `num_cuts`.

        Returns:
            (m,) cuts, ascending, no two the same.
        """
        wanted = np.asarray(costs, np.float64)
        first, step, count = self.first_cut[sample], self.granule[sample], int(self.num_cuts[sample])
        assert wanted.size <= count, "more cuts than places"
        one = self.take(np.full(wanted.size, sample))
        low, high = np.zeros(wanted.size), np.full(wanted.size, count - 1.0)
        while (low < high).any():  # the first cut that is not below
            middle = np.floor((low + high) / 2)
            below = one.before(first + middle * step) < wanted
            low, high = np.where(below, np.minimum(middle + 1, high), low), np.where(below, high, middle)
        at, before = one.before(first + low * step), one.before(first + np.maximum(low - 1, 0) * step)
        places = np.where((low > 0) & (wanted - before <= at - wanted), low - 1, low).astype(np.int64)
        order = np.arange(wanted.size)
        places = np.maximum.accumulate(places - order) + order  # ascending
        places = np.minimum(places, count - wanted.size + order)
        cuts: NDArray[np.int64] = (first + places * step).astype(np.int64)
        return cuts
