"""What follows from a batch's fields and tensors alone, found once for all batches that have the same ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trainer_client.balancing.batches.containers import Tree
from trainer_client.balancing.batches.kinds import Derived, Field, Leaf
from trainer_client.balancing.batches.schema import Schema

_COUNTS = (torch.int32, torch.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """What batches of one kind have in common."""

    tree: Tree | None  # the containers; None if the batch is a single field
    fields: tuple[Field, ...]  # the leaves of the tree
    leaves: tuple[Leaf, ...]  # the tensors
    columns: tuple[str, ...]  # path of each jagged column, ascending
    lengths: tuple[list[int] | range, ...]  # columns of each tensor of lengths: of the fields', and of `counts`
    schema: Schema  # what other ranks' batches must agree with
    roles: tuple[int, ...]  # of columns in parts, see `evenkeel.partitioning.splits`; none without a sequence
    order: dict[str, int]  # number of each column
    counts: dict[int, int]  # leaf and column of each tensor that holds lengths
    jagged: tuple[int, ...]  # leaves with as many rows as lengths say
    on_host: frozenset[int]  # leaves that are in the host's memory wherever the batch is
    reads_lengths: bool  # building a batch does, on the host
    derived: dict[int, Derived]  # fields that are computed from the others, by their number


def is_count(leaf: Leaf) -> bool:
    """Whether it is an integer for each sample, which may be a length."""
    return leaf.rows == 1 and not leaf.shape and leaf.dtype in _COUNTS


def as_range(columns: list[int]) -> list[int] | range:
    """Columns that follow each other as a range."""
    following = range(columns[0], columns[0] + len(columns)) if columns else range(0)
    return following if columns == list(following) else columns
