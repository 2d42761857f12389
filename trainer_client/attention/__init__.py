"""Exact attention over samples whose positions are on several ranks."""

from trainer_client.attention.dense import DenseSilu, DenseSoftmax
from trainer_client.attention.group import PieceGroup
from trainer_client.attention.over_pieces import Attended, attend_over_pieces
from trainer_client.attention.pieces import Blocks, Pieces
from trainer_client.attention.splits import Piece, SplitSample

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
