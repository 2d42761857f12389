"""What befalls a job by itself: crashes, and restarts, also by torchrun."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from benchmarks.harness import zygote
from benchmarks.harness.balancer_process import ServiceProcess
from benchmarks.harness.ranks import run_ranks
from tests.faults.elastic import DIES, NUM_STEPS, size_of
from tests.trainer_client.balancing.jobs import (
    SPEC,
    Job,
    JobData,
    check_complete,
    cost_of,
    run_job,
)
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


WORLD_SIZE = 2
SECONDS = 270.0


@pytest.mark.timeout(300)
def test_a_rank_that_dies_is_restarted_by_torchrun_and_no_sample_is_lost(
    balancer: ServiceProcess, tmp_path: Path, forked_python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # torchrun hands one store to every incarnation otherwise, in which Gloo finds the addresses of the dead one.
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    monkeypatch.setenv("PYTHON_EXEC", str(forked_python))  # of its ranks
    done = zygote.run(
        "torch.distributed.run", "--standalone", f"--nproc-per-node={WORLD_SIZE}",
        "--max-restarts=1", "--monitor-interval=0.1", "-m", "tests.faults.elastic", balancer.address, str(tmp_path),
        timeout=SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    trained: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))  # restart, step: ids
    modes: dict[int, set[str]] = defaultdict(set)
    for log in tmp_path.glob("trained-*"):
        restart = int(log.name.split("-")[1])
        for line in log.read_text().splitlines():
            step, mode, ids = json.loads(line)
            trained[restart][step] += ids
            modes[restart].add(mode)
    assert max(trained[0]) < DIES[1]  # the injection: nobody got past the step at which the rank died
    assert len(list(tmp_path.glob("trained-1-*"))) == WORLD_SIZE
    assert sorted({*trained[0], *trained[1]}) == list(range(NUM_STEPS))
    assert max(trained[1]) == NUM_STEPS - 1
    for steps in trained.values():
        for step, ids in steps.items():
            loaded = [
                1000 * step + 1_000_000 * rank + at for rank in range(WORLD_SIZE) for at in range(size_of(rank, step))
            ]
            assert sorted(ids) == loaded, f"step {step}: samples lost or doubled"
    assert modes[0] == modes[1] == {"service"}  # the restart took over its predecessor's name without a wait
