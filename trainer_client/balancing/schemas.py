"""Ranks that hold different kinds of batches are told both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from trainer_client.balancing.agreement import SchemaMismatchError
from trainer_client.balancing.batches import FlatBatch
from trainer_client.balancing.batches.structure import remedy

NAMES = "give loaders of different batches different names (BalancedLoader(name=…))"


def raise_mismatch(schemas: Sequence[tuple[str, ...] | None]) -> NoReturn:
    """Raises the error that shows how the first two differing ranks differ.

    Args:
        schemas: One readable line per field, by rank; None for a rank that has seen no batch.

    Raises:
        SchemaMismatchError: If it is called; it does nothing else.
    """
    known = [(rank, lines) for rank, lines in enumerate(schemas) if lines is not None]
    first_rank, first = known[0]
    for rank, lines in known[1:]:
        if lines != first:
            only_first = [line for line in first if line not in lines]
            only_other = [line for line in lines if line not in first]
            here, there = "; ".join(only_first), "; ".join(only_other)
            if here and there:
                both = f"rank {first_rank} has {here}, rank {rank} has {there}"
            elif here:
                both = f"rank {first_rank} has {here}, which rank {rank} lacks"
            elif there:
                both = f"rank {rank} has {there}, which rank {first_rank} lacks"
            else:
                both = f"ranks {first_rank} and {rank} have the same fields in another order"
            raise SchemaMismatchError(
                f"batches differ between ranks: {both}; {remedy(only_first, only_other)}; {NAMES}"
            )
    raise SchemaMismatchError(
        f"batches changed their fields or dtypes between rounds, and not on all ranks alike; {NAMES}"
    )


def check_fields(name: str, flats: Sequence[FlatBatch], template: FlatBatch, *, served: bool) -> None:
    """Checks what one rank's batches must have in common; what all ranks' must, they check when they agree.

    Args:
        name: Of the loader.
        flats: The batches of a round.
        template: What the stream began with.
        served: Whether a service reads their lengths, of as many fields as at the beginning.

    Raises:
        ValueError: If they differ.
    """
    first = next((flat for flat in flats if flat.num_samples), flats[0])
    for flat in flats:
        if flat.num_samples and flat.schema is not first.schema and flat.schema.hash != first.schema.hash:
            raise ValueError(
                "batches of one window differ, so that their samples cannot change places: "
                f"{first.schema.diff(flat.schema, own='one', others='another')}; use window=1, or pad them alike"
            )
    if served and first.num_jagged != template.num_jagged:
        raise ValueError(
            f"{name!r} began with batches of other fields: "
            f"{template.schema.diff(first.schema, own='the first', others='this one')}; {NAMES}"
        )
