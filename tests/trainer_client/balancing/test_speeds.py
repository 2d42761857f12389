"""Ranks that compute more slowly than others get less to do, on real ranks, with a real balancer and without one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.harness.balancer_process import ServiceProcess
from evenkeel.partitioning.speeds import ALL_EQUAL
from tests.trainer_client.balancing.jobs import balancer_of, logged, run_in_turn
from trainer_client import BalancedLoader, BalanceOptions
from trainer_client.balancing.contribution import Measure
from trainer_client.balancing.reading import Measured

SIZE = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A loop whose ranks say what their steps took."""

    address: str | None  # of the balancer; None: embedded
    name: str  # of the job
    steps: int = 60  # of the loop
    # seconds per unit of cost of each rank; NaN: says nothing
    slow: tuple[float, ...] = (1e-6, 2e-6)
    options: BalanceOptions = field(
        default_factory=lambda: BalanceOptions(timeout=timedelta(seconds=20), counts="free")
    )  # of balancing


def source(rank: int) -> Iterator[dict[str, torch.Tensor]]:
    for step in itertools.count():
        costs = np.random.default_rng([rank, step]).integers(50, 150, SIZE)
        yield {"cost": torch.from_numpy(costs), "id": torch.arange(SIZE) + 1000 * step + 1_000_000 * rank}


def run_job(rank: int, job: Job) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    said = logged("trainer_client.balancing.learned_speeds")
    with balancer_of(job.address, job.name, options=job.options) as balancer:
        loader: BalancedLoader[Any] = BalancedLoader(source(rank), balancer, cost=lambda batch: batch["cost"])
        batches = iter(loader)
        for batch in itertools.islice(batches, job.steps):
            report = loader.report
            if not math.isnan(job.slow[rank]):
                loader.took(report.own_load * job.slow[rank])
            records.append(
                {
                    "ids": batch["id"].tolist(), "load": report.own_load, "learned": report.learned,
                    "mode": report.mode.value, "imbalance": report.imbalance, "mean": report.mean_load,
                    "stragglers": [(slow.rank, slow.speed) for slow in report.stragglers], "said": said,
                }
            )  # fmt: skip
        batches.close()  # type: ignore[attr-defined]
    return records


def shares(results: list[list[dict[str, Any]]], rank: int) -> list[float]:
    """Of the mean load, what a rank has to do at each step."""
    return [record["load"] / record["mean"] for record in results[rank]]


def check_alike(results: list[list[dict[str, Any]]], mode: str) -> None:
    """All ranks know the same and train each sample once."""
    for number, step in enumerate(zip(*results, strict=True)):
        assert len({record["learned"] for record in step}) == 1
        assert {record["mode"] for record in step} == {mode}
        ids = sorted(one for record in step for one in record["ids"])
        assert ids == [1_000_000 * rank + 1000 * number + i for rank in range(len(step)) for i in range(SIZE)]


@pytest.fixture(scope="module")
def of_three(balancer: ServiceProcess) -> dict[Any, Any]:
    """Jobs of three ranks, by where they are planned."""
    addresses = {"embedded": None, "service": balancer.address}
    jobs = {
        mode: Job(address=address, name=f"slow-{mode}", slow=(1e-6, 1e-6, 2e-6)) for mode, address in addresses.items()
    }
    return dict(zip(jobs, run_in_turn(3, *((run_job, job) for job in jobs.values())), strict=True))


@pytest.mark.parametrize("mode", ["embedded", "service"])
def test_a_slow_rank_gets_less_to_do(of_three: dict[Any, Any], mode: str) -> None:
    results = of_three[mode]
    check_alike(results, mode)
    assert results[0][-1]["stragglers"] == [(2, 0.5)]
    (line,), *others = (result[-1]["said"] for result in results)  # the lead says who it is
    assert "rank 2 on " in line
    assert "computes 0.50 times as fast as the median rank" in line
    assert others == [[], []]
    assert np.allclose(shares(results, 0)[:3], 1, atol=0.02)
    assert np.allclose(shares(results, 2)[-10:], 0.6, atol=0.02)  # 0.5 of 2.5
    assert np.allclose(shares(results, 1)[-10:], 1.2, atol=0.02)
    assert all(record["imbalance"] < 1.02 for record in results[0][-10:])  # of load over speed
    learned = [bool(record["learned"]) for record in results[0]]
    assert learned == sorted(learned)  # once, and for good
    assert learned.index(True) <= 25


def test_without_times_or_with_learning_off_nothing_changes(balancer: ServiceProcess) -> None:
    off = BalanceOptions(timeout=timedelta(seconds=20), counts="free", learn_speeds=False)
    ways = [
        Job(address=None, name="never", slow=(math.nan, math.nan), steps=30),
        Job(address=None, name="off", steps=30, options=off),
        Job(address=balancer.address, name="off-served", steps=30, options=off),
    ]
    options = BalanceOptions(timeout=timedelta(seconds=20), counts="free", speeds=[1.0, 0.5])
    ways.append(Job(address=None, name="given", steps=40, options=options))
    never, embedded, served, given = run_in_turn(2, *((run_job, job) for job in ways))
    for rank in range(2):
        ids = [[record["ids"] for record in result[rank]] for result in (never, embedded, served)]
        assert ids[0] == ids[1] == ids[2]
        assert all(record["learned"] == ALL_EQUAL for record in embedded[rank])
        assert {record["mode"] for record in served[rank]} == {"service"}
    # what users say of speeds is not learned again
    assert not any(record["learned"] for record in given[0])
    assert np.allclose(shares(given, 1), 2 / 3, atol=0.03)


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
