"""Loops over data of which every sample is known, for the tests of how loops begin and end."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch

from tests.trainer_client.balancing.jobs import connect, make_batch
from trainer_client import BalanceOptions, Balancer

STEPS = 8
Ledger = dict[str, list[list[int]]]
"""Ids of the samples of each batch that a rank got, by loop."""


def source(rank: int, loop: int, steps: int = STEPS) -> list[dict[str, torch.Tensor]]:
    """Batches whose ids tell loop, step and rank."""
    return [make_batch(rank, step + 100 * loop, 6) for step in range(steps)]


def balancer_of(address: str | None, **options: Any) -> Balancer:
    patient = BalanceOptions(timeout=timedelta(seconds=20), group_timeout=timedelta(seconds=60), **options)
    if address is None:
        return Balancer.embedded(options=patient)
    if address == "off":
        return Balancer.off(options=patient)
    return connect(address, job=f"leaving-{sorted(options.items())}", options=patient)


def failing(batches: list[Any], after: int) -> Iterator[Any]:
    yield from batches[:after]
    raise OSError("the disk is gone")
