"""Loss scales of batches that are fetched ahead: each batch has its own, and who asks for another's is told."""

import logging
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch

from benchmarks.harness.ranks import run_ranks
from trainer_client import BalancedLoader, Balancer, TokenCost
from trainer_client.balancing.pipelines import balanced_batches

SIZES = (4, 4, 1, 3, 5, 2)


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def _batches(rank: int, sizes: tuple[int, ...]) -> Iterator[dict[str, torch.Tensor]]:
    for size in sizes:
        yield {"tokens": torch.arange(1, size + 1) + rank}


def fetch_and_ask(rank: int, how: str, sizes: tuple[int, ...], ahead: int) -> tuple[Any, ...]:
    """Right and read scales of all batches, and what was logged."""
    kept = _Kept()
    logging.getLogger("trainer_client.balancing.handed").addHandler(kept)
    with Balancer.embedded() as balancer:
        loader = BalancedLoader(list(_batches(rank, sizes)), balancer, cost=TokenCost(tokens="tokens"))
        right, read = [], []
        if how == "own":
            batches = balanced_batches(loader)
            while fetched := list(islice(batches, ahead)):
                right += [batch.report.loss_scale for batch in fetched]
                read += [batch.loss_scale for batch in fetched]
            return right, read, kept.messages
        rows = iter(loader)
        while True:
            count = 0
            for _ in islice(rows, ahead):
                count += 1
                right.append(loader.report.loss_scale)
            if not count:
                return right, read, kept.messages
            for _ in range(count):
                read.append(loader.mean_loss_scale if how == "mean" else loader.loss_scale)


@pytest.mark.parametrize("how", ["sum", "mean"])
def test_a_loop_that_asks_late_is_told_that_its_gradients_are_wrong(how: str) -> None:
    for right, read, told in run_ranks(2, fetch_and_ask, how, SIZES, 3):
        assert read != right
        assert len(told) == 1
        assert "asked for 3 times after 3" in told[0]
        assert "balanced_batches(loader)" in told[0]


def test_batches_that_bring_their_scale_are_right() -> None:
    for right, read, told in run_ranks(2, fetch_and_ask, "own", SIZES, 3):
        assert read == right
        assert len(set(read)) > 1
        assert not told


@pytest.mark.parametrize(("how", "sizes", "ahead"), [("sum", SIZES, 1), ("sum", (4, 4, 4, 4), 2)])
def test_a_loop_that_is_right_is_told_nothing(how: str, sizes: tuple[int, ...], ahead: int) -> None:
    for right, read, told in run_ranks(2, fetch_and_ask, how, sizes, ahead):
        assert read == right
        assert not told
