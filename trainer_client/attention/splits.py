"""Which positions of a sample are on which rank: plain numbers, the same on all ranks."""

from __future__ import annotations

from dataclasses import dataclass

from trainer_client.checks import check_whole


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
        check_whole(self, rank=0, sequence=0, begin=0)
        check_whole(self, end=self.begin + 1)

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
        check_whole(self, num_context=0, num_candidates=0)
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


def check_splits(samples: tuple[SplitSample, ...], num_ranks: int) -> None:
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
