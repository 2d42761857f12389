"""Samples in parts on several ranks: which positions are where, and what each part has of a sample's values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import index
from typing import Final

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.slices import Lengths

Integers = NDArray[np.int64]
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cuts:
    """The parts of one rank's own samples that one batch trains, in home order. A whole sample is one part.

    A cut is counted in items: of a jagged field with k values an item, item i is values i * k to (i + 1) * k - 1 of the
    sample. An item may be several positions of the sequence that a model computes, as interleaved items and actions
    are, and positions before the first item belong to the first part; so items are not positions of `Piece`.

    Attributes:
        samples: (m,) int64, which of the samples each part is of, counted among the own samples that the batch trains;
            ascending, each of them at least once.
        begins: (m,) int64, the first item of each part; 0 of a sample's first part. A part ends where the sample's next
            begins, the last part where the sample ends.
    """

    samples: NDArray[np.int64]
    begins: NDArray[np.int64]

    def __len__(self) -> int:
        return self.samples.size

    @property
    def num_samples(self) -> int:
        """Samples, whole or not."""
        return int(self.samples[-1]) + 1 if self.samples.size else 0

    @property
    def is_first(self) -> NDArray[np.bool_]:
        """(m,) whether a part is the first of its sample."""
        first = np.ones(self.samples.size, np.bool_)
        np.not_equal(self.samples[1:], self.samples[:-1], out=first[1:])
        return first

    @property
    def is_last(self) -> NDArray[np.bool_]:
        """(m,) whether a part is the last of its sample."""
        last = np.ones(self.samples.size, np.bool_)
        np.not_equal(self.samples[1:], self.samples[:-1], out=last[:-1])
        return last


def part_ranges(lengths: Lengths, cuts: Cuts, roles: NDArray[np.int64]) -> tuple[NDArray[np.int64], Integers]:
    """Which of its sample's values each part has, of each jagged field.

    Args:
        lengths: (n, jagged fields) of the samples, values of each field.
        cuts: Of m parts.
        roles: (jagged fields,) what each is: k for the sequence's with k values an item, or `LAST`, `FIRST` or `ALL`.

    Returns:
        (m, jagged fields) each, the first value, counted in the sample, and the one after the last. Where a field has
        none in a part, both are the same number.
    """
    assert len(lengths) == cuts.num_samples, "cuts of other samples"
    ends = lengths[cuts.samples].astype(np.int64)
    begins = np.minimum(cuts.begins[:, None] * np.maximum(roles, 0), ends)
    first, last = cuts.is_first, cuts.is_last
    begins[first] = 0
    inner = np.flatnonzero(~last)
    ends[inner] = np.where(roles > 0, begins[np.minimum(inner + 1, len(cuts) - 1)], ends[inner])
    ends[~last[:, None] & (roles == LAST)] = 0
    ends[~first[:, None] & (roles == FIRST)] = 0
    return begins, ends


def part_lengths(lengths: Lengths, cuts: Cuts, roles: NDArray[np.int64]) -> NDArray[np.int64]:
    """(m, jagged fields) values of each field in each part; see `part_ranges`."""
    begins, ends = part_ranges(lengths, cuts, roles)
    return ends - begins


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
        begins: (parts,) int64, first item of each; see `Cuts`.
        pieces: (pieces, PIECE_WIDTH) int64, all pieces of the split samples: by batch, by sample, by position.
    """

    samples: Integers
    begins: Integers
    pieces: Integers

    def cut(self, lengths: Lengths, roles: NDArray[np.int64]) -> tuple[Integers, NDArray[np.int64]]:
        """(parts,) the sample of each part, numbered among those of all ranks; (parts, fields) what it has of them."""
        of: Integers = np.cumsum(self.begins == 0) - 1
        return of, part_lengths(lengths, Cuts(samples=of, begins=self.begins), roles)


def arrivals(ranks: Integers) -> Integers:
    """(m,) how many earlier parts have the same rank: parts arrive by home, then in home order."""
    order = np.argsort(ranks, kind="stable")
    firsts = np.flatnonzero(np.diff(ranks[order], prepend=-1))
    numbers = np.empty(ranks.size, np.int64)
    numbers[order] = np.arange(ranks.size) - np.repeat(firsts, np.diff(np.append(firsts, ranks.size)))
    return numbers


def read_parts(
    further: Integers, num_samples: int, steps: NDArray[np.int32] | None, num_batches: int
) -> tuple[NDArray[np.int32] | None, tuple[Cuts | None, ...]]:
    """What a rank's own samples are cut into."""
    samples = np.concatenate([np.arange(num_samples), further[:, 0]])
    begins = np.concatenate([np.zeros(num_samples, np.int64), further[:, 1]])
    order = np.argsort(samples, kind="stable")
    samples, begins = samples[order], begins[order]
    if steps is None:
        return None, (Cuts(samples=samples, begins=begins) if len(further) else None,)
    cuts: list[Cuts | None] = []
    for batch in range(num_batches):
        own = steps == batch
        _, numbers = np.unique(samples[own], return_inverse=True)
        whole = numbers.size == 0 or int(numbers[-1]) + 1 == numbers.size
        cuts.append(None if whole else Cuts(samples=numbers.astype(np.int64), begins=begins[own]))
    return steps[begins == 0], tuple(cuts)


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
