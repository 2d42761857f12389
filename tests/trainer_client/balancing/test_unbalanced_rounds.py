"""Rounds that no rank finds a plan for: they are told of, but do not fill the log."""

from __future__ import annotations

import logging
import re

import torch

from benchmarks.harness.ranks import run_ranks
from trainer_client import BalancedLoader, BalanceOptions, Balancer, TokenCost


def _train(rank: int, batches: int) -> tuple[list[str], int]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("trainer_client").addHandler(handler)
    data = [{"tokens": torch.tensor([5, 9, 2])} for _ in range(batches)]
    with Balancer.embedded(options=BalanceOptions(memory_caps=[1, 1])) as balancer:
        loader = BalancedLoader(data, balancer, cost=TokenCost(tokens="tokens"))
        modes = [loader.report.mode.value for _ in loader]
    return said, modes.count("identity")


def test_one_rank_tells_of_fewer_and_fewer_of_them() -> None:
    (said, stayed), (nothing, too) = run_ranks(2, _train, 9)
    assert stayed == too == 9
    assert nothing == []
    counts = [re.search(r"stays unbalanced \((\d+) so far\): .*raise memory_caps", line) for line in said]
    assert [found and int(found[1]) for found in counts] == [1, 2, 4, 8]
