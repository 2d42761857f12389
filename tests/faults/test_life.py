"""What befalls a job by itself: bad costs, crashes, restarts, and several loaders."""

from __future__ import annotations

import atexit
import os
import signal
import threading
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.harness.balancer_process import ServiceProcess
from benchmarks.harness.crew import Crew
from benchmarks.harness.ranks import run_ranks
from benchmarks.harness.steps import Steps
from tests.trainer_client.balancing.jobs import (
    SPEC,
    Job,
    JobData,
    check_complete,
    connect,
    cost_of,
    make_batch,
    run_job,
)
from trainer_client import BalancedLoader, BalanceOptions


def test_a_cost_that_is_no_number_on_one_rank(crew: Crew, balancer: ServiceProcess) -> None:
    steps = Steps(address=balancer.address, name="nan", timeout=5.0, bad_costs=frozenset({(1, 4), (1, 5)}))
    assert steps.size(1, 4)
    with crew.run(steps) as run:
        run.until(reason="invalid_costs")
        run.until(mode="service", times=4)
    assert run.modes[4:6] == ["identity", "identity"]
    assert run.results[0]["breaker_changes"] == 0
    logged, *others = (result["warnings"] for result in run.results)
    assert [line for line in logged if "cost of sample 0 is nan" in line]
    assert not any(others), "only the lead knows of all"


def crash(rank: int, job: Job, how: str, victim: int = 1) -> Any:
    """One rank dies at its third step; the others must hear of it and be able to clean up."""
    batches = 0
    try:
        with job.balancer() as balancer:
            for _ in BalancedLoader(JobData(job, rank), balancer, cost=cost_of, spec=SPEC):
                batches += 1
                if batches == 3 and rank == victim:
                    os._exit(3) if how == "exits" else os.kill(os.getpid(), signal.SIGKILL)
    except RuntimeError as error:
        return batches, str(error), [thread.name for thread in threading.enumerate() if "evenkeel" in thread.name]
    return batches, "ended as if nothing had happened", []


@pytest.mark.parametrize(("where", "how"), [("service", "killed"), ("embedded", "exits")])
def test_a_failed_process_group_is_raised_on_every_rank(balancer: ServiceProcess, where: str, how: str) -> None:
    job = Job(steps=(50, 50, 50), address=balancer.address if where == "service" else None, name="crash")
    results = run_ranks(3, crash, job, how, check=False)
    assert results[1] is None  # it died
    for batches, error, threads in (results[0], results[2]):
        assert batches < 50
        assert "closed by peer" in error or "onnection" in error or "gloo" in error, error
        assert threads == []


def incarnation(rank: int, job: Job, restart: int, crashes: bool) -> Any:
    """What a launcher's agent does: it names the run and counts restarts."""
    os.environ.update(TORCHELASTIC_RUN_ID="run-1", TORCHELASTIC_RESTART_COUNT=str(restart))
    records = run_job(rank, replace(job, epochs=1)) if not crashes else None
    if crashes:
        balancer = job.balancer()
        for number, _ in enumerate(BalancedLoader(JobData(job, rank), balancer, cost=cost_of, spec=SPEC)):
            if number == 2:
                dist.barrier()
                os._exit(1)  # without a word to the service
    return records


def test_a_job_restarts_with_another_world_size(balancer: ServiceProcess) -> None:
    job = Job(steps=(5, 5, 5), address=balancer.address, name="elastic")
    run_ranks(3, incarnation, job, 0, True, check=False)
    smaller = replace(job, steps=(5, 4))
    results = run_ranks(2, incarnation, smaller, 1, False)
    check_complete(smaller, results)
    assert "service" in {record["mode"] for record in results[0]}, "it took over at once"


def two_loaders(rank: int, address: str) -> list[tuple[str, list[int], str]]:
    """Training with an evaluation in the middle of the epoch, and children that come and go."""
    trained: list[tuple[str, list[int], str]] = []

    def note(name: str, batch: dict[str, torch.Tensor], loader: Any) -> None:
        trained.append((name, batch["id"].tolist(), loader.report.mode.value))

    options = BalanceOptions(timeout=timedelta(seconds=20))
    with connect(address, job="two-loaders", options=options) as balancer:
        train, evaluate = (
            BalancedLoader(
                [make_batch(rank, first + step, 5 + rank) for step in range(6)], balancer,
                cost=cost_of, spec=SPEC, name=name,
            )
            for name, first in (("train", 0), ("eval", 50))
        )  # fmt: skip
        for step, batch in enumerate(train):
            note("train", batch, train)
            if step == 1:
                for other in evaluate:
                    note("eval", other, evaluate)
            if step == 3:  # a child that ends in order must not take the parent's streams along
                child = os.fork()
                if child == 0:
                    atexit._run_exitfuncs()
                    os._exit(0)
                assert os.waitpid(child, 0)[1] == 0
    return trained


def test_train_and_eval_at_once_and_children_that_exit(balancer: ServiceProcess) -> None:
    results = run_ranks(2, two_loaders, balancer.address)
    for name, first in (("train", 0), ("eval", 50)):
        ids = sorted(sample for result in results for kind, samples, _ in result if kind == name for sample in samples)
        wanted = sorted(
            sample for rank in range(2) for step in range(6)
            for sample in make_batch(rank, first + step, 5 + rank)["id"].tolist()
        )  # fmt: skip
        assert ids == wanted
    assert {mode for _, _, mode in results[0]} == {"service"}
    assert [kind for kind, _, _ in results[0]] == ["train"] * 2 + ["eval"] * 6 + ["train"] * 4
