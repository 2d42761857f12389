"""Exact attention over samples whose positions are on several ranks."""

from evenkeel.partitioning.splits import Piece, SplitSample
from trainer_client.attention.dense import DenseSilu, DenseSoftmax
from trainer_client.attention.over_pieces import Attended, PieceGroup, attend_over_pieces
from trainer_client.attention.pieces import Blocks, Pieces
from trainer_client.attention.varlen import VarlenSoftmax

__all__ = [
    "Attended",
    "Blocks",
    "DenseSilu",
    "DenseSoftmax",
    "Piece",
    "PieceGroup",
    "Pieces",
    "SplitSample",
    "VarlenSoftmax",
    "attend_over_pieces",
]
