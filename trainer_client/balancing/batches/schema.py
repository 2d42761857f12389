"""What all ranks' batches must have in common."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Kind = Literal["dense", "jagged", "shared"]


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
    """

    path: str
    dtype: str = ""
    kind: Kind = "dense"
    shape: tuple[int, ...] = ()
    rows: int = 0
    lengths: str = ""

    def __str__(self) -> str:
        if self.kind == "shared":
            return f"{self.path}: shared"
        rows = f"{self.rows} rows per sample" if self.kind == "dense" else f"jagged by {self.lengths}"
        return f"{self.path}: {self.dtype}{list(self.shape)}, {rows}"


_DENSE = re.compile(r"(?P<path>.*): (?P<dtype>\S+)\[(?P<shape>[\d, ]*)\], \d+ rows per sample")


def remedy(lines: Sequence[str], others: Sequence[str]) -> str:
    """What to do about two ranks' fields that differ, given as lines of their schemas."""
    found = {match["path"]: match for match in map(_DENSE.fullmatch, lines) if match}
    for match in filter(None, map(_DENSE.fullmatch, others)):
        one = found.get(match["path"])
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
        mine, theirs = ({field.path: str(field) for field in schema.fields} for schema in (self, other))
        lines = []
        for path in sorted(mine.keys() | theirs.keys()):
            if mine.get(path) != theirs.get(path):
                found = (mine.get(path, f"no {path}"), theirs.get(path, f"no {path}"))
                lines.append(f"{own} has {found[0]}; {others} has {found[1]}")
        return "\n".join(lines)
