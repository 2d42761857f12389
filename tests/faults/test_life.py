"""What befalls a job by itself: slow ranks, bad costs, crashes, restarts, twins, and several loaders."""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.harness.balancer_process import ServiceProcess, running_balancer, until_logged
from benchmarks.harness.crew import Crew
from benchmarks.harness.ranks import run_ranks
from benchmarks.harness.steps import Steps
from tests.trainer_client.balancing.jobs import SPEC, Job, check_complete, cost_of, make_batch, run_job
from trainer_client import BalancedLoader, BalanceOptions, Balancer


def test_a_cost_that_is_no_number_on_one_rank(crew: Crew, balancer: ServiceProcess) -> None:
    steps = Steps(address=balancer.address, name="nan", timeout=5.0, bad_costs=frozenset({(1, 4), (1, 5)}))
    assert steps.size(1, 4)
    with crew.run(steps) as run:
        run.until(reason="invalid_costs")
        run.until(mode="service", times=4)
    assert run.modes[4:6] == ["identity", "identity"]
    assert run.results[0]["breaker_changes"] == 0
    told, causes, others = (result["warnings"] for result in run.results)
    assert len(told) == len(causes) == 2  # of both rounds, by the first rank and where the costs are
    assert not others
    assert "cost of sample 0 is nan" in causes[0]


def test_a_slow_rank_is_not_the_services_fault(crew: Crew, balancer: ServiceProcess) -> None:
    with crew.run(Steps(address=balancer.address, name="slow", timeout=3.0, slow={(2, 4): 4.0})) as run:
        run.until(reason="undecided")
        run.until(mode="service", times=4)
    assert run.modes[4] == "embedded"
    assert run.results[0]["breaker_changes"] == 0
    waits = [result["records"][4]["wait"] for result in run.results]
    assert [wait > 1.5 for wait in waits] == [True, True, False], waits  # the others, for the slow one


def test_a_deadline_that_has_always_expired(crew: Crew, balancer: ServiceProcess) -> None:
    with crew.run(Steps(address=balancer.address, name="expired", timeout=1e-6)) as run:
        run.until(times=30)
    assert "no_decision" in run.reasons
    assert run.longest_wait < 5.0


def test_a_twin_of_the_same_name_is_refused_and_the_first_unharmed(crew: Crew, balancer: ServiceProcess) -> None:
    with crew.run(Steps(address=balancer.address, name="twins", pace=0.03, timeout=10.0)) as run:
        run.until(mode="service", times=2)
        options = BalanceOptions(timeout=timedelta(seconds=2))  # it is never served
        job = Job(steps=(6, 6), address=balancer.address, name="twins", options=options)
        twin = run_ranks(2, run_job, job)
        run.until(mode="service", times=2)
    check_complete(job, twin)
    assert {record["mode"] for record in twin[0]} == {"embedded"}
    assert set(run.modes) == {"service"}


def crash(rank: int, job: Job, how: str, victim: int = 1) -> Any:
    """One rank dies at its third step; the others must hear of it and be able to clean up."""
    batches = 0
    try:
        with job.balancer() as balancer:
            for _ in BalancedLoader(_Batches(job, rank), balancer, cost=cost_of, spec=SPEC):
                batches += 1
                if batches == 3 and rank == victim:
                    os._exit(3) if how == "exits" else os.kill(os.getpid(), signal.SIGKILL)
    except RuntimeError as error:
        return batches, str(error), [thread.name for thread in threading.enumerate() if "evenkeel" in thread.name]
    return batches, "ended as if nothing had happened", []


class _Batches:
    def __init__(self, job: Job, rank: int) -> None:
        self._job, self._rank = job, rank

    def __iter__(self) -> Any:
        return self._job.batches(self._rank)


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
        for number, _ in enumerate(BalancedLoader(_Batches(job, rank), balancer, cost=cost_of, spec=SPEC)):
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
    assert {record["mode"] for record in results[0]} == {"service"}  # it took over at once


def insist(rank: int, job: Job, run_id: str | None) -> list[str]:
    """Trains until the service has balanced three steps in a row, which all ranks see in the same step."""
    if run_id is not None:
        os.environ.update(TORCHELASTIC_RUN_ID=run_id, TORCHELASTIC_RESTART_COUNT="0")
    modes: list[str] = []
    with job.balancer() as balancer:
        loader = BalancedLoader(_Batches(job, rank), balancer, cost=cost_of, spec=SPEC)
        for _ in loader:
            modes.append(loader.report.mode.value)
            if modes[-3:] == ["service"] * 3:
                break
            time.sleep(0.02)
    return modes


def vanish(rank: int, job: Job, run_id: str | None) -> None:
    """Trains as `insist` does, then ends without a word to the service."""
    balancer = job.balancer()
    if run_id is not None:
        os.environ.update(TORCHELASTIC_RUN_ID=run_id, TORCHELASTIC_RESTART_COUNT="0")
    for number, _ in enumerate(BalancedLoader(_Batches(job, rank), balancer, cost=cost_of, spec=SPEC)):
        if number == 30:
            dist.barrier()
            os._exit(1)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("run_id", [None, "the-same-again"])
def test_after_a_crash_the_next_run_of_the_name_is_balanced_soon(run_id: str | None) -> None:
    with running_balancer("--abandoned-expiry-seconds", "2") as balancer:  # silence would take two minutes
        job = Job(steps=(3000,) * 3, batch_size=4, address=balancer.address, name="crashed")
        run_ranks(3, vanish, job, run_id, check=False)
        until_logged(balancer, '"world_size": 3')  # the injection: it had the name, and rounds behind it
        modes = run_ranks(2, insist, replace(job, steps=job.steps[:2]), run_id)
    assert modes[0] == modes[1]
    assert modes[0][-3:] == ["service"] * 3


def two_loaders(rank: int, address: str) -> list[tuple[str, list[int], str]]:
    """Training with an evaluation in the middle of the epoch, and children that come and go."""
    trained: list[tuple[str, list[int], str]] = []

    def note(name: str, batch: dict[str, torch.Tensor], loader: Any) -> None:
        trained.append((name, batch["id"].tolist(), loader.report.mode.value))

    options = BalanceOptions(timeout=timedelta(seconds=20))
    with Balancer.connect(address, job="two-loaders", options=options) as balancer:
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
