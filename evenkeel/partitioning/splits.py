"""Samples that outweigh a rank's share: what of them may be split, what their positions cost, and what their parts are.

`split_search` plans them. Here is what ranks, wire and attention know of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from operator import index
from typing import Any, Final, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evenkeel.partitioning.compile import step
from evenkeel.partitioning.problem import SPLIT_ABOVE, SPLIT_PRICE
from evenkeel.partitioning.slices import Lengths

Integers = NDArray[np.int64]
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


def count_cuts(span: Any) -> Any:
    """Places where a sample may be cut; `span` as for `cost_before`."""
    tail = np.maximum(np.maximum(span.candidates, span.targets), 1.0)
    return np.maximum(np.floor((span.positions - tail - span.head) / span.granule), 0.0)


step_before = step(cost_before)  # here, so that kernels are compiled again when these change
step_cuts = step(count_cuts)


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
    def of(cls, positions: ArrayLike, **given: ArrayLike) -> SpanCosts:
        """Of numbers for each sample, or one number for all, by name; see the attributes. What is left out is 0."""
        sizes = np.asarray(positions, np.float64)
        values = dict.fromkeys(_COSTS[1:], 0.0) | {"granule": 1.0} | given
        values["head"] = np.maximum(values["head"], values["context"])
        arrays = {name: np.broadcast_to(np.asarray(value, np.float64), sizes.shape) for name, value in values.items()}
        return cls(positions=sizes, **arrays)

    def __len__(self) -> int:
        return self.positions.size

    def take(self, samples: ArrayLike) -> Self:
        """Those of some samples, in this order."""
        chosen = np.asarray(samples)
        return type(self)(**{field.name: getattr(self, field.name)[chosen] for field in fields(self)})

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
        cuts: NDArray[np.float64] = count_cuts(self)
        return cuts.astype(np.int64)


_WHOLE = ("positions", "context", "candidates", "targets", "head", "granule")
_COSTS = tuple(field.name for field in fields(SpanCosts))
_COLUMNS = ("samples", "first_items", *_COSTS)
WIDTH = len(_COLUMNS)
"""Numbers of a sample that may be split: which it is, the position of its item 0, and what its positions cost."""
SPAN = np.dtype([(name, np.float64) for name in _COLUMNS])
"""These, as kernels read them."""


def table_of(spans: SpanCosts, samples: NDArray[np.int64], first_items: NDArray[np.float64]) -> NDArray[np.float64]:
    """(m, WIDTH) the samples that may be split, as all from a rank to the search have them.

    Args:
        spans: What their positions cost.
        samples: (m,) which they are; ascending.
        first_items: (m,) the position of each one's item 0: behind the contextual positions, unless these are items
            too.
    """
    columns = [samples, first_items, *(getattr(spans, name) for name in _COSTS)]
    return np.stack(columns, axis=1).astype(np.float64)


def spans_of(table: NDArray[np.float64]) -> SpanCosts:
    """What the positions of a table's samples cost."""
    return SpanCosts(**dict(zip(_COSTS, np.ascontiguousarray(table[:, 2:].T), strict=True)))


def check_table(table: NDArray[np.float64], costs: NDArray[np.int64] | NDArray[np.float64]) -> str:
    """What is wrong with a rank's table of samples that may be split: place and reason; empty if nothing is."""
    if not len(table):
        return ""
    bad = np.flatnonzero(~((table >= 0) & (table <= 1e300)).all(axis=1))  # NaN is neither
    if bad.size:
        return f"[{bad[0]}] has numbers that are not finite and at least 0"
    if not (np.diff(table[:, 0], prepend=-1) > 0).all() or table[-1, 0] >= len(costs) or (table[:, 0] % 1).any():
        return f" names samples that are not ascending numbers from 0 to {len(costs) - 1}"
    spans, samples, first_items = spans_of(table), table[:, 0].astype(np.int64), table[:, 1]
    for name in _WHOLE:
        values = getattr(spans, name)
        bad = np.flatnonzero((values % 1 != 0) | (values > MAX_POSITIONS) | (values < (name == "granule")))
        if bad.size:
            return f"[{bad[0]}] has {name} {values[bad[0]]:g}, not a whole number up to 2^40"
    fits = (spans.context + spans.candidates <= spans.positions) & (spans.head >= spans.context)
    fits &= (spans.targets <= spans.positions) & ((spans.head - first_items) % spans.granule == 0)
    fits &= first_items <= spans.head
    if not fits.all():
        return f"[{int(fits.argmin())}] has context, candidates, targets or head that do not fit its positions"
    agrees = np.isclose(spans.whole, costs[samples].astype(np.float64), rtol=1e-6)
    if not agrees.all():
        at = int(agrees.argmin())
        cost = costs[samples[at]]
        return f"[{at}] costs {spans.whole[at]:g} by its positions, but {cost:g} as a sample"
    return ""


