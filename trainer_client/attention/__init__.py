"""Exact attention over samples whose positions are on several ranks."""

from evenkeel.partitioning.splits import Piece, SplitSample
from trainer_client.attention.dense import DenseSilu, DenseSoftmax
from trainer_client.attention.group import PieceGroup
from trainer_client.attention.over_pieces import Attended, attend_over_pieces
from trainer_client.attention.pieces import Blocks, Pieces

__all__ = [
    "Attended",
    "Blocks",
    "DenseSilu",
    "DenseSoftmax",
    "Piece",
    "PieceGroup",
    "Pieces",
    "SplitSample",
    "attend_over_pieces",
]
