"""The balancer as a trainer author uses it: memory caps, hosts, addresses, mistakes."""

from __future__ import annotations

import pytest
import torch

from benchmarks.harness.balancer_process import ServiceProcess
from benchmarks.harness.ranks import run_ranks
from tests.trainer_client.balancing.jobs import balancer_of, cost_of, run_in_turn
from trainer_client import BalancedLoader, Balancer


def constrained(rank: int, address: str | None) -> tuple[list[float], list[str]]:
    """Memory caps below what the costs alone would give the ranks."""
    # Rank 0 holds samples of much memory and no cost, rank 1 the reverse: costs alone would mix them otherwise.
    batch = {"id": torch.arange(8) + 8 * rank, "kind": torch.full((8,), rank)}
    with balancer_of(address, "caps", counts="free", memory_caps=[14.0, 14.0]) as balancer:
        loader = BalancedLoader(
            [batch], balancer, cost=lambda b: b["kind"] * 10, memory=lambda b: 1.0 + 1.0 * (b["kind"] == 0)
        )
        memory = [float((1.0 + 1.0 * (b["kind"] == 0)).sum()) for b in loader]
        modes = [mode.value for mode, _ in loader.counters.rounds]
    return memory, modes


def test_memory_caps_hold(balancer: ServiceProcess) -> None:
    served, embedded = run_in_turn(2, (constrained, balancer.address), (constrained, None))
    for results, mode in ((served, "service"), (embedded, "embedded")):
        for memory, modes in results:
            assert memory[0] <= 14.0
            assert set(modes) == {mode, "end"}


def test_the_environment_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENKEEL_BALANCER", "nonsense")
    with pytest.raises(
        ValueError, match=r"EVENKEEL_BALANCER: address is 'nonsense'; give host:port.*; or 'embedded', or 'off'"
    ):
        Balancer.from_env()
    for value in ("", "embedded", "off", "balancer:50051", "grpc://balancer:50051"):
        monkeypatch.setenv("EVENKEEL_BALANCER", value)
        Balancer.from_env(job="train-42")


def test_a_job_needs_a_name() -> None:
    for job in ("", 3):
        with pytest.raises(ValueError, match=f"job is {job!r}; give a name"):
            Balancer.connect("balancer:50051", job=job)  # type: ignore[arg-type]


def submitted_to_a_device_that_is_not_there(_: int) -> int:
    with Balancer.embedded() as balancer:
        loader = BalancedLoader([torch.arange(4)] * 3, balancer, cost=lambda batch: batch)
        list(loader)
        stream = balancer.stream()
        stream.begin(by_hand=True)
        ticket = stream.submit_window([torch.arange(4)], cost=lambda batch: batch, device="cuda:99")
        with pytest.raises(Exception, match=r"CUDA|device"):
            stream.start(ticket, stream.directive(ticket), "cuda:99").wait()
        return len(list(loader))


def test_the_loop_after_one_whose_device_was_not_there_goes_on() -> None:
    assert run_ranks(2, submitted_to_a_device_that_is_not_there) == [3, 3]


def test_report_before_the_first_batch_tells_what_to_do() -> None:
    loader = BalancedLoader([], Balancer.embedded(), cost=cost_of)
    with pytest.raises(RuntimeError, match="no batch has been yielded yet"):
        _ = loader.report
    assert list(loader) == []
