"""From the flattened parts of a batch to packed sequences, on the device and without reading it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from examples.datasets import SequenceBatch
from trainer_client.attention import Pieces


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """Where the tokens of a batch are.

    The parts of all samples lie one after the other: n·context features, history items, actions (where interleaved),
    candidates. The sequences pack them sample by sample.

    Attributes:
        offsets: (n + 1,) int32, where the sequences begin.
        beginnings: (m,) int64, which of them begin with their context; None: all. The later parts of a sample do not.
        order: (tokens,) int64, which part each place of the sequences holds.
        positions: (tokens,) int64, place within the sample.
        candidates: (Σ candidates,) int64, places of the candidates.
        num_candidates: (n,) int32.
    """

    offsets: torch.Tensor
    beginnings: torch.Tensor | None
    order: torch.Tensor
    positions: torch.Tensor
    candidates: torch.Tensor
    num_candidates: torch.Tensor


def arrange(batch: SequenceBatch, *, interleaved: bool, pieces: Pieces | None = None) -> Sequences:
    """The places of a batch's tokens, some of whose samples may be pieces."""
    device = batch.num_history.device
    samples, context = batch.context.shape
    stride = 2 if interleaved else 1
    num_history, num_candidates = batch.num_history.long(), batch.num_candidates.long()
    lengths = batch.sequence_lengths(interleaved).long()
    first = torch.full_like(lengths, context)  # place of the history in its sequence
    beginnings = preceding = None
    if pieces is not None:
        beginnings, preceding = pieces.beginnings(samples, device), pieces.preceding(samples, device)
        first = torch.where(preceding > 0, 0, context)
        lengths = lengths - context + first
    ends = lengths.cumsum(0)
    begins = ends - lengths
    numbers = torch.arange(samples, device=device)
    with_context = begins if beginnings is None else begins[beginnings]
    context_places = (with_context[:, None] + torch.arange(context, device=device)).reshape(-1)
    history_places = _places(begins + first, num_history, batch.history.shape[0], numbers, stride)
    candidate_places = _places(ends - num_candidates, num_candidates, batch.candidates.shape[0], numbers, 1)
    groups = [context_places, history_places]
    if interleaved:
        groups.append(history_places + 1)
    places = torch.cat([*groups, candidate_places])
    order = torch.empty_like(places)
    order[places] = torch.arange(places.shape[0], device=device)
    owner = torch.repeat_interleave(numbers, lengths, output_size=places.shape[0])
    if preceding is not None:
        begins = begins - preceding
    return Sequences(
        offsets=torch.cat([ends.new_zeros(1), ends]).int(),
        beginnings=beginnings,
        order=order,
        positions=torch.arange(places.shape[0], device=device) - begins[owner],
        candidates=candidate_places,
        num_candidates=num_candidates.int(),
    )


def _places(begins: torch.Tensor, counts: torch.Tensor, total: int, numbers: torch.Tensor, stride: int) -> torch.Tensor:
    """Places of `counts` tokens of each sample, `stride` apart from `begins` on."""
    owner = torch.repeat_interleave(numbers, counts, output_size=total)
    within = torch.arange(total, device=counts.device) - (counts.cumsum(0) - counts)[owner]
    return begins[owner] + stride * within
