"""What the batches of all ranks have in common: their fields, and the values that their samples share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trainer_client.balancing.batches import FlatBatch
from trainer_client.balancing.batches.schema import remedy
from trainer_client.balancing.contribution import Contributions, schema_number
from trainer_client.balancing.errors import SchemaMismatchError

_NAMES = "give loaders of different batches different names (BalancedLoader(name=…))"
_MOST_SCHEMAS = 64  # that are remembered; a stream's batches have one, or some widths of padding


class Templates:
    """Empty batches of the schemas of a stream's rounds.

    Attributes:
        sent: The one that all ranks have.
    """

    def __init__(self, name: str, first: FlatBatch) -> None:
        self.sent = first
        self._name = name  # the loader's
        self._by_number = {schema_number(first.schema): first}
        self._first: FlatBatch | None = (
            None  # of the first round with samples: what has none tells little of its fields
        )

    def lines(self, number: int) -> Sequence[str]:
        """A readable line per field of a schema."""
        return self._by_number[number].schema.lines if number in self._by_number else ()

    def of_round(self, contributions: Contributions) -> FlatBatch | None:
        """The empty batch of a round; None: no rank has samples.

        Raises:
            SchemaMismatchError: If its jagged fields are others than those that the stream began with.
        """
        for extras in contributions.extras.values():
            if extras.template is not None:
                if len(self._by_number) >= _MOST_SCHEMAS:
                    del self._by_number[next(iter(self._by_number))]
                self._by_number[schema_number(extras.template.schema)] = extras.template
        if not (number := contributions.schema):
            return None
        template = self._by_number[number]
        self._first = template if self._first is None else self._first
        if template.structure.columns != self._first.structure.columns:
            difference = self._first.schema.diff(template.schema, own="the first", others="this one")
            raise SchemaMismatchError(f"{self._name!r} began with batches of other fields: {difference}; {_NAMES}")
        return template


def schemas_differ(contributions: Contributions, lines_of: Callable[[int], Sequence[str]]) -> SchemaMismatchError:
    """The error of ranks whose batches have other fields; `lines_of` knows those of earlier schemas."""
    ranks, numbers = contributions.with_samples, contributions.headers["schema"]
    other = next(rank for rank in ranks if numbers[rank] != numbers[ranks[0]])
    lines = []
    for rank in (ranks[0], other):
        extras = contributions.extras.get(rank)
        template = None if extras is None else extras.template
        lines.append(lines_of(int(numbers[rank])) if template is None else template.schema.lines)
    return mismatch(ranks[0], lines[0], other, lines[1])


def mismatch(first: int, lines: Sequence[str], other: int, other_lines: Sequence[str]) -> SchemaMismatchError:
    """The error that shows how the batches of two ranks differ, given a line per field of each."""
    only_first = [line for line in lines if line not in other_lines]
    only_other = [line for line in other_lines if line not in lines]
    here, there = "; ".join(only_first), "; ".join(only_other)
    if here and there:
        both = f"rank {first} has {here}, rank {other} has {there}"
    elif here:
        both = f"rank {first} has {here}, which rank {other} lacks"
    elif there:
        both = f"rank {other} has {there}, which rank {first} lacks"
    else:
        both = f"ranks {first} and {other} have the same fields in another order"
    return SchemaMismatchError(f"batches differ between ranks: {both}; {remedy(only_first, only_other)}; {_NAMES}")


def shared_values_differ(contributions: Contributions) -> SchemaMismatchError:
    """The error of ranks whose samples share other values."""
    extras, digests = contributions.extras, contributions.headers["shared"]
    ranks = [rank for rank in contributions.with_samples if digests[rank]]
    values = [(rank, dict(extras[rank].shared) if rank in extras else {}) for rank in ranks]
    first_rank, first = values[0]
    for rank, one in values[1:]:
        for path, value in first.items():
            if one.get(path) != value:
                return SchemaMismatchError(
                    f"shared values differ between ranks: {path!r} is {value} on rank {first_rank}, {one.get(path)} on "
                    f"rank {rank}; samples of all ranks are trained with it: give all ranks the same value, or declare "
                    "it in derived, with the function that gives it, if it follows from the samples or is each rank's "
                    "own"
                )
    return SchemaMismatchError(f"shared values differ between ranks; {_NAMES}")
