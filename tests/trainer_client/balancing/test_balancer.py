"""The balancer as a trainer author uses it: options, manual loops, several loaders, mistakes."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch

from benchmarks.harness.balancer_process import ServiceProcess, running_balancer
from benchmarks.harness.ranks import run_ranks
from tests.trainer_client.balancing.jobs import SPEC, check_served, connect, cost_of, make_batch
from trainer_client import BalancedLoader, BalanceOptions, Balancer
from trainer_client.balancing import SchemaMismatchError

PATIENT = BalanceOptions(timeout=timedelta(seconds=20))


@pytest.fixture(scope="module")
def service() -> Iterator[ServiceProcess]:
    with running_balancer() as process:
        yield process


def by_hand(rank: int, address: str) -> list[tuple[str, list[int]]]:
    """Submits two batches ahead and redistributes later."""
    steps = []
    with connect(address, job="by-hand", options=PATIENT) as balancer:
        batches = [make_batch(rank, step, 6) for step in range(5)]
        tickets = [balancer.submit(batch, cost=cost_of, spec=SPEC) for batch in batches[:2]]
        for step, batch in enumerate(batches):
            moved = balancer.redistribute(batch, tickets[step], spec=SPEC)
            assert moved["values"].tolist() == moved["id"].repeat_interleave(moved["count"]).tolist()
            steps.append((tickets[step].report.mode.value, moved["id"].tolist()))
            if step + 2 < len(batches):
                tickets.append(balancer.submit(batches[step + 2], cost=cost_of, spec=SPEC))
    return steps


def test_a_loop_of_ones_own(service: ServiceProcess) -> None:
    results = run_ranks(2, by_hand, service.address)
    for step in range(5):
        assert {results[rank][step][0] for rank in range(2)} == {"service"}
        loaded = [sample for rank in range(2) for sample in make_batch(rank, step, 6)["id"].tolist()]
        trained = [sample for rank in range(2) for sample in results[rank][step][1]]
        assert sorted(trained) == sorted(loaded)
        for rank in range(2):  # sorted by (home, index at home)
            assert results[rank][step][1] == sorted(results[rank][step][1])


def train_and_evaluate(rank: int, address: str) -> list[Any]:
    """Two loaders in turns, and a loop that is left early."""
    seen: dict[str, list[int]] = {"train": [], "eval": []}
    with connect(address, job="two-loaders", options=PATIENT) as balancer:
        loaders = {
            name: BalancedLoader(
                [make_batch(rank, step + offset, 5) for step in range(4)], balancer, cost=cost_of, spec=SPEC, name=name
            )
            for name, offset in (("train", 0), ("eval", 100))
        }
        for first, second in zip(loaders["train"], loaders["eval"], strict=True):
            seen["train"] += first["id"].tolist()
            seen["eval"] += second["id"].tolist()
        for batch in loaders["train"]:
            early = batch["id"].tolist()
            break
        again = [sample for batch in loaders["train"] for sample in batch["id"].tolist()]
        modes = {name: dict(loader.counters.rounds) for name, loader in loaders.items()}
    return [seen, early, again, modes]


def test_several_loaders_at_once_and_a_loop_left_early(service: ServiceProcess) -> None:
    results = run_ranks(2, train_and_evaluate, service.address)

    def ids(offset: int, steps: range) -> list[int]:
        return sorted(
            s for rank in range(2) for step in steps for s in make_batch(rank, step + offset, 5)["id"].tolist()
        )

    for name, offset in (("train", 0), ("eval", 100)):
        assert sorted(sample for result in results for sample in result[0][name]) == ids(offset, range(4))
    assert sorted(sample for result in results for sample in result[1]) == ids(0, range(1))
    assert sorted(sample for result in results for sample in result[2]) == ids(0, range(4))
    assert all(mode.value in ("service", "end") for result in results for mode, _ in result[3]["train"])


def constrained(rank: int, address: str | None) -> tuple[list[float], list[str]]:
    """Memory caps below what the costs alone would give the ranks."""
    options = BalanceOptions(timeout=timedelta(seconds=20), counts="free", memory_caps=[14.0, 14.0])
    # Rank 0 holds samples of much memory and no cost, rank 1 the reverse: costs alone would mix them otherwise.
    batch = {"id": torch.arange(8) + 8 * rank, "kind": torch.full((8,), rank)}
    balancer = Balancer.embedded(options=options) if address is None else connect(address, job="caps", options=options)
    with balancer:
        loader = BalancedLoader(
            [batch], balancer, cost=lambda b: b["kind"] * 10, memory=lambda b: 1.0 + 1.0 * (b["kind"] == 0)
        )
        memory = [float((1.0 + 1.0 * (b["kind"] == 0)).sum()) for b in loader]
        modes = [mode.value for mode, _ in loader.counters.rounds]
    return memory, modes


def test_memory_caps_hold(service: ServiceProcess) -> None:
    for address, mode in ((service.address, "service"), (None, "embedded")):
        results = run_ranks(2, constrained, address)
        for memory, modes in results:
            assert memory[0] <= 14.0
            assert set(modes) == {mode, "end"}


def impossible(rank: int, address: str | None) -> list[tuple[str, str, int]]:
    options = BalanceOptions(timeout=timedelta(seconds=20), memory_caps=[1.0, 1.0])
    balancer = (
        Balancer.embedded(options=options) if address is None else connect(address, job="impossible", options=options)
    )
    with balancer:
        loader = BalancedLoader([make_batch(rank, 0, 5)], balancer, cost=cost_of, spec=SPEC)
        return [(loader.report.mode.value, loader.report.reason.value, len(batch["id"])) for batch in loader]


def test_caps_that_cannot_hold_leave_the_batch_as_it_is(service: ServiceProcess) -> None:
    assert run_ranks(2, impossible, service.address) == [[("identity", "partition_failed", 5)]] * 2
    assert run_ranks(2, impossible, None) == [[("identity", "partition_failed", 5)]] * 2


def odd_costs(rank: int, address: str | None) -> list[tuple[str, str]]:
    """Rank 1 has a NaN in its second batch."""

    def cost(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        costs = cost_of(batch).double()
        if rank == 1 and 1000 <= int(batch["id"][0]) % 1_000_000 < 2000:
            costs[2] = float("nan")
        return costs

    balancer = Balancer.embedded() if address is None else connect(address, job="nan", options=PATIENT)
    with balancer:
        loader = BalancedLoader([make_batch(rank, step, 5) for step in range(4)], balancer, cost=cost, spec=SPEC)
        return [(loader.report.mode.value, loader.report.reason.value) for _ in loader]


def test_a_bad_cost_on_one_rank_costs_one_round_its_balance_on_all(service: ServiceProcess) -> None:
    good = ("service", "none")
    expected = [good, ("identity", "invalid_costs"), good, good]
    assert run_ranks(2, odd_costs, service.address) == [expected] * 2
    assert run_ranks(2, odd_costs, None)[0][1] == ("identity", "invalid_costs")


def different_schemas(rank: int) -> None:
    batch = {"id": torch.arange(3), "x": torch.zeros(3, dtype=torch.float32 if rank == 0 else torch.float64)}
    with Balancer.embedded() as balancer:
        list(BalancedLoader([batch], balancer, cost=lambda b: b["id"]))


def missing_fields(rank: int) -> None:
    batch = {"id": torch.arange(3), "x": torch.zeros(3) if rank == 0 else None}
    with Balancer.embedded() as balancer:
        list(BalancedLoader([batch], balancer, cost=lambda b: b["id"]))


def schemas_that_change(rank: int) -> None:
    batches = [{"id": torch.arange(3)}, {"id": torch.arange(3)}]
    if rank == 1:
        batches[1]["extra"] = torch.zeros(3)
    with Balancer.embedded() as balancer:
        list(BalancedLoader(batches, balancer, cost=lambda b: b["id"]))


@pytest.mark.parametrize("job", [different_schemas, missing_fields, schemas_that_change])
def test_schemas_that_differ_are_an_error_on_all_ranks_that_shows_both(job: Any) -> None:
    errors = run_ranks(2, job, check=False)
    for error in errors:
        assert isinstance(error, SchemaMismatchError)
        assert "rank 0" in str(error)
        assert "rank 1" in str(error)
    wanted = {
        different_schemas: ("rank 0 has x: float32", "rank 1 has x: float64"),
        missing_fields: ("rank 0 has x: float32", "which rank 1 lacks"),
        schemas_that_change: ("extra",),
    }[job]
    assert all(word in str(error) for error in errors for word in wanted)


def on_two_hosts(rank: int, address: str | None) -> list[int]:
    import os

    os.environ["EVENKEEL_NODE"] = f"host-{rank // 2}"
    balancer = Balancer.embedded() if address is None else connect(address, job="hosts", options=PATIENT)
    with balancer:
        loader = BalancedLoader([make_batch(rank, 0, 8)], balancer, cost=cost_of, spec=SPEC)
        ids = [sample for batch in loader for sample in batch["id"].tolist()]
        check_served(loader, address)
    return ids


def test_hosts_are_known_to_the_partition(service: ServiceProcess) -> None:
    assert run_ranks(4, on_two_hosts, service.address) == run_ranks(4, on_two_hosts, None)


def test_the_environment_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENKEEL_BALANCER", "nonsense")
    with pytest.raises(
        ValueError, match=r"EVENKEEL_BALANCER: address is 'nonsense'; give host:port.*; or 'embedded', or 'off'"
    ):
        Balancer.from_env()
    for value in ("", "embedded", "off", "balancer:50051", "grpc://balancer:50051"):
        monkeypatch.setenv("EVENKEEL_BALANCER", value)
        Balancer.from_env(job="train-42")


@pytest.mark.parametrize("address", ["balancer", ":50051", "balancer:", "balancer:0", "balancer:70000", "balancer:x"])
def test_a_malformed_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="give host:port"):
        Balancer.connect(address, job="job")


def test_a_job_needs_a_name() -> None:
    with pytest.raises(ValueError, match="job is ''"):
        Balancer.connect("balancer:50051", job="")


def test_report_before_the_first_batch_tells_what_to_do() -> None:
    loader = BalancedLoader([], Balancer.embedded(), cost=cost_of)
    with pytest.raises(RuntimeError, match="no batch has been yielded yet"):
        _ = loader.report
    assert list(loader) == []
