"""A balancer that is stopped while another one is there, or none, under jobs of real ranks."""

from __future__ import annotations

import contextlib

import pytest

from benchmarks.harness.balancer_process import ServiceProcess, running_balancer
from benchmarks.harness.crew import Crew
from benchmarks.harness.steps import Steps


@pytest.mark.parametrize("node_size", [0, 3])
def test_a_job_goes_from_balancer_to_balancer_without_missing_a_round(crew: Crew, node_size: int) -> None:
    with contextlib.ExitStack() as stack:
        balancers = [stack.enter_context(running_balancer("--drain-seconds", "60", "--grace-seconds", "150"))
                     for _ in range(2)]  # fmt: skip
        address = "spread://" + ",".join(balancer.address for balancer in balancers)
        steps = Steps(address=address, name=f"leaving-{node_size}", node_size=node_size, timeout=30.0)
        with crew.run(steps) as run:
            run.until(mode="service", times=5)
            for balancer in [*balancers, *balancers]:  # it is with one of the two, then with the other
                assert balancer.stop() == 0
                run.until(mode="service", times=5)
                balancer.start()
                run.until(mode="service", times=2)
        assert set(run.modes) == {"service"}


def test_ranks_that_have_nowhere_to_go_do_not_wait_for_the_timeout(crew: Crew, balancer: ServiceProcess) -> None:
    with crew.run(Steps(address=balancer.address, name="nowhere", timeout=30.0)) as run:
        run.until(mode="service", times=5)
        assert balancer.stop() == 0
        run.until(mode="embedded", times=5)
        balancer.start()
        run.until(mode="service", times=5)
    assert run.longest_wait < 15.0
