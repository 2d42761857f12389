"""What the batches of one kind have in common, on one rank and on all: containers, tensors, jagged columns, schema."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch

from evenkeel.partitioning.splits import ALL, FIRST, LAST
from trainer_client.balancing.batches.containers import Tree
from trainer_client.balancing.batches.fields import Derived, Field, Shared
from trainer_client.balancing.batches.shared import Said, describe
from trainer_client.balancing.batches.spec import Padded

Kind = Literal["dense", "jagged", "shared"]
_PARTS = {LAST: "the last part", FIRST: "the first part", ALL: "all parts"}
_MAX_LINES = 64  # of a state; of further fields only a digest


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldSchema:
    """One field.

    Attributes:
        path: Where it is in the batch.
        dtype: Name of its dtype, such as "int64"; "" for shared values.
        kind: Rows per sample are fixed (dense), vary (jagged), or there is one value for all samples (shared).
        shape: Shape of one row or value.
        rows: Rows per sample of a dense field, 0 otherwise.
        lengths: Path of what gives the number of rows of each sample of a jagged field, "" otherwise.
        role: What a jagged field is to a sample in parts: values of an item if it is of the sequence, else with which
            parts it goes, as in `evenkeel.partitioning.splits`; None where no sequence is declared.
    """

    path: str
    dtype: str = ""
    kind: Kind = "dense"
    shape: tuple[int, ...] = ()
    rows: int = 0
    lengths: str = ""
    role: int | None = None

    def __str__(self) -> str:
        if self.kind == "shared":
            return f"{self.path}: shared"
        rows = f"{self.rows} rows per sample" if self.kind == "dense" else f"jagged by {self.lengths}{self._role_text}"
        return f"{self.path}: {self.dtype}{list(self.shape)}, {rows}"

    @property
    def _role_text(self) -> str:
        """What is declared about samples in parts."""
        if self.role is None:
            return ""
        return f", {self.role} an item of the sequence" if self.role > 0 else f", with {_PARTS[self.role]}"

    @property
    def constant(self) -> str:
        """What stays the same from batch to batch, also where rows are padded to the longest of each batch."""
        if self.kind == "shared":
            return str(self)
        text = f"{self.path}: {self.dtype}"
        if self.shape:
            text += f", rows of {len(self.shape)} dimension{'s' * (len(self.shape) > 1)}"
        if self.kind == "jagged":
            return f"{text}, jagged by {self.lengths}{self._role_text}"
        return text if self.rows == 1 else f"{text}, {self.rows} rows per sample"


_DENSE = re.compile(r"(?P<path>.*): (?P<dtype>\S+)\[(?P<shape>[\d, ]*)\], \d+ rows per sample")


def remedy(lines: Sequence[str], others: Sequence[str]) -> str:
    """What to do about two ranks' fields that differ, given as lines of their schemas."""
    dense = {match["path"]: match for match in map(_DENSE.fullmatch, lines) if match}
    for match in filter(None, map(_DENSE.fullmatch, others)):
        one = dense.get(match["path"])
        if one is None or one["dtype"] != match["dtype"] or one["shape"] == match["shape"]:
            continue
        shapes = [[int(size) for size in each["shape"].split(",") if size] for each in (one, match)]
        if len(shapes[0]) == len(shapes[1]) and shapes[0][1:] == shapes[1][1:]:
            return (
                f"if {match['path']!r} is padded to the longest sample of its batch, declare it in BatchSpec.padded "
                "together with what says the lengths; else give all ranks rows of the same shape"
            )
    return "give all ranks batches of the same fields and dtypes"


