"""From what the ranks agreed on to the move of a batch's samples."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from trainer_client.balancing.batches import FlatBatch
from trainer_client.balancing.groups import Groups
from trainer_client.balancing.redistribution import Pending
from trainer_client.balancing.redistribution.copying import pick
from trainer_client.balancing.report import Counters
from trainer_client.balancing.tickets import Outcome, Ticket
from trainer_client.balancing.tracing import RoundTrace


class Mover:
    """Starts the moves of a stream; collective wherever samples move."""

    def __init__(self, groups: Groups, counters: Counters, *, to_gpu: bool = False) -> None:
        """Has started none yet.

        Args:
            groups: The ranks.
            counters: What is counted.
            to_gpu: Batches go to this rank's GPU where no device is named; the same on all ranks.
        """
        self._groups = groups
        self._to_gpu = to_gpu
        self._counters = counters
        self._started = 0
        self._ended = 0

    @property
    def rest(self) -> int | None:
        """How many collective moves there were; None while one is in flight."""
        return self._ended if self._ended == self._started else None

    def move(
        self, flats: Sequence[FlatBatch], ticket: Ticket, device: torch.device | str | None, batch: int
    ) -> Pending:
        """Starts to move the samples of a batch.

        Args:
            flats: All batches of the round on this rank.
            ticket: The round, agreed on.
            device: Where the result shall be; None: where the batch is, or this rank's GPU.
            batch: Which batch of the window.
        """
        if device is None and self._to_gpu:
            device = _gpu_of(flats)
        outcome = ticket.future.result()
        moved = outcome.verdict.moved
        if ticket.trace is not None:
            ticket.trace.moving()
        began = time.perf_counter()
        self._started += moved
        samples, piece = samples_of(outcome, flats, batch), outcome.plan.slices[batch]
        pending = self._groups.start(samples, piece, moved=moved, device=device)
        self._counters.redistribution_seconds += time.perf_counter() - began
        pending.then(partial(self._land, moved, ticket.trace))
        return pending

    def goes_to(self, flats: Sequence[FlatBatch], device: torch.device | str | None) -> torch.device | None:
        """Where the result of a move is; None where the batch is, if nobody knows yet where that is."""
        if device is None and self._to_gpu:
            return _gpu_of(flats)
        if device is None:
            return next((flat.device for flat in flats if flat.device is not None), None)
        where = torch.device(device)
        if where == torch.device("cuda"):
            return torch.device("cuda", torch.cuda.current_device())
        return where

    def _land(self, moved: bool, trace: RoundTrace | None) -> None:
        self._ended += moved
        if trace is not None:
            trace.moved()


def _gpu_of(flats: Sequence[FlatBatch]) -> torch.device:
    found = next((flat.device for flat in flats if flat.num_samples), None)
    if found is not None and found.type == "cuda":
        return found
    return torch.device("cuda", torch.cuda.current_device())


def samples_of(outcome: Outcome, flats: Sequence[FlatBatch], batch: int) -> FlatBatch:
    """This rank's samples that are trained in a batch of the window, whichever rank trains them."""
    columns = outcome.plan.slices[batch].source_totals.shape[1]
    if batch < len(flats) and not outcome.reports[batch].samples and flats[batch].num_jagged == columns:
        return flats[batch]  # as it was loaded: no rank knows better
    if outcome.plan.steps is None:
        return flats[batch] if batch < len(flats) and flats[batch].num_samples else _nothing(outcome)
    begins = np.cumsum([0, *(flat.num_samples for flat in flats)])
    chosen = [np.flatnonzero(outcome.plan.steps[begins[i] : begins[i + 1]] == batch) for i in range(len(flats))]
    some = [i for i, samples in enumerate(chosen) if samples.size]
    return pick([flats[i] for i in some], [chosen[i] for i in some]) if some else _nothing(outcome)


def _nothing(outcome: Outcome) -> FlatBatch:
    assert outcome.template is not None
    return outcome.template
