"""What a balancer shows of rounds that the ranks did not do as it had decided."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from trainer_client.balancing.agreement import Mode, Reason

from benchmarks.harness.balancer_process import ServiceProcess, running_balancer
from benchmarks.harness.ranks import run_ranks
from benchmarks.harness.relay import Relay
from evenkeel.protocol import balancer_pb2 as pb
from trainer_client import BalancedLoader, BalanceOptions, Balancer

RANKS, BAD, STEPS, SECONDS = 3, 1, 24, 60.0
MISSED = ("no_decision", "undecided", "decisions_differ", "transfers_differ")


class Served(NamedTuple):
    """A balancer, and where its page is."""

    balancer: ServiceProcess
    url: str


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    port = tmp_path_factory.mktemp("unfollowed") / "port"
    with running_balancer("--metrics-port", "0", "--metrics-port-file", str(port)) as balancer:
        yield Served(balancer, f"http://127.0.0.1:{port.read_text().strip()}")


def rounds_of(served: Served, job: str) -> dict[tuple[str, str], float]:
    """Counted rounds by (outcome, reason)."""
    with urllib.request.urlopen(f"{served.url}/metrics") as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {
        (sample.labels["outcome"], sample.labels["reason"]): sample.value
        for family in families
        for sample in family.samples
        if sample.name == "evenkeel_balancer_rounds_total" and sample.labels["job"] == job
    }


def document_of(url: str, job: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/v1/session?job={job}") as answer:
        return dict(json.load(answer))


def batches(rank: int) -> Iterator[dict[str, torch.Tensor]]:
    for step in range(STEPS):
        yield {"cost": torch.randint(1, 1000, (16,), generator=torch.Generator().manual_seed(step + 1000 * rank))}


def train(rank: int, address: str, url: str, job: str, bad: range, options: dict[str, Any]) -> dict[str, Any]:
    """Trains with costs that cannot be used of some batches of rank `BAD`; what rank 0 sees on the page at the end."""
    calls = iter(range(STEPS))

    def cost(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return batch["cost"] * (-1 if next(calls) in bad and rank == BAD else 1)

    with Balancer.connect(address, job=job, options=BalanceOptions(timeout=timedelta(seconds=20), **options)) as one:
        loader: BalancedLoader[Any] = BalancedLoader(list(batches(rank)), one, cost=cost)
        outcomes = [(loader.report.round, loader.report.mode.value, loader.report.reason.value) for _ in loader]
        seen = document_of(url, job) if rank == 0 else {}
    return {"outcomes": outcomes, "seen": seen}


KINDS: dict[str, dict[str, Any]] = {
    "single": {"node_leader": False},
    "node": {"node_leader": True},
    "window": {"node_leader": True, "window": 2},
}


@pytest.mark.parametrize("kind", KINDS)
def test_rounds_whose_costs_cannot_be_used_are_shown_as_what_they_were(served: Served, kind: str) -> None:
    job, bad = f"bad-{kind}", range(8, STEPS)
    window = KINDS[kind].get("window", 1)
    results = run_ranks(RANKS, train, served.balancer.address, served.url, job, bad, KINDS[kind])
    (outcomes,) = {tuple(result["outcomes"]) for result in results}
    refused = {number for number, _, reason in outcomes if reason == "invalid_costs"}
    kept = {number for number, mode, _ in outcomes if mode == "service"}
    assert (len(refused), len(kept)) == ((STEPS - 8) // window, 8 // window)  # the fault has happened
    seen = results[0]["seen"]
    assert seen["session"]["state"] == "falling back"
    assert seen["session"]["rounds_balanced"] == len(kept)
    told = seen["session"]["rounds_identity"]["invalid_costs"]
    assert len(refused) - 3 <= told <= len(refused)
    assert {one["reason"] for one in seen["fallbacks"]} == {"invalid_costs"}
    assert {one["detail"] for one in seen["fallbacks"]} == {
        f"the costs of rank(s) {BAD} cannot be used; their logs say why"
    }
    shown = dict(zip(seen["rounds"]["round"], seen["rounds"]["reason"], strict=True))
    assert {number for number, reason in shown.items() if not reason} == kept
    assert {number for number, reason in shown.items() if reason == "invalid_costs"} <= refused
    assert seen["session"]["imbalance_after"] is not None
    # Once the job has ended in order, all of it is counted; the round in which no rank had data is none.
    expected = {("balanced", "none"): len(kept), ("identity", "invalid_costs"): len(refused)}
    deadline = time.monotonic() + SECONDS
    while rounds_of(served, job) != expected:
        assert time.monotonic() < deadline, rounds_of(served, job)
        time.sleep(0.05)


def test_a_job_of_which_no_round_is_followed_saves_nothing(served: Served) -> None:
    results = run_ranks(RANKS, train, served.balancer.address, served.url, "never", range(STEPS), {})
    assert {reason for result in results for _, _, reason in result["outcomes"]} == {"invalid_costs"}
    row = results[0]["seen"]["session"]
    assert (row["state"], row["rounds_balanced"], row["saved_gpu_hours"], row["imbalance_after"]) == (
        "falling back", 0, 0.0, None,
    )  # fmt: skip
    assert row["lost_gpu_hours"] is None  # nobody knows the loads


def test_what_a_job_loses_that_cannot_be_balanced_is_known(served: Served) -> None:
    options = {"memory_caps": [1e9, 1.0, 1e9]}
    results = run_ranks(RANKS, train, served.balancer.address, served.url, "caps", range(0), options)
    assert {reason for result in results for _, _, reason in result["outcomes"]} <= {"service_identity", "undecided"}
    seen = results[0]["seen"]["session"]
    assert (seen["rounds_balanced"], seen["saved_gpu_hours"]) == (0, 0.0)
    assert seen["lost_gpu_hours"] > 0
    assert sum(seen["rounds_identity"].values()) <= STEPS  # the end of the loop is none


def test_a_round_of_which_a_rank_lost_the_answer_is_not_counted_as_followed(served: Served) -> None:
    """The balancer has planned it for all; the ranks balance it by themselves, as one of them has no plan."""
    lost: list[int] = []
    lock = threading.Lock()

    def answers(rank: int, answer: pb.Answer) -> list[pb.Answer]:
        with lock:
            if rank != BAD or answer.round != 4 or lost:
                return [answer]
            lost.append(answer.round)
            return []

    options = {"node_leader": False, "timeout": timedelta(seconds=3)}
    with Relay(served.balancer.port) as relay:
        relay.answers = answers
        results = run_ranks(RANKS, train_with, relay.address, served.url, "lost", options)
    assert lost == [4]
    (outcomes,) = {tuple(result["outcomes"]) for result in results}
    by_reason = {reason: {one for one, _, why in outcomes if why == reason} for _, _, reason in outcomes}
    assert by_reason["no_decision"] == {4}
    (told,) = [one for one in results[0]["seen"]["fallbacks"] if one["reason"] == "no_decision"]
    assert told["round"] == 4
    assert told["detail"] == f"rank(s) {BAD} got no answer in time; the ranks balanced it by themselves"
    assert results[0]["seen"]["session"]["rounds_by_ranks"] >= 1
    deadline = time.monotonic() + SECONDS
    followed = results[0]["followed"]  # also rounds ahead of the loop when it was left
    while (counted := rounds_of(served, "lost")).get(("balanced", "none")) != followed:
        assert time.monotonic() < deadline, (counted, outcomes)
        time.sleep(0.05)
    assert counted["identity", "no_decision"] == 1


@pytest.mark.parametrize("fallback", ["embedded", "identity"])
@pytest.mark.parametrize("what", ["decisions_differ", "transfers_differ"])
def test_rounds_of_which_the_ranks_hold_what_does_not_fit_together_say_so(
    served: Served, what: str, fallback: str
) -> None:
    forged: list[int] = []

    def answers(rank: int, answer: pb.Answer) -> list[pb.Answer]:
        if rank != BAD or answer.round < 4 or forged or not answer.decision.destinations:
            return [answer]
        other = pb.Answer()
        other.CopyFrom(answer)
        if what == "decisions_differ":
            other.decision.digest = bytes(16)
        else:  # it would send some sample elsewhere than the others expect
            destinations = np.frombuffer(answer.decision.destinations, "<i4").copy()
            destinations[0] = (destinations[0] + 1) % RANKS
            other.decision.destinations = destinations.tobytes()
        forged.append(answer.round)
        return [other]

    job, options = f"{what}-{fallback}", {"node_leader": False, "timeout": timedelta(seconds=20), "fallback": fallback}
    with Relay(served.balancer.port) as relay:
        relay.answers = answers
        results = run_ranks(RANKS, train_with, relay.address, served.url, job, options)
    (number,) = forged
    (outcomes,) = {tuple(result["outcomes"]) for result in results}
    assert [(one, mode) for one, mode, reason in outcomes if reason == what] == [(number, fallback)]
    (told,) = [one for one in results[0]["seen"]["fallbacks"] if one["reason"] == what]
    assert told["round"] == number
    assert told["detail"].endswith("; the ranks balanced it by themselves") == (fallback == "embedded")
    if what == "decisions_differ":
        assert f"rank(s) {BAD} held another decision" in told["detail"]
    row, rounds = results[0]["seen"]["session"], results[0]["seen"]["rounds"]
    assert row["rounds_identity"][what] == 1
    by_ranks = {one for one, mode, _ in outcomes if mode == "embedded"}
    assert (row["rounds_by_ranks"] > 0) == (fallback == "embedded") == bool(by_ranks)
    shown = dict(zip(rounds["round"], rounds["reason"], strict=True))
    assert shown[number] == what
    modes = {one: mode for one, mode, _ in outcomes}  # rounds after them were agreed on ahead of the loop
    assert {modes.get(one, "service") for one, reason in shown.items() if not reason} == {"service"}


def test_a_round_that_the_ranks_balanced_as_the_balancer_could_not_keeps_its_reason(served: Served) -> None:
    """One rank's submission is lost, so that the balancer has no plan; the ranks make one by themselves."""
    lost: list[int] = []

    def submits(rank: int, submit: pb.Submit) -> list[pb.Submit]:
        if rank == BAD and submit.round == 4 and not lost:
            lost.append(submit.round)
            return []
        return [submit]

    options = {"node_leader": False, "timeout": timedelta(seconds=3)}
    with Relay(served.balancer.port) as relay:
        relay.submits = submits
        results = run_ranks(RANKS, train_with, relay.address, served.url, "unplanned", options)
    (outcomes,) = {tuple(result["outcomes"]) for result in results}
    (reason,) = [why for one, mode, why in outcomes if (one, mode) == (4, "embedded")]
    assert reason in MISSED
    (told,) = [one for one in results[0]["seen"]["fallbacks"] if one["round"] == 4]
    assert told["reason"] in ("deadline", "no_decision")  # the balancer's, if it was the first to give up
    assert told["missing_ranks"] == [BAD]
    assert told["detail"].endswith("; the ranks balanced it by themselves")
    session = results[0]["seen"]["session"]
    assert 1 <= session["rounds_by_ranks"] <= sum(mode == "embedded" for _, mode, _ in outcomes)
    with urllib.request.urlopen(f"{served.url}/metrics") as answer:
        line = f'evenkeel_balancer_rounds_by_ranks_total{{job="unplanned"}} {session["rounds_by_ranks"]}'
        assert line in answer.read().decode()


def train_with(rank: int, address: str, url: str, job: str, options: dict[str, Any]) -> dict[str, Any]:
    """Trains endless data until the service balances again after a round that it missed, and some steps more."""
    with Balancer.connect(address, job=job, options=BalanceOptions(**options)) as one:
        data = ({"cost": batch["cost"]} for _ in range(40) for batch in batches(rank))
        loader: BalancedLoader[Any] = BalancedLoader(_Once(data), one, cost=lambda batch: batch["cost"])
        outcomes: list[tuple[int, str, str]] = []
        for _ in loader:
            outcomes.append((loader.report.round, loader.report.mode.value, loader.report.reason.value))
            missed = next((at for at, (_, _, reason) in enumerate(outcomes) if reason in MISSED), None)
            if missed is not None and sum(mode == "service" for _, mode, _ in outcomes[missed:]) >= 10:
                break
            time.sleep(0.02)
        seen = document_of(url, job) if rank == 0 else {}
    return {"outcomes": outcomes, "seen": seen, "followed": loader.counters.rounds[Mode.SERVICE, Reason.NONE]}


class _Once:
    def __init__(self, data: Iterator[dict[str, torch.Tensor]]) -> None:
        self._data = data

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return self._data