@dataclass(frozen=True, kw_only=True)
class Schema:
    """The fields of a batch, sorted by path: two batches of one schema can exchange samples.

    Containers do not belong to it: ranks may order the keys of their dicts differently.
    """

    fields: tuple[FieldSchema, ...]

    @cached_property
    def lines(self) -> tuple[str, ...]:
        """One readable line per field."""
        return tuple(str(field) for field in self.fields)

    @cached_property
    def constant_lines(self) -> tuple[str, ...]:
        """One readable line per field, of what stays the same from batch to batch, for few KB at most."""
        lines = tuple(field.constant for field in self.fields)
        if len(lines) <= _MAX_LINES:
            return lines
        digest = hashlib.blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()
        return (*lines[:_MAX_LINES], f"{len(lines) - _MAX_LINES} more fields, all together {digest}")

    @cached_property
    def hash(self) -> bytes:
        """16 bytes that name the schema, the same in every process."""
        return hashlib.blake2b("\n".join(self.lines).encode(), digest_size=16).digest()

    def diff(self, other: Schema, *, own: str = "this batch", others: str = "the other") -> str:
        """What differs, one line per difference, ready to be shown; "" if nothing does.

        Args:
            other: The schema to compare with.
            own: What to call the batch of this schema, for example "rank 0".
            others: What to call the other batch.
        """
        lines_here, lines_there = ({field.path: str(field) for field in schema.fields} for schema in (self, other))
        lines = []
        for path in sorted(lines_here.keys() | lines_there.keys()):
            if lines_here.get(path) != lines_there.get(path):
                pair = (lines_here.get(path, f"no {path}"), lines_there.get(path, f"no {path}"))
                lines.append(f"{own} has {pair[0]}; {others} has {pair[1]}")
        return "\n".join(lines)


PICKLES = "objects"  # label of the bytes of Python objects
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
        tree: The containers; None if the batch is a single field.
        fields: The leaves of the tree.
        leaves: The tensors.
        columns: Path of each jagged column, ascending.
        schema: What other ranks' batches must agree with.
        shared: What its shared values are.
        roles: What each jagged column is to a sample in parts, as in `evenkeel.partitioning.splits`; empty where no
            sequence is declared: then no sample is split.
        reads_lengths: Building a batch reads its lengths on the host.
        sources: Where the lengths of a batch are, and of which columns: those of a leaf's values, or of the i-th of
            `Taken.lengths` as -1 - i, one column after the other.
        has_empty_lists: Lists that hold nothing are containers, which is so only where there are samples.
        counts: Leaf and column of each tensor that holds the lengths of a jagged column.
        on_host: The leaves that are in the host's memory wherever the batch is.
        padded: The leaves that are padded outside of a `FlatBatch`.
        pickles: Paths of the jagged columns that are lists of Python objects.
        derived: The fields that are computed from the others, by their number.
        order: Number of each column.
    """

    tree: Tree | None
    fields: tuple[Field, ...]
    leaves: tuple[Leaf, ...]
    columns: tuple[str, ...]
    schema: Schema
    shared: Said = ()
    roles: tuple[int, ...] = ()
    reads_lengths: bool = False
    sources: tuple[tuple[int, list[int]], ...] = ()
    has_empty_lists: bool = False
    counts: tuple[tuple[int, int], ...] = field(init=False)
    on_host: tuple[int, ...] = field(init=False)
    padded: tuple[int, ...] = field(init=False)
    pickles: frozenset[str] = field(init=False)
    derived: dict[int, Derived] = field(init=False)
    order: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        leaves = list(enumerate(self.leaves))
        order = {path: column for column, path in enumerate(self.columns)}
        computed = {
            "order": order,
            "derived": {i: one for i, one in enumerate(self.fields) if isinstance(one, Derived) and one.needs_batch},
            "counts": tuple((i, order[leaf.path]) for i, leaf in leaves if leaf.rows and leaf.path in order),
            "on_host": tuple(i for i, leaf in leaves if leaf.on_host),
            "padded": tuple(i for i, leaf in leaves if leaf.padding is not None),
            "pickles": frozenset(leaf.path for leaf in self.leaves if leaf.label == PICKLES),
        }
        for name, value in computed.items():
            object.__setattr__(self, name, value)

    def with_shared(self, values: Sequence[tuple[str, Any]]) -> Structure:
        """The same with other shared values, given by path in the order of the fields."""
        if not values:
            return self
        rest = iter(values)
        fields = (
            Shared(*next(rest)) if isinstance(one, Shared) and one.path is not None else one for one in self.fields
        )
        return replace(self, fields=tuple(fields), shared=describe(values))