PIECE_WIDTH = 8
"""Numbers of a piece: batch, number of its sample in the batch, context, candidates, rank, sequence, begin, end."""

# What a jagged field is to a sample in parts: the values of an item of the sequence, 1 or more, or one of these.
LAST: Final = 0  # it goes with the sample's last part
FIRST: Final = -1  # with the first
ALL: Final = -2  # with each


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Consecutive positions of one sample, as a sequence of one rank's batch.

    Attributes:
        rank: The rank that has them, as a rank of the `PieceGroup`.
        sequence: Which sequence of its batch they are.
        begin: The first of them, counted in the sample.
        end: The one after the last.
    """

    rank: int
    sequence: int
    begin: int
    end: int

    def __post_init__(self) -> None:
        _check_whole("rank", self.rank, 0)
        _check_whole("sequence", self.sequence, 0)
        _check_whole("begin", self.begin, 0)
        _check_whole("end", self.end, self.begin + 1)

    def __len__(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitSample:
    """A sample whose positions are in several pieces.

    Its positions are contextual ones, then the history, then candidates. A position of the history sees the context,
    itself and all history before it. A candidate sees context, history and itself. A contextual position sees the
    whole context and all of the history. With neither, attention is plainly causal.

    Attributes:
        pieces: In the order of their positions, without gaps; a rank may have several of them.
        num_context: Contextual positions, all of them in the first piece.
        num_candidates: Candidates at the end, in as many pieces as you like.
    """

    pieces: tuple[Piece, ...]
    num_context: int = 0
    num_candidates: int = 0

    def __post_init__(self) -> None:
        _check_whole("num_context", self.num_context, 0)
        _check_whole("num_candidates", self.num_candidates, 0)
        if not self.pieces:
            raise ValueError("pieces is empty; give those of all positions of the sample")
        position = 0
        for number, piece in enumerate(self.pieces):
            if piece.begin != position:
                raise ValueError(
                    f"pieces[{number}].begin is {piece.begin}; begin at {position}, where the one before ends"
                )
            position = piece.end
        if self.num_context > len(self.pieces[0]):
            raise ValueError(
                f"num_context is {self.num_context}, but pieces[0].end is {self.pieces[0].end}; "
                "the first piece holds the whole context"
            )
        if self.num_context + self.num_candidates > position:
            raise ValueError(
                f"num_context is {self.num_context} and num_candidates {self.num_candidates} of {position} positions; "
                "together they are no more than the sample has"
            )

    def __len__(self) -> int:
        return self.pieces[-1].end

    def num_keys(self, number: int) -> int:
        """Rows of a piece that later pieces see: all but candidates, which are the last."""
        piece = self.pieces[number]
        return max(min(piece.end, len(self) - self.num_candidates) - piece.begin, 0)


def check_splits(samples: Sequence[SplitSample], num_ranks: int) -> None:
    """Checks that the pieces of a step are on ranks that exist, each a sequence of its own.

    Raises:
        ValueError: If they are not.
    """
    places: dict[tuple[int, int], str] = {}
    for which, sample in enumerate(samples):
        for number, piece in enumerate(sample.pieces):
            name = f"samples[{which}].pieces[{number}]"
            if piece.rank >= num_ranks:
                raise ValueError(f"{name}.rank is {piece.rank}; the group has ranks 0 to {num_ranks - 1}")
            other = places.setdefault((piece.rank, piece.sequence), name)
            if other != name:
                raise ValueError(
                    f"{name} is sequence {piece.sequence} of rank {piece.rank}, and so is {other}; "
                    "give each piece a sequence of its own"
                )


def samples_of_parts(begins: Integers) -> Integers:
    """(m,) which sample each part is of, numbered in their order; a whole sample is one part.

    Args:
        begins: (m,) the first item of each part, which is 0 of a sample's first part alone. A part ends where the
            sample's next begins, the last part where the sample ends. Of a jagged field with k values an item, item i
            is values i * k to (i + 1) * k - 1 of the sample. An item may be several positions of the sequence that a
            model computes, as interleaved items and actions are, and positions before the first item belong to the
            first part; so items are not positions of `Piece`.
    """
    return np.cumsum(begins == 0) - 1


def part_ranges(lengths: Lengths, begins: Integers, roles: NDArray[np.int64]) -> tuple[Integers, Integers]:
    """Which of its sample's values each part has, of each jagged field.

    Args:
        lengths: (n, jagged fields) of the samples, values of each field.
        begins: (m,) the first item of each part, of n samples; see `samples_of_parts`.
        roles: (jagged fields,) what each is: k for the sequence's with k values an item, or `LAST`, `FIRST` or `ALL`.

    Returns:
        (m, jagged fields) each, the first value, counted in the sample, and the one after the last. Where a field has
        none in a part, both are the same number.
    """
    is_first = (begins == 0)[:, None]
    is_last = np.roll(is_first, -1)
    ends = lengths[samples_of_parts(begins)].astype(np.int64)
    firsts = np.minimum(begins[:, None] * np.maximum(roles, 0), ends)
    ends = np.where((roles > 0) & ~is_last, np.roll(firsts, -1, axis=0), ends)
    ends[~is_last & (roles == LAST)] = 0
    ends[~is_first & (roles == FIRST)] = 0
    return firsts, ends


def part_lengths(lengths: Lengths, begins: Integers, roles: NDArray[np.int64]) -> Integers:
    """(m, jagged fields) values of each field in each part; see `part_ranges`."""
    firsts, ends = part_ranges(lengths, begins, roles)
    return ends - firsts


def _check_whole(name: str, value: object, least: int) -> None:
    try:
        whole = not isinstance(value, bool) and index(value) >= least  # type: ignore[arg-type]
    except TypeError:
        whole = False
    if not whole:
        raise ValueError(f"{name} is {value!r}; use a whole number of at least {least}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoundParts:
    """Which samples of a round are split, and how.

    Attributes:
        samples: (parts,) int64, the own sample of its home that each part is of; by home, then in home order.
        begins: (parts,) int64, first item of each; see `samples_of_parts`.
        pieces: (pieces, PIECE_WIDTH) int64, all pieces of the split samples: by batch, by sample, by position.
    """

    samples: Integers
    begins: Integers
    pieces: Integers


def arrivals(ranks: Integers) -> Integers:
    """(m,) how many earlier parts have the same rank: parts arrive by home, then in home order."""
    order = np.argsort(ranks, kind="stable")
    firsts = np.flatnonzero(np.diff(ranks[order], prepend=-1))
    numbers = np.empty(ranks.size, np.int64)
    numbers[order] = np.arange(ranks.size) - np.repeat(firsts, np.diff(np.append(firsts, ranks.size)))
    return numbers


def read_parts(
    begins: Integers, steps: NDArray[np.int32] | None, num_batches: int
) -> tuple[NDArray[np.int32] | None, tuple[Integers | None, ...]]:
    """The batch of each of a rank's own samples, and per batch the first items of their parts; None: none is split."""
    own = [begins] if steps is None else [begins[steps == batch] for batch in range(num_batches)]
    of_samples = None if steps is None else steps[begins == 0]
    return of_samples, tuple(each if each.any() else None for each in own)


def read_splits(pieces: Integers, num_batches: int) -> tuple[tuple[SplitSample, ...], ...]:
    """Per batch, the split samples of all ranks."""
    batches: list[list[SplitSample]] = [[] for _ in range(num_batches)]
    rows: Sequence[list[int]] = pieces.tolist()
    for (batch, _, context, candidates), group in groupby(rows, key=lambda row: tuple(row[:4])):
        if not 0 <= batch < num_batches:
            raise ValueError(f"a piece is of batch {batch}; the round has {num_batches}")
        found = tuple(Piece(rank=row[4], sequence=row[5], begin=row[6], end=row[7]) for row in group)
        batches[batch].append(SplitSample(pieces=found, num_context=context, num_candidates=candidates))
    return tuple(map(tuple, batches))
