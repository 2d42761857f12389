"""Samples in parts, on the client: which may be split, and what their positions cost."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.splits import MOST, SHARE, SpanCosts, SplitSample, check_table, table_of
from trainer_client.balancing.batches import FlatBatch
from trainer_client.balancing.batches.roles import check_alike
from trainer_client.balancing.costs.base import Cost
from trainer_client.balancing.lead import Round, Stage

logger = logging.getLogger(__name__)

Costs = NDArray[np.int64] | NDArray[np.float64]
Splits: TypeAlias = tuple[SplitSample, ...]


class Splitting(Stage):
    """Says to plans what fields are to samples in parts, and to ranks which samples are split."""

    def __init__(self, template: FlatBatch) -> None:
        self._roles = template.roles

    def begin(self, round_: Round) -> None:
        """Follows the schema of the round."""
        if round_.template is not None:
            self._roles = round_.template.roles
        if round_.samples is not None:
            round_.samples = replace(round_.samples, roles=self._roles)

    def finish(self, round_: Round) -> None:
        """Tells of the pieces."""
        if round_.plan is not None and round_.plan.parts is not None:
            round_.broadcast.pieces = round_.plan.parts.pieces


def check_divides(cost: Cost, flat: FlatBatch) -> None:
    """Checks that the cost says what positions cost, and that fields are declared as the sequence, and are alike."""
    if getattr(cost, "spans", None) is None:
        raise ValueError(
            f"BalanceOptions.split is set, but the cost {cost!r} does not say what positions cost; use a cost of "
            "trainer_client.balancing.costs, give yours a method spans(batch), or leave split out"
        )
    if flat.num_samples and not flat.structure.roles:
        raise ValueError(
            "BalanceOptions.split is set, but no field is declared as the sequence; name those that are cut in "
            "BatchSpec(sequence=…), or leave split out"
        )
    if flat.num_samples:
        structure = flat.structure
        check_alike(flat.lengths, structure.columns, structure.roles, structure.leaves)


def divisible_in_round(
    cost: Cost,
    batches: Sequence[Any],
    flats: Sequence[FlatBatch],
    costs: Sequence[Costs],
    memories: Sequence[NDArray[np.float64]],
    caps: Sequence[float] | None,
) -> NDArray[np.float64] | None:
    """`divisible_samples` of all batches of a round, numbered in the round."""
    tables, begin = [], 0
    for number, (batch, flat, values) in enumerate(zip(batches, flats, costs, strict=True)):
        if flat.num_samples:
            memory, largest = (None, np.inf) if caps is None else (memories[number], max(caps))
            table = divisible_samples(cost, batch, flat, values, memory=memory, largest_cap=largest)
            if table is not None:
                table[:, 0] += begin
                tables.append(table)
        begin += flat.num_samples
    return np.concatenate(tables) if tables else None


def divisible_samples(
    cost: Cost,
    batch: Any,
    flat: FlatBatch,
    costs: Costs,
    *,
    memory: NDArray[np.float64] | None = None,
    largest_cap: float = np.inf,
) -> NDArray[np.float64] | None:
    """The heaviest samples of a batch, with what their positions cost; those alone are ever split.

    (m, WIDTH) of `table_of`, numbered in the batch; None where there are none. `memory` is what the caps count.
    """
    exceeds = np.zeros(len(costs), np.bool_) if memory is None else memory > largest_cap
    chosen = np.flatnonzero((costs >= max(SHARE * float(costs.sum()), np.finfo(np.float64).tiny)) | exceeds)
    if not chosen.size:
        return None
    heaviest_first = np.lexsort((chosen, -costs[chosen].astype(np.float64), ~exceeds[chosen]))
    chosen = np.sort(chosen[heaviest_first[:MOST]])
    spans: SpanCosts | None = cost.spans(batch)  # type: ignore[attr-defined]
    flat.check_unchanged("cost")
    if spans is None:
        _warn("it cannot say what positions of a sample cost")
        return None
    if len(spans) != len(costs):
        raise ValueError(f"spans of the cost are of {len(spans)} samples; return those of all {len(costs)}")
    spans = spans.take(chosen)
    first_items, fits = _first_items(spans, _items(flat, chosen))
    # the others stay whole: as those of a cost that is scaled, or of a sequence that has more than the cost counts
    fits &= np.isclose(spans.whole, costs[chosen].astype(np.float64), rtol=1e-7) & (spans.num_cuts > 0)
    if not fits.any():
        if (spans.num_cuts > 0).any():
            _warn("its spans are not those of its costs, or of the fields in BatchSpec.sequence")
        return None
    table = table_of(spans.take(fits), chosen[fits], first_items[fits])
    if problem := check_table(table, costs):
        _warn(f"spans{problem}")
        return None
    return table


def _items(flat: FlatBatch, chosen: NDArray[np.int64]) -> NDArray[np.int64]:
    """Items of samples, as many in all fields of the sequence."""
    roles = flat.structure.roles
    column = next((column for column, role in enumerate(roles) if role > 0), None)
    if column is None:  # the batch has none of them
        return np.zeros(len(chosen), np.int64)
    items: NDArray[np.int64] = flat.lengths[chosen, column] // roles[column]
    return items


def _first_items(spans: SpanCosts, items: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """The position of each sample's first item, and whether its items fill its positions at all.

    Items may be all positions, or all but candidates or targets at the end, or contextual ones at the beginning. Where
    there are as many of either, they are behind the context: costs count it beside the fields of the sequence.
    """
    filled = spans.granule * items
    firsts, fits = np.zeros(len(spans)), np.zeros(len(spans), np.bool_)
    for first in (spans.head, 0.0):
        for tail in (0.0, spans.candidates, spans.targets):
            matches = ~fits & (first + filled + tail == spans.positions)
            firsts, fits = np.where(matches, first, firsts), fits | matches
    return firsts, fits & ((spans.head - firsts) % spans.granule == 0)


@cache
def _warn(why: str) -> None:
    """Once a process for each reason: a loop asks at every step."""
    logger.warning("samples of this loader's batches are not split, although split is set: of the cost, %s", why)


@cache
def warn_of_unasked_splits(name: str) -> None:
    """Once a process for each loader: a loop that does not ask for them trains every step so."""
    logger.warning(
        "%s: some samples of a batch lay on several ranks (BalanceOptions.split), but the loop went on to the next one "
        "without having asked for its splits: a model that takes pieces for whole samples computes other losses and "
        "gradients; give it PieceGroup.pieces(loader.splits), or leave split out, as for evaluation by a balancer of "
        "its own (docs/train/giants.md)", name,
    )  # fmt: skip
