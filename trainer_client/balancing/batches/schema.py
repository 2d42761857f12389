"""What two batches must have in common to exchange samples."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Schema:
    """The fields of a batch: two batches of one schema can exchange samples.

    Containers do not belong to it: ranks may order the keys of their dicts differently.

    Attributes:
        lines: One readable line per field, sorted by path.
    """

    lines: tuple[str, ...]

    @cached_property
    def hash(self) -> bytes:
        """16 bytes that name the schema, the same in every process."""
        return hashlib.blake2b("\n".join(self.lines).encode(), digest_size=16).digest()

    def diff(self, other: Schema, *, own: str = "this batch", others: str = "the other") -> str:
        """What differs, one line per difference, with the batches called `own` and `others`; "" if nothing does."""
        ours, theirs = ({line.partition(": ")[0]: line for line in schema.lines} for schema in (self, other))
        return "\n".join(
            f"{own} has {ours.get(path, f'no {path}')}; {others} has {theirs.get(path, f'no {path}')}"
            for path in sorted(ours.keys() | theirs.keys())
            if ours.get(path) != theirs.get(path)
        )


def remedy(lines: Sequence[str], others: Sequence[str]) -> str:
    """What to do about two ranks' fields that differ, given as lines of their schemas."""
    widths = re.compile(r"\[\d+(?=[\],].* rows per sample)")  # the first size of a row of a dense field
    here = {widths.sub("[", line): line for line in lines if widths.search(line)}
    for other in others:
        if other != (line := here.get(widths.sub("[", other), other)):
            return (
                f"if {line.rpartition(': ')[0]!r} is padded to the longest sample of its batch, declare it in "
                "BatchSpec.padded together with what says the lengths; else give all ranks rows of the same shape"
            )
    return "give all ranks batches of the same fields and dtypes"
