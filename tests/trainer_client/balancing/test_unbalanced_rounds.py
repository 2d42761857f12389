"""Rounds that no rank finds a plan for: they are told of, but do not fill the log."""

from __future__ import annotations

import logging
import re

import numpy as np
import torch

from benchmarks.harness.ranks import run_ranks
from trainer_client import BalancedLoader, BalanceOptions, Balancer, RoundReport


def _train(rank: int, batches: int, invalid: int = -1) -> tuple[list[str], list[RoundReport]]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("trainer_client").addHandler(handler)
    data = [{"tokens": torch.tensor([5, 9, 2])} for _ in range(batches)]
    options = BalanceOptions(memory_caps=[1, 1] if invalid < 0 else None)
    with Balancer.embedded(options=options) as balancer:
        loader = BalancedLoader(data, balancer, cost=lambda batch: batch["tokens"] * (-1 if rank == invalid else 1))
        reports = [loader.report for _ in loader]
    assert {report.mode.value for report in reports} == {"identity"}
    return said, reports


def test_one_rank_tells_of_fewer_and_fewer_of_them() -> None:
    (said, stayed), (nothing, too) = run_ranks(2, _train, 9)
    assert len(stayed) == len(too) == 9
    assert [(report.imbalance, report.home_load) for report in stayed] == [(1.0, 16.0)] * 9
    assert nothing == []
    counts = [re.search(r"stays unbalanced \((\d+) so far\): .*raise memory_caps", line) for line in said]
    assert [found and int(found[1]) for found in counts] == [1, 2, 4, 8]


def test_costs_that_cannot_be_used_are_told_by_their_rank_and_the_first_again_and_again() -> None:
    results = run_ranks(3, _train, 9, 1)
    for rank, (_, reports) in enumerate(results):
        for report in reports:
            np.testing.assert_equal(report.home_load, np.nan if rank == 1 else 16.0)
            np.testing.assert_equal(report.own_load, np.nan if rank == 1 else 16.0)
            assert np.isnan([report.imbalance_before, report.imbalance, report.max_load, report.lower_bound]).all()
    first, own, other = (said for said, _ in results)
    assert own == other == []  # the lead says it for all
    why = r"the costs of rank\(s\) 1 cannot be used: .*must be finite and at least 0"
    counts = [re.search(rf"stays unbalanced \((\d+) so far\): .*{why}", line) for line in first]
    assert [found and int(found[1]) for found in counts] == [1, 2, 4, 8]
