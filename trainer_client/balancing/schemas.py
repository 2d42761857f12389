"""Ranks that hold different kinds of batches are told both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from trainer_client.balancing.agreement import SchemaMismatchError
from trainer_client.batches.schema import remedy


def raise_mismatch(schemas: Sequence[tuple[str, ...] | None]) -> NoReturn:
    """Raises the error that shows how the first two differing ranks differ.

    Args:
        schemas: One readable line per field, by rank; None for a rank that has seen no batch.

    Raises:
        SchemaMismatchError: Always.
    """
    known = [(rank, lines) for rank, lines in enumerate(schemas) if lines is not None]
    first_rank, first = known[0]
    for rank, lines in known[1:]:
        if lines != first:
            only_first = [line for line in first if line not in lines]
            only_other = [line for line in lines if line not in first]
            raise SchemaMismatchError(
                f"batches differ between ranks: rank {first_rank} has {'; '.join(only_first) or 'the same fields'}, "
                f"rank {rank} has {'; '.join(only_other) or 'the same fields in another order'}; "
                f"{remedy(only_first, only_other)}"
            )
    raise SchemaMismatchError("batches changed their fields or dtypes between rounds, and not on all ranks alike")
