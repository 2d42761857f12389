"""A balancer that is killed, stopped, drained and restarted at every instant of a round."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from benchmarks.harness.balancer_process import ServiceProcess
from benchmarks.harness.crew import Crew
from benchmarks.harness.proxy import TcpProxy
from benchmarks.harness.relay import Relay
from benchmarks.harness.steps import Steps
from evenkeel.protocol import balancer_pb2 as pb


def kill(balancer: ServiceProcess, relay: Relay) -> None:
    balancer.kill()
    relay.seen["killed"] += 1


@pytest.mark.parametrize("when", ["before", "during", "between the answers to two ranks", "after"])
def test_killed_around_a_round_and_restarted(crew: Crew, balancer: ServiceProcess, relay: Relay, when: str) -> None:
    number = 5
    submitted: set[int] = set()
    answered: set[int] = set()

    def submits(rank: int, submit: pb.Submit) -> list[pb.Submit]:
        if submit.round == number:
            with relay.lock:
                submitted.add(rank)
                # before: nothing of the round has reached the balancer; during: one rank's submission has
                if len(submitted) == {"before": 1, "during": 2}.get(when) and not relay.seen["killed"]:
                    if when == "during":
                        time.sleep(0.05)
                    kill(balancer, relay)
        return [submit]

    def answers(rank: int, answer: pb.Answer) -> list[pb.Answer]:
        if answer.round == number:
            with relay.lock:
                if relay.seen["killed"]:
                    return [answer]
                if when == "between the answers to two ranks":
                    if answered:  # the second rank's answer dies with the balancer
                        kill(balancer, relay)
                        return []
                    answered.add(rank)
                elif when == "after":
                    answered.add(rank)
                    if len(answered) == 3:
                        kill(balancer, relay)
        return [answer]

    relay.submits, relay.answers = submits, answers
    with crew.run(Steps(address=relay.address, name=f"killed-{when}", pace=0.02, timeout=2.0)) as run:
        run.until(reason="no_decision")
        assert relay.seen["killed"] == 1
        run.until(mode="embedded", times=3)
        balancer.start()
        run.until(mode="service", times=3)
    first = run.modes.index("embedded")
    assert first == number + (when == "after")
    # One miss opens the breaker; it closes when all streams are joined anew, and the next round that asks is answered.
    assert run.reasons["no_decision"] == 1
    assert run.results[0]["breaker_changes"] == 2


@pytest.mark.parametrize("steps_down", [0, 60])
def test_restarted_at_once_and_late(crew: Crew, balancer: ServiceProcess, relay: Relay, steps_down: int) -> None:
    instances: dict[int, int] = {}

    def answers(rank: int, answer: pb.Answer) -> list[pb.Answer]:
        with relay.lock:
            instances[answer.decision.instance] = instances.get(answer.decision.instance, 0) + 1
        return [answer]

    relay.answers = answers
    with crew.run(Steps(address=relay.address, name=f"restarted-{steps_down}")) as run:
        run.until(mode="service", times=3)
        balancer.kill()
        if steps_down:
            run.until(reason="breaker_open", times=steps_down)
        balancer.start()
        run.catch_up()
        run.until(mode="service", times=6)
    assert len(instances) == 2  # the injection: another incarnation decided what came after it
    assert min(instances.values()) >= 9  # three rounds of three ranks
    if steps_down:  # at once: it may be back before any rank's patience ends
        assert run.results[0]["breaker_changes"] >= 2


def test_never_there(crew: Crew) -> None:
    with crew.run(Steps(address="127.0.0.1:9", name="nobody")) as run:
        run.until(reason="breaker_open", times=10)
    assert run.modes == ["embedded"] * len(run.modes)
    assert run.reasons["no_decision"] == 1
    assert run.longest_wait >= 0.2  # the injection: there was somebody to wait for, for once
    assert all("going on balancing on the ranks" in result["warnings"][0] for result in run.results[:1])


def test_never_there_and_nothing_else_wanted(crew: Crew) -> None:
    with crew.run(Steps(address="127.0.0.1:9", name="nobody", fallback="identity")) as run:
        run.until(reason="breaker_open", times=5)
    assert run.modes == ["identity"] * len(run.modes)


@pytest.mark.parametrize(("seconds", "timeout"), [(0.3, 10.0), (1.5, 0.6)])
def test_paused_shorter_and_longer_than_the_deadline(
    crew: Crew, balancer: ServiceProcess, relay: Relay, seconds: float, timeout: float
) -> None:
    paused = threading.Event()

    def submits(rank: int, submit: pb.Submit) -> list[pb.Submit]:
        with relay.lock:
            if submit.round == 5 and not paused.is_set():
                balancer.signal(signal.SIGSTOP)
                threading.Timer(seconds, balancer.signal, [signal.SIGCONT]).start()
                relay.seen["paused"] += 1
                paused.set()
        return [submit]

    relay.submits = submits
    with crew.run(Steps(address=relay.address, name=f"paused-{seconds}", timeout=timeout)) as run:
        if seconds > timeout:
            run.until(reason="no_decision")
        else:
            run.until(times=7)
        run.until(mode="service", times=4)
    assert relay.seen["paused"] == 1
    assert run.longest_wait >= min(seconds, timeout) - 0.1
    if seconds < timeout:
        assert set(run.modes) == {"service"}


def test_drained_with_a_half_filled_round(crew: Crew, balancer: ServiceProcess, relay: Relay) -> None:
    codes: list[int] = []

    def submits(rank: int, submit: pb.Submit) -> list[pb.Submit]:
        if submit.round == 5 and rank == 2 and not relay.seen["drained"]:
            while relay.seen["others"] < 2:
                time.sleep(0.005)
            time.sleep(0.05)
            relay.seen["drained"] += 1
            codes.append(balancer.stop())
        elif submit.round == 5:
            relay.seen["others"] += 1
        return [submit]

    def answers(rank: int, answer: pb.Answer) -> list[pb.Answer]:
        if answer.decision.reason == pb.Decision.REASON_DRAINING:
            relay.seen["answered while draining"] += 1
        return [answer]

    relay.submits, relay.answers = submits, answers
    with crew.run(Steps(address=relay.address, name="drained", pace=0.02, timeout=10.0)) as run:
        run.until(reason="no_decision")
        run.until(mode="embedded", times=3)
        balancer.start()
        run.until(mode="service", times=3)
    assert codes == [0]
    assert relay.seen["answered while draining"] >= 2  # the waiting ranks
    assert "undecided" in run.reasons or run.modes[5] == "embedded"


def test_failing_again_and_again(crew: Crew, relay: Relay, proxy: TcpProxy) -> None:
    relay.target = proxy.port  # the ranks reach the relay, the relay loses the balancer
    with crew.run(Steps(address=relay.address, name="again-and-again", timeout=1.5)) as run:
        for _ in range(4):
            run.until(mode="service", times=3)
            proxy.refuse = True
            assert proxy.reset() >= 3
            run.until(mode="embedded", times=2)
            proxy.heal()
        run.until(mode="service", times=10)
    assert proxy.seen["refused"] >= 1
    assert run.results[0]["breaker_changes"] == 8
