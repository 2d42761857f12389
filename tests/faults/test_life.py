"""What befalls a job by itself: a rank that dies."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import zygote
from benchmarks.harness.balancer_process import ServiceProcess, until_logged
from benchmarks.harness.ranks import run_ranks
from tests.examples.resume.launching import ledger, users
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


@pytest.mark.timeout(300)
def test_a_rank_that_dies_is_restarted_by_torchrun_and_no_sample_is_lost(
    balancer: ServiceProcess, tmp_path: Path, forked_python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command of docs/train/frameworks.md."""
    # torchrun hands one store to every incarnation otherwise, in which Gloo finds the addresses of the dead one.
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    monkeypatch.setenv("PYTHON_EXEC", str(forked_python))  # of its ranks
    monkeypatch.setenv("EVENKEEL_BALANCER", balancer.address)
    monkeypatch.setenv("EVENKEEL_JOB", "under-torchrun")
    done = zygote.run(
        "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1", "--monitor-interval=0.1",
        "-m", "examples.resume.ddp", "--folder", str(tmp_path), "--users", "96", "--save-every", "2", "--kill-at", "7",
        timeout=270,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("96 of 96 users trained, 0 of them more than once") == 2
    assert [users(tmp_path, epoch) for epoch in range(2)] == [list(range(96))] * 2
    assert {line["rank"] for line in ledger(tmp_path)} == {0, 1}
    until_logged(balancer, '"job": "under-torchrun"')
