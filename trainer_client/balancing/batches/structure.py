"""What the batches of one kind have in common: containers, tensors, jagged columns, schema."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from trainer_client.balancing.batches.derived import derived_nodes
from trainer_client.balancing.batches.nodes import Node
from trainer_client.balancing.batches.schema import Schema
from trainer_client.balancing.batches.spec import Padded

LENGTHS_DTYPE = torch.int32  # on the wire and on devices; flatten() refuses longer samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One tensor of a batch.

    Attributes:
        path: Where it is.
        dtype: Its dtype.
        shape: Shape of one row.
        rows: Rows of each sample if fixed, 0 if jagged.
        columns: The jagged columns whose values lie in it, one after the other; () if rows are fixed.
        field_paths: Path of each of its fields: one per column, or one.
        label: What the schema says instead of the dtype; "" for the dtype.
        on_host: It is in the host's memory wherever the batch is.
        padding: How it is padded outside of a `FlatBatch`.
    """

    path: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    rows: int
    columns: tuple[int, ...]
    field_paths: tuple[str, ...]
    label: str = ""
    on_host: bool = False
    padding: Padded | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """What batches of one kind have in common.

    Attributes:
        root: The containers.
        leaves: The tensors.
        columns: Path of each jagged column, ascending.
        schema: What other ranks' batches must agree with.
        reads_lengths: Building a batch reads its lengths on the host.
        on_host: The leaves that are in the host's memory wherever the batch is.
        padded: The leaves that are padded outside of a `FlatBatch`.
        is_derived: Whether values follow from the samples.
    """

    root: Node
    leaves: tuple[Leaf, ...]
    columns: tuple[str, ...]
    schema: Schema
    reads_lengths: bool = False
    on_host: tuple[int, ...] = field(init=False)
    padded: tuple[int, ...] = field(init=False)
    is_derived: bool = field(init=False)

    def __post_init__(self) -> None:
        of_leaves = list(enumerate(self.leaves))
        object.__setattr__(self, "on_host", tuple(index for index, leaf in of_leaves if leaf.on_host))
        object.__setattr__(self, "padded", tuple(index for index, leaf in of_leaves if leaf.padding is not None))
        object.__setattr__(self, "is_derived", any(True for _ in derived_nodes(self.root)))
