"""A network that is slow, broken, half open, or cuts a message in two."""

from __future__ import annotations

import time

import pytest

from benchmarks.harness.crew import Crew
from benchmarks.harness.proxy import TcpProxy
from benchmarks.harness.steps import Steps


def test_delay_within_the_deadline_costs_nothing_but_time(crew: Crew, proxy: TcpProxy) -> None:
    with crew.run(Steps(address=proxy.address, name="delay", timeout=10.0)) as run:
        run.until(mode="service", times=2)
        proxy.delay = 0.05
        run.until(times=8)
    assert proxy.seen["delayed"] >= 16
    assert set(run.modes) == {"service"}


@pytest.mark.parametrize("harm", ["delay", "swallow", "rate"])
def test_a_network_that_is_too_slow_or_loses_everything(crew: Crew, proxy: TcpProxy, harm: str) -> None:
    with crew.run(Steps(address=proxy.address, name=f"slow-{harm}", batch_size=40)) as run:
        run.until(mode="service", times=3)
        setattr(proxy, harm, {"delay": 1.0, "swallow": True, "rate": 2000.0}[harm])
        run.until(reason="no_decision")
        proxy.heal()
        run.until(mode="service", times=3)
    assert proxy.seen[{"delay": "delayed", "swallow": "swallowed", "rate": "throttled"}[harm]] >= 1
    assert run.results[0]["breaker_changes"] >= 2


@pytest.mark.parametrize("way", ["reset", "half_close"])
def test_connections_that_end(crew: Crew, proxy: TcpProxy, way: str) -> None:
    with crew.run(Steps(address=proxy.address, name=f"ends-{way}", timeout=2.0)) as run:
        for _ in range(3):
            run.until(mode="service", times=3)
            assert getattr(proxy, way)() == 3
            run.until(times=2)
        run.until(mode="service", times=3)
    assert proxy.seen[way] == 9


def test_cut_in_the_middle_of_a_message(crew: Crew, proxy: TcpProxy) -> None:
    with crew.run(Steps(address=proxy.address, name="cut", batch_size=40)) as run:
        for number, size in enumerate((1, 9, 23, 60, 150, 301), 1):
            run.until(mode="service", times=2)
            proxy.cut_after = size
            deadline = time.monotonic() + 10
            while proxy.seen["cut"] < number and time.monotonic() < deadline:
                run.until()
        run.until(mode="service", times=3)
    assert proxy.seen["cut"] == 6


def test_nobody_listens_for_a_while(crew: Crew, proxy: TcpProxy) -> None:
    with crew.run(Steps(address=proxy.address, name="refused", timeout=2.0)) as run:
        run.until(mode="service", times=2)
        proxy.refuse = True
        proxy.reset()
        run.until(reason="breaker_open", times=20)
        proxy.heal()
        run.until(mode="service", times=3)
    assert proxy.seen["refused"] >= 1
    assert run.reasons["no_decision"] == 1
