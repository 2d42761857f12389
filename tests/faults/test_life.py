"""What befalls a job by itself: a rank that dies."""

import os
import signal
import threading
from typing import Any

import pytest

from benchmarks.harness.balancer_process import ServiceProcess
from benchmarks.harness.ranks import run_ranks
from tests.trainer_client.balancing.jobs import SPEC, Job, JobData, cost_of
from trainer_client import BalancedLoader


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
        assert "has ended or failed" in error and "again from its last checkpoint" in error, error  # noqa: PT018
        assert threads == []
