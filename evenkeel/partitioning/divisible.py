"""Samples that may be split, as a rank tells of them: what their positions cost, and where their items begin."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.spans import SpanCosts

MOST = 32  # samples of a rank's batch that it offers, the heaviest
SHARE = 1 / 16  # of the batch's load on the rank, the least that such a sample costs
MAX_POSITIONS = 1 << 40
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
    """What is wrong with a rank's table of samples that may be split: place and reason; empty if nothing is.

    Args:
        table: (m, WIDTH) see `Divisible.table`.
        costs: (n,) of all of the rank's samples.
    """
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
