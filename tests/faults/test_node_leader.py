"""Faults of a node whose ranks share one stream: its leader is a part of the way to the service."""

from __future__ import annotations

import itertools
import os
import signal
import time
from datetime import timedelta

from benchmarks.harness.balancer_process import ServiceProcess
from benchmarks.harness.crew import Crew
from benchmarks.harness.proxy import TcpProxy
from benchmarks.harness.ranks import run_ranks
from benchmarks.harness.steps import Steps
from tests.faults.test_life import crash
from tests.trainer_client.balancing.jobs import Job
from trainer_client import BalanceOptions


def test_the_balancer_dies_and_comes_back(crew: Crew, balancer: ServiceProcess) -> None:
    with crew.run(Steps(address=balancer.address, name="node-restart", node_size=3)) as run:
        run.until(mode="service", times=3)
        balancer.kill()
        run.until(reason="breaker_open", times=3)
        balancer.start()
        run.until(mode="service", times=4)
    assert run.results[0]["breaker_changes"] == 2


def test_the_stream_of_the_node_is_cut(crew: Crew, balancer: ServiceProcess, proxy: TcpProxy) -> None:
    with crew.run(Steps(address=proxy.address, name="node-cut", node_size=3)) as run:
        for _ in range(3):
            run.until(mode="service", times=3)
            assert proxy.reset() >= 1
        run.until(mode="service", times=3)


def test_the_leader_stands_still(crew: Crew, balancer: ServiceProcess) -> None:
    leader = crew.processes[0].pid
    assert leader is not None
    with crew.run(Steps(address=balancer.address, name="node-paused", node_size=3)) as run:
        for _ in range(3):
            run.until(mode="service", times=3)
            os.kill(leader, signal.SIGSTOP)
            try:
                time.sleep(0.8)  # longer than the followers wait
            finally:
                os.kill(leader, signal.SIGCONT)
            run.until()
        run.until(mode="service", times=3)
    for records in (result["records"] for result in run.results[1:]):
        gaps = [later["at"] - earlier["at"] for earlier, later in itertools.pairwise(records)]
        assert sum(gap >= 0.6 for gap in gaps) >= 3


def test_the_leader_is_killed(balancer: ServiceProcess) -> None:
    options = BalanceOptions(timeout=timedelta(seconds=5), node_leader=True)
    job = Job(steps=(50, 50, 50), address=balancer.address, name="node-crash", options=options)
    results = run_ranks(3, crash, job, "killed", 0, check=False)
    assert results[0] is None  # it died
    for batches, error, threads in results[1:]:
        assert batches < 50
        assert "closed by peer" in error or "onnection" in error or "gloo" in error, error
        assert threads == []
