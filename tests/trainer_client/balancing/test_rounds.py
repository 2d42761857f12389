"""Rounds that are not like the others: in windows, without samples, or while kernels compile."""

import threading
from typing import Any

import pytest
import torch

from benchmarks.harness.ranks import run_ranks
from evenkeel.partitioning.compile import Preparation
from tests.trainer_client.balancing.jobs import SPEC, Job, balancer_of, cost_of, logged, make_batch, run_in_turn
from trainer_client import BalancedLoader, BalanceOptions, Balancer
from trainer_client.balancing import kernels


def weights(rank: int) -> tuple[list[float], list[str]]:
    said = logged()
    with balancer_of("off", "weights") as balancer:
        loader = BalancedLoader([{"id": torch.arange(4 - 2 * rank)}] * 2, balancer, cost=lambda batch: batch["id"])
        empty = BalancedLoader([{"id": torch.arange(4)}] * (2 - 2 * rank), balancer, cost=lambda batch: batch["id"])
        return [each.mean_loss_scale for each in (loader, empty) for _ in each], said


def test_a_mean_over_no_samples_is_warned_of_once() -> None:
    (first, said), (second, warned) = run_ranks(2, weights)
    assert first == [2 * 4 / 6] * 2 + [2.0] * 2
    assert second == [2 * 2 / 6] * 2 + [0.0] * 2
    assert not said
    assert len(warned) == 1
    assert "a mean over none is NaN" in warned[0]


def _submits_by_hand(rank: int) -> list[list[int]]:
    batches = [make_batch(rank, step, 6) for step in range(4)]
    trained = []
    with Balancer.embedded(options=BalanceOptions(window=4)) as balancer:
        stream = balancer.stream()
        ticket = stream.submit_window(batches, cost=lambda batch: batch["count"], spec=SPEC)
        for _ in stream.directive(ticket).batches:
            moved = stream.start(ticket).wait().unflatten()
            trained.append(moved["id"].tolist())
        moved = balancer.redistribute(
            batches[0], balancer.submit(batches[0], cost=lambda batch: batch["count"], spec=SPEC), spec=SPEC
        )
        trained.append(moved["id"].tolist())  # a window that holds one batch only
        with pytest.raises(ValueError, match="5 batches for a window of 4"):
            stream.submit_window([*batches, batches[0]], cost=lambda batch: batch["count"], spec=SPEC)
    return trained


def test_a_loop_of_its_own_submits_windows() -> None:
    results = run_ranks(2, _submits_by_hand)
    trained = sorted(sample for steps in results for ids in steps[:4] for sample in ids)
    assert trained == sorted(
        int(sample) for rank in range(2) for step in range(4) for sample in make_batch(rank, step, 6)["id"]
    )
    last = sorted(sample for steps in results for sample in steps[4])
    assert last == sorted(int(sample) for rank in range(2) for sample in make_batch(rank, 0, 6)["id"])


STEPS = 8


class _Late(Preparation):
    """Kernels that are compiled when the test says so."""

    def __init__(self) -> None:
        self._done = threading.Event()

    def finish(self) -> None:
        self._done.set()


def _run(rank: int, late: int, caps: list[float] | None) -> tuple[list[tuple[str, str, int]], list[str]]:
    """Trains while rank `late` compiles until its fourth step; each step's outcome, and what was logged."""
    told = logged()
    preparation = _Late()
    if rank != late:
        preparation.finish()
    elif caps is not None:
        threading.Timer(1.0, preparation.finish).start()
    kernels._preparation = lambda: preparation
    job = Job(steps=(STEPS, STEPS), options=BalanceOptions(memory_caps=caps))
    records: list[tuple[str, str, int]] = []
    with job.balancer() as balancer:
        batches = [make_batch(rank, k, 8) for k in range(STEPS)]
        loader = BalancedLoader(batches, balancer, cost=cost_of, spec=SPEC)
        for batch in loader:
            records.append((str(loader.report.mode), str(loader.report.reason), len(batch["id"])))
            if len(records) == 4:
                preparation.finish()
    return records, told


@pytest.fixture(scope="module")
def of_kernels() -> list[list[Any]]:
    """Where the lead compiles, where the other rank does, and where the lead does and has caps."""
    return run_in_turn(2, (_run, 0, None), (_run, 1, None), (_run, 0, [1e12, 1e12]))


def test_until_the_lead_has_its_kernels_it_plans_by_a_plain_heuristic(of_kernels: list[list[Any]]) -> None:
    results = of_kernels[0]
    for records, _ in results:
        reasons = [reason for _, reason, _ in records]
        first = reasons.index("no_service")
        assert 4 <= first <= 6  # as many rounds are in flight
        assert set(reasons[:first]) == {"compiling"}
        assert set(reasons[first:]) == {"no_service"}
        assert {mode for mode, _, _ in records} == {"embedded"}
        assert [samples for _, _, samples in records] == [8] * STEPS
    told = [line for line in results[0][1] if "kernels" in line]
    assert len(told) == 2
    assert "`evenkeel warm-up`" in told[0]
    assert "ready" in told[1]
    assert not any("kernels" in line for line in results[1][1])


def test_other_ranks_need_none(of_kernels: list[list[Any]]) -> None:
    for records, _ in of_kernels[1]:
        assert {reason for _, reason, _ in records} == {"no_service"}


def test_with_memory_caps_the_first_batch_waits_since_as_loaded_it_might_not_fit(of_kernels: list[list[Any]]) -> None:
    for records, told in of_kernels[2]:
        assert {(mode, reason) for mode, reason, _ in records} == {("embedded", "no_service")}
        assert len(records) == STEPS
        assert all("compiling" in line for line in told if "kernels" in line)


def test_what_cannot_be_prepared_is_compiled_when_it_is_called(caplog: pytest.LogCaptureFixture) -> None:
    assert Preparation(lambda: 1 / 0).wait(10)
    assert "could not be prepared" in caplog.text
    assert "division by zero" in caplog.text
