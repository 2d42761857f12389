"""Ranks that compute more slowly than others get less to do; with a balancer, and by a timer: `test_delays`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch

from evenkeel.partitioning.speeds import ALL_EQUAL
from tests.trainer_client.balancing.jobs import balancer_of, logged, run_in_turn
from trainer_client import BalancedLoader, BalanceOptions
from trainer_client.balancing.contribution import Measure
from trainer_client.balancing.reading import Measured

SIZE, STEPS = 24, 60


def source(rank: int) -> Iterator[dict[str, torch.Tensor]]:
    for step in range(STEPS):
        costs = np.random.default_rng([rank, step]).integers(50, 150, SIZE)
        yield {"cost": torch.from_numpy(costs), "id": torch.arange(SIZE) + 1000 * step + 1_000_000 * rank}


def run_job(rank: int, name: str, slow: float, options: dict[str, Any]) -> dict[str, Any]:
    """What a rank trains, its share of the mean load, and what is learned, by step; rank 1 says it is `slow`."""
    said = logged("trainer_client.balancing.learned_speeds")
    ids, shares, learned = [], [], []
    chosen = BalanceOptions(timeout=timedelta(seconds=20), counts="free", **options)
    with balancer_of(None, name, options=chosen) as balancer:
        loader: BalancedLoader[Any] = BalancedLoader(source(rank), balancer, cost=lambda batch: batch["cost"])
        for batch in loader:
            report = loader.report
            if not math.isnan(slow):
                loader.took(report.own_load * (slow if rank else 1e-6))
            ids.append(batch["id"].tolist())
            shares.append(report.own_load / report.mean_load)
            learned.append(report.learned)
    return {"ids": ids, "shares": shares, "learned": learned, "said": said}


def test_a_slow_rank_gets_less_to_do_unless_it_does_not_tell_or_that_is_said() -> None:
    ways: dict[str, tuple[float, dict[str, Any]]] = {
        "slow": (2e-6, {}), "never": (math.nan, {}), "off": (2e-6, {"learn_speeds": False}),
        "given": (2e-6, {"speeds": [1.0, 0.5]}),
    }  # fmt: skip
    by_way = run_in_turn(2, *((run_job, name, *way) for name, way in ways.items()))
    slow, never, off, given = by_way
    for first, second in by_way:
        assert first["learned"] == second["learned"]
        for step, (one, other) in enumerate(zip(first["ids"], second["ids"], strict=True)):
            assert sorted(one + other) == [1_000_000 * r + 1000 * step + i for r in range(2) for i in range(SIZE)]
    (straggler,) = slow[0]["learned"][-1].stragglers
    assert (straggler.rank, straggler.speed) == (1, 0.5)
    is_learned = [bool(learned) for learned in slow[0]["learned"]]
    assert is_learned == sorted(is_learned)  # once, and for good
    assert is_learned.index(True) <= 25
    assert np.allclose(slow[1]["shares"][:3], 1, atol=0.02)
    assert np.allclose(slow[1]["shares"][-10:], 2 / 3, atol=0.02)
    (line,) = slow[0]["said"]  # the lead says who it is
    assert "rank 1 on " in line
    assert "computes 0.50 times as fast as the median rank" in line
    assert not slow[1]["said"]
    assert [each["ids"] for each in never] == [each["ids"] for each in off]
    assert all(learned == ALL_EQUAL for learned in off[0]["learned"])
    assert not any(given[0]["learned"])  # what users say of speeds is not learned again
    assert np.allclose(given[1]["shares"], 2 / 3, atol=0.03)


def test_a_measure_is_sent_once_and_is_the_mean_of_several_without_those_that_tell_nothing() -> None:
    measured = Measured()
    measured.add(10, 1.0, 0.5)
    measured.add(30, torch.tensor(2.0), 0.7, 0.4)  # type: ignore[arg-type]
    wrong: list[Any] = ["1", None, [1.0], torch.ones(2), math.nan, math.inf, 0.0, -1.0]
    for nothing in [(2.0, one) for one in wrong] + [(0, 1.0), (math.inf, 1.0), (5, 1.0, -1.0), (5, 1.0, 0.0, math.nan)]:
        measured.add(*nothing)
    assert measured.take() == pytest.approx((20.0, 1.5, 0.6, 0.2, 0.0))
    assert measured.take() == Measure()
    measured.add(2.0, torch.tensor(0.5))  # type: ignore[arg-type]
    assert measured.take() == Measure(2.0, 0.5)
