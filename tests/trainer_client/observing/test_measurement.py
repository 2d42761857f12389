import re
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness.ranks import run_ranks
from trainer_client.observing import measurement
from trainer_client.observing.measurement import StepTimer, gather_breakdown

SLOW = 0.08


def _train(rank: int) -> dict[str, Any]:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)))
    timer = StepTimer("cpu")
    timer.watch(model.parameters())
    for step in range(4):
        time.sleep(0.01)
        timer.batch_ready()
        loss = model(torch.randn(3, 4)).sum()
        time.sleep(SLOW if rank == step % 2 else 0.0)  # the ranks take turns at being slow
        loss.backward()
        timer.gradients_ready()
        time.sleep(0.005)
        timer.end_step()
    times = timer.finished()
    timer.close()
    breakdown = gather_breakdown(times)
    differs = StepTimer("cpu")
    for _ in range(2 + rank):
        differs.end_step()
    with pytest.raises(ValueError, match=r"the ranks pass \[2, 3\] steps"):
        gather_breakdown(differs.finished())
    dist.barrier()
    return {"times": times, "breakdown": breakdown, "summary": breakdown.summary()}


def test_waiting_is_told_from_computing() -> None:
    results = run_ranks(2, _train)
    breakdown = results[0]["breakdown"]
    assert np.array_equal(breakdown.compute, results[1]["breakdown"].compute)
    assert breakdown.compute.shape == (4, 2)
    for step in range(1, 4):  # the first one starts when each process happens to
        slow, fast = step % 2, 1 - step % 2
        assert breakdown.compute[step, slow] >= 1e3 * SLOW
        # how much less depends on what else the machine does
        assert breakdown.compute[step, fast] < breakdown.compute[step, slow]
        assert breakdown.waiting[step, fast] > 0
        assert breakdown.waiting[step, slow] == 0
        assert breakdown.data[step].min() >= 10
        assert breakdown.optimizer[step].min() >= 5
    assert breakdown.compute_imbalance[1:].min() > 1
    assert results[0]["summary"]["step_ms_median"] >= 1e3 * SLOW
    for rank in range(2):
        totals = [step.total for step in results[rank]["times"]]
        assert [step.step for step in results[rank]["times"]] == [0, 1, 2, 3]
        phases = breakdown.data + breakdown.compute + breakdown.waiting + breakdown.communication + breakdown.optimizer
        assert phases[:, rank] == pytest.approx(totals)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that timers read."""
    seconds = [0.0]
    monkeypatch.setattr(measurement.time, "perf_counter", lambda: seconds[0])
    return seconds


@pytest.mark.parametrize("unused", [False, True])
def test_the_last_of_several_backward_passes_ends_compute(now: list[float], unused: bool) -> None:
    """Where a watched parameter gets no gradient, all until they are averaged is compute."""
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    timer = StepTimer("cpu")
    timer.watch([*model.parameters(), *(other.parameters() if unused else ())])
    for _ in range(2):
        timer.batch_ready()
        for _ in range(1 if unused else 2):
            now[0] += 1
            model(torch.ones(1, 2)).sum().backward()
        now[0] += 4
        timer.gradients_ready()
        timer.end_step()
    expected = (5e3, 0.0) if unused else (2e3, 4e3)
    assert [(step.compute, step.communication) for step in timer.finished()] == [expected] * 2


class Noting:
    """A loader that notes what it is told."""

    def __init__(self) -> None:
        self.report = SimpleNamespace(own_load=0.0, split_samples=0)
        self.counters = SimpleNamespace(loading_seconds=0.0, exposed_seconds=0.0, own_load=0.0, split_samples=0)
        self.summed_terms = None
        self.told: list[tuple[float, float]] = []
        self.waits: list[tuple[float, float]] = []
        self.loops: list[float] = []

    def fetch(self, load: float, splits: int = 0) -> None:
        self.report = SimpleNamespace(own_load=load, split_samples=splits)
        self.counters.own_load += load
        self.counters.split_samples += splits

    def on_request(self, call: Callable[[], None]) -> None:
        self.request = call

    def took(self, seconds: float, load: float, *, late: float, loading: float, loop: float, terms: None) -> None:
        self.told.append((load, seconds))
        self.waits.append((late, loading))
        self.loops.append(loop)


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_loader_is_told_what_each_batch_took_to_compute(now: list[float], ahead: int) -> None:
    loader = Noting()
    timer = StepTimer("cpu", loader=loader, ahead=ahead)
    for number in range(ahead):  # a pipeline has fetched as many before the first step
        loader.fetch(10.0 * number)
    for number in range(6):
        loader.fetch(10.0 * (number + ahead), splits=int(number + ahead == 3))
        timer.batch_ready()
        now[0] += 1 + number
        if number != 4:
            timer.compute_done()
        timer.gradients_ready()
        timer.end_step()
    told = [step for step in range(ahead, 6) if step not in (3, 4)]  # nothing without a mark of its own
    np.testing.assert_allclose(loader.told, [(10.0 * step, 1.0 + step) for step in told])


@pytest.mark.parametrize("each", [False, True])
def test_several_batches_of_a_step_count_with_their_own_loads(now: list[float], each: bool) -> None:
    loader = Noting()
    timer = StepTimer("cpu", loader=loader)
    for _ in range(3):
        for micro in range(4):
            now[0] += 0.5  # for the batch to come
            loader.fetch(10.0**micro)
            if each or not micro:
                timer.batch_ready()
            now[0] += 10.0**micro
            timer.compute_done()
        timer.gradients_ready()
        timer.end_step()
    np.testing.assert_allclose(loader.told, [(1000.0, 1000.0) if each else (1111.0, 1112.5)] * 3)
    assert [late for late, _ in loader.waits] == pytest.approx([0.5] * 3)  # what was computed before is no delay


@pytest.mark.parametrize(
    ("forgotten", "said"),
    [
        ("ready", "call batch_ready"),
        ("watch", r"call watch\(model.parameters\(\)\)"),
        ("gradient", "only 1 of the 2 parameters that it watches got a gradient"),
        ("nothing", ""),
        ("split", ""),
    ],
)
def test_a_timer_that_tells_a_loader_nothing_says_why(
    forgotten: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    loader, weights = Noting(), [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    timer = StepTimer("cpu", loader=loader)
    if forgotten != "watch":
        timer.watch(weights)
    for _ in range(120):
        loader.fetch(1.0, splits=int(forgotten == "split"))
        if forgotten != "ready":
            timer.batch_ready()
        (weights[0] + (0 if forgotten == "gradient" else weights[1])).backward()
        timer.gradients_ready()
        timer.end_step()
    timer.close()
    lines = [record.getMessage() for record in caplog.records if "told its loader of no batch" in record.getMessage()]
    assert len(lines) == bool(said)
    assert all(re.search(said, line) for line in lines)
    assert bool(loader.told) == (forgotten == "nothing")
    with pytest.raises(ValueError, match="loader is 5, which takes no times"):
        StepTimer("cpu", loader=5)


def test_a_loader_is_told_how_late_each_batch_was_but_for_other_ranks_and_the_loop_itself(now: list[float]) -> None:
    loader = Noting()
    timer = StepTimer("cpu", loader=loader)
    for behind, loading, others in ((0, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 10), (3, 0, 0)):
        now[0] += behind
        loader.request()
        now[0] += 2
        loader.counters.loading_seconds += loading
        loader.counters.exposed_seconds += others
        timer.batch_ready()
        timer.compute_done()
        timer.end_step()
    np.testing.assert_allclose(loader.waits, [(2, 0), (2, 1), (1, 0), (0, 0), (2, 0)])
    assert loader.loops == pytest.approx([0, 0, 0, 0, 3])
    now[0] += 1
    timer.batch_ready()  # of a pipeline, which asked for it before the last step had ended
    timer.compute_done()
    timer.end_step()
    assert (loader.waits[-1], loader.loops[-1]) == (pytest.approx((1, 0)), 0)


def test_a_timer_that_tells_a_loader_does_not_hoard_steps() -> None:
    timer = StepTimer("cpu", loader=Noting())
    for _ in range(5000):
        timer.end_step()
    assert len(timer.finished()) <= 4096
    with pytest.raises(ValueError, match="ahead is -1"):
        StepTimer("cpu", ahead=-1)
