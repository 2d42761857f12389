"""Workers that die or hang: the call that they had fails, the others go on, and the pool is whole again."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from benchmarks.harness.balancer_process import ServiceProcess, until_logged
from tests.evenkeel.protocol.rounds import make_round
from tests.services.balancer.calls import SECONDS, Lead, lead_of, refused, wait_for_workers, workers_of
from tests.waiting import until


@pytest.fixture
def lead(balancer: ServiceProcess) -> Iterator[Lead]:
    wait_for_workers(balancer)
    with lead_of(balancer.address) as opened:
        yield opened


@pytest.mark.parametrize(
    ("strategy", "code", "message"),
    [
        ("crash", "UNAVAILABLE", "has ended; call again"),
        ("spin", "DEADLINE_EXCEEDED", "planning took longer than 4 s"),
    ],
)
def test_others_go_on_beside_it(balancer: ServiceProcess, lead: Lead, strategy: str, code: str, message: str) -> None:
    before = set(wait_for_workers(balancer))
    wrong = lead.future(make_round(4, 4, strategy=strategy))
    slowest, served = 0.0, 0
    while not wrong.done() or served < 20:
        began = time.monotonic()
        lead.plan(make_round(4, 4))
        slowest, served = max(slowest, time.monotonic() - began), served + 1
        time.sleep(0.02)
    assert slowest < 5  # nobody waited for the one that hangs
    assert wrong.code().name == code
    assert message in wrong.details()
    until(lambda: len(before & set(wait_for_workers(balancer))) == 1, SECONDS)


def test_idle_workers_that_end_are_replaced_at_once(balancer: ServiceProcess, lead: Lead) -> None:
    """One by one and together, without a call; and no call fails."""
    for dying in (slice(0, 1), slice(1, 2), slice(0, 2)):
        before = wait_for_workers(balancer)
        for pid in before[dying]:
            os.kill(pid, signal.SIGKILL)
        until(lambda gone=set(before[dying]): not gone & set(wait_for_workers(balancer)), SECONDS)
        assert set(before) - set(before[dying]) <= set(workers_of(balancer))
        calls = [lead.future(make_round(4, 4)) for _ in range(8)]
        assert {call.code().name for call in calls} == {"OK"}
    until_logged(balancer, "it had no call", 4)


def test_workers_that_end_with_the_process_that_forks_them_come_back(balancer: ServiceProcess, lead: Lead) -> None:
    before = wait_for_workers(balancer)
    forking = int(Path(f"/proc/{before[0]}/stat").read_text().rpartition(")")[2].split()[1])
    for pid in (forking, *before):
        os.kill(pid, signal.SIGKILL)
    until(lambda: not set(before) & set(wait_for_workers(balancer)), SECONDS)
    lead.plan(make_round(4, 4))


def test_busy_workers_that_end_fail_their_calls_alone(balancer: ServiceProcess, lead: Lead) -> None:
    """Calls that wait are answered by the workers that take their place."""
    before = wait_for_workers(balancer)
    busy = [lead.future(make_round(strategy="slower")) for _ in before]
    time.sleep(0.3)
    waiting = [lead.future(make_round(4, 4)) for _ in range(4)]
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    assert {call.code().name for call in busy} == {"UNAVAILABLE"}
    assert {call.code().name for call in waiting} == {"OK"}
    assert not set(before) & set(wait_for_workers(balancer))
    until_logged(balancer, "has ended")


def test_idle_workers_that_are_stopped_fail_a_call_in_time(balancer: ServiceProcess, lead: Lead) -> None:
    """Calls fail by their deadline until both are replaced, then none does."""
    before, codes, deadline = wait_for_workers(balancer), set(), time.monotonic() + SECONDS
    for pid in before:
        os.kill(pid, signal.SIGSTOP)
    while len(now := workers_of(balancer)) != 2 or set(before) & set(now):
        assert time.monotonic() < deadline
        calls = [lead.future(make_round(4, 4)) for _ in before]
        codes |= {call.code().name for call in calls}
    assert codes - {"OK"} == {"DEADLINE_EXCEEDED"}
    for _ in range(10):
        lead.plan(make_round(4, 4))


def test_calls_that_are_given_up_leave_nothing(balancer: ServiceProcess, lead: Lead) -> None:
    """Who cancels, or whose deadline passes while it waits, costs nobody else a worker."""
    before = workers_of(balancer)
    waiting = [lead.future(make_round(strategy="slower")) for _ in range(2)]
    time.sleep(0.3)
    late = [lead.future(make_round(strategy="crash"), timeout=0.1) for _ in range(2)]
    cancelled = [lead.future(make_round(strategy="crash")) for _ in range(2)]
    time.sleep(0.3)
    for call in cancelled:
        call.cancel()
    assert {call.code() for call in late} == {grpc.StatusCode.DEADLINE_EXCEEDED}
    assert {call.code() for call in waiting} == {grpc.StatusCode.OK}
    lead.plan(make_round())
    assert workers_of(balancer) == before


def test_it_ends_while_workers_are_busy(balancer: ServiceProcess) -> None:
    """Drains: calls under way are served, new ones are refused; it exits with 0, no process is left. The last test."""
    with lead_of(balancer.address) as lead:
        workers = workers_of(balancer)
        busy = lead.future(make_round(strategy="slow"))
        time.sleep(0.2)
        stopping = threading.Thread(target=balancer.stop)
        stopping.start()
        assert busy.code() == grpc.StatusCode.OK
        stopping.join(SECONDS)
        assert balancer.running.poll() == 0
        with refused("UNAVAILABLE"):
            lead.plan(make_round(), timeout=1.0)
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers), SECONDS)
