"""Windows of several batches on real ranks, against a real balancer and without one."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch

from benchmarks.harness.balancer_process import ServiceProcess
from benchmarks.harness.ranks import run_ranks
from tests.trainer_client.balancing.jobs import SPEC, Job, make_batch, run_in_turn, run_job
from trainer_client import BalancedLoader, BalanceOptions, Balancer

WINDOW = 3


def options(**changes: Any) -> BalanceOptions:
    return BalanceOptions(**{"timeout": timedelta(seconds=10), "window": WINDOW, **changes})


Records = list[list[dict[str, Any]]]
"""By rank and step."""


def run(*jobs: Job) -> list[Records]:
    """Runs jobs of as many ranks, and checks what came of each."""
    by_job = run_in_turn(len(jobs[0].steps), *((run_job, job) for job in jobs))
    for job, results in zip(jobs, by_job, strict=True):
        check(job, results)
    return by_job


def check(job: Job, results: Records) -> None:
    """Checks that every sample of a window was trained once in it, in batches of the sizes loaded."""
    assert {len(records) for records in results} == {max(job.steps)}
    for first in range(0, max(job.steps), WINDOW):
        last = min(first + WINDOW, max(job.steps))
        trained, expected = [], []
        for step in range(first, last):
            records = [result[step] for result in results]
            ids = [sample for record in records for sample in record["ids"]]
            trained += ids
            expected += job.expected(step)
            assert len(ids) == len(job.expected(step))
            assert {(record["mode"], record["reason"], record["samples"]) for record in records} == {
                (records[0]["mode"], records[0]["reason"], len(ids))
            }
            for record in records:
                assert record["load"] == record["own_load"]
                assert record["loss_scale"] == (len(job.steps) / len(ids) if ids else 0.0)
                assert record["round"] == first // WINDOW
        assert sorted(trained) == sorted(expected)


def total(results: Records) -> float:
    """Sum over the steps of the largest load: what the job's time is proportional to."""
    return sum(max(record["load"] for record in step) for step in zip(*results, strict=True))


def test_samples_meet_within_their_window_only(balancer: ServiceProcess) -> None:
    job = Job(steps=(7, 7, 7), batch_size=3, address=balancer.address, name="window-service", options=options())
    without = replace(job, address=None, options=options(window=1))
    served, embedded, alone = run_in_turn(3, *((run_job, each) for each in (job, replace(job, address=None), without)))
    check(job, served)
    check(job, embedded)
    assert {record["mode"] for record in served[0]} == {"service"}
    assert {record["mode"] for record in embedded[0]} == {"embedded"}
    for rank in range(3):
        assert [record["ids"] for record in served[rank]] == [record["ids"] for record in embedded[rank]]
        assert [record["imbalance"] for record in served[rank]] == [record["imbalance"] for record in embedded[rank]]
    assert total(served) < 0.9 * total(alone)  # small batches of data with heavy tails
    steps = [record["ids"] for record in served[0]]
    assert any(sample // 1000 % 1000 != index for index, ids in enumerate(steps) for sample in ids)


def test_ranks_that_run_out_take_part_in_the_last_windows() -> None:
    (results,) = run(Job(steps=(1, 5, 8), options=options(depth=1)))
    assert any(record["ids"] for record in results[0][1:])


def test_windows_of_two_ranks_and_of_one() -> None:
    gone = options(timeout=timedelta(seconds=1))
    _, off, capped, alone = run(
        Job(steps=(0, 2), options=options(depth=3)),
        Job(steps=(4, 2), address="off", options=options()),
        Job(steps=(4, 4), options=options(memory_caps=[1.0, 1.0])),
        Job(steps=(6, 6), address="127.0.0.1:9", name="gone", options=gone),
    )
    for rank, records in enumerate(off):  # every sample stays in its batch
        for step, record in enumerate(records):
            assert record["ids"] == (make_batch(rank, step, len(record["ids"]))["id"].tolist() if record["ids"] else [])
    assert {(record["mode"], record["reason"]) for record in capped[0]} == {("identity", "partition_failed")}
    assert {record["mode"] for record in alone[0]} == {"embedded"}
    run(Job(steps=(5,), options=options()))


def _costs_fail_in_one_batch(rank: int) -> list[tuple[str, str, list[int]]]:
    def cost(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return batch["id"] * (-1 if rank == 1 and int(batch["id"][0]) % 1_000_000 == 4000 else 1)

    batches = [{"id": torch.arange(4) + 1000 * step + 1_000_000 * rank} for step in range(6)]
    with Balancer.embedded(options=options()) as balancer:
        loader = BalancedLoader(batches, balancer, cost=cost)
        return [(loader.report.mode.value, loader.report.reason.value, batch["id"].tolist()) for batch in loader]


def test_invalid_costs_of_one_batch_leave_its_whole_window_at_home() -> None:
    results = run_ranks(2, _costs_fail_in_one_batch)
    for rank, steps in enumerate(results):
        assert [mode for mode, _, _ in steps] == ["embedded"] * 3 + ["identity"] * 3
        assert [ids[0] for _, _, ids in steps[3:]] == [3000 + 1_000_000 * rank + 1000 * i for i in range(3)]
        assert steps[4][1] == "invalid_costs"


def _submits_by_hand(rank: int) -> list[list[int]]:
    batches = [make_batch(rank, step, 6) for step in range(4)]
    trained = []
    with Balancer.embedded(options=options(window=4)) as balancer:
        stream = balancer.stream()
        ticket = stream.submit_window(batches, cost=lambda batch: batch["count"], spec=SPEC)
        outcome = stream.directive(ticket)
        for index in range(len(outcome.reports)):
            moved = stream.start(ticket, outcome, batch=index).wait().unflatten()
            trained.append(moved["id"].tolist())
        moved = balancer.redistribute(
            batches[0], balancer.submit(batches[0], cost=lambda batch: batch["count"], spec=SPEC), spec=SPEC
        )
        trained.append(moved["id"].tolist())  # a window that holds one batch only
        with pytest.raises(ValueError, match="5 batches for a window of 4"):
            stream.submit_window([*batches, batches[0]], cost=lambda batch: batch["count"], spec=SPEC)
    return trained


def test_a_loop_of_its_own_submits_windows() -> None:
    results = run_ranks(2, _submits_by_hand)
    trained = sorted(sample for steps in results for ids in steps[:4] for sample in ids)
    assert trained == sorted(
        int(sample) for rank in range(2) for step in range(4) for sample in make_batch(rank, step, 6)["id"]
    )
    last = sorted(sample for steps in results for sample in steps[4])
    assert last == sorted(int(sample) for rank in range(2) for sample in make_batch(rank, 0, 6)["id"])
