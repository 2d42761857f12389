"""Samples that outweigh a rank's share, split into parts on several ranks; `stage.split_heavy` plans them."""

from evenkeel.partitioning.splits.parts import (
    ALL,
    FIRST,
    LAST,
    PIECE_WIDTH,
    Cuts,
    Piece,
    RoundParts,
    SplitSample,
    arrivals,
    check_splits,
    part_lengths,
    part_ranges,
    read_parts,
    read_splits,
)
from evenkeel.partitioning.splits.samples import (
    MOST,
    SHARE,
    STEP_SECONDS,
    WIDTH,
    Divisible,
    SpanCosts,
    SplitOptions,
    check_table,
)

__all__ = [
    "ALL", "FIRST", "LAST", "MOST", "PIECE_WIDTH", "SHARE", "STEP_SECONDS", "WIDTH", "Cuts", "Divisible", "Piece",
    "RoundParts", "SpanCosts", "SplitOptions", "SplitSample", "arrivals", "check_splits", "check_table", "part_lengths",
    "part_ranges", "read_parts", "read_splits",
]  # fmt: skip
