"""The first rounds of a job whose kernels are not compiled yet."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.harness.ranks import run_ranks
from evenkeel.partitioning.compile import Preparation
from tests.trainer_client.balancing.jobs import SPEC, Job, cost_of, make_batch
from trainer_client import BalancedLoader, BalanceOptions, Balancer
from trainer_client.balancing import kernels

STEPS = 8


class _Late(Preparation):
    """Kernels that are compiled when the test says so."""

    def __init__(self) -> None:
        self._done = threading.Event()

    def finish(self) -> None:
        self._done.set()


def _run(rank: int, late: int, caps: list[float] | None) -> tuple[list[tuple[str, str, int]], list[str]]:
    """Trains while rank `late` compiles until its fourth step; each step's outcome, and what was logged."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("trainer_client").addHandler(handler)
    preparation = _Late()
    if rank != late:
        preparation.finish()
    elif caps is not None:
        threading.Timer(1.0, preparation.finish).start()
    kernels._preparation = lambda: preparation  # type: ignore[assignment]
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


def test_batches_stay_as_loaded_on_all_ranks_until_the_last_one_has_its_kernels() -> None:
    results: list[Any] = run_ranks(2, _run, 1, None)
    for records, _ in results:
        modes = [(mode, reason) for mode, reason, _ in records]
        first = modes.index(("embedded", "no_service"))
        assert 4 <= first <= 6  # as many rounds are in flight
        assert set(modes[:first]) == {("identity", "compiling")}
        assert set(modes[first:]) == {("embedded", "no_service")}
        assert [samples for _, _, samples in records] == [8] * STEPS
    assert [records for records, _ in results] == [results[0][0]] * 2
    told = [line for line in results[0][1] if "kernels" in line]
    assert len(told) == 2
    assert "compiled for this machine (ranks 1)" in told[0]
    assert "`evenkeel warm-up`" in told[0]
    assert "ready on all ranks; balancing from round" in told[1]
    assert not any("kernels" in line for line in results[1][1])


def _run_peers(rank: int, late: int) -> list[tuple[str, str, list[int]]]:
    """As above on two columns of two ranks that train the same batches each, over half a second."""
    preparation = _Late()
    if rank != late:
        preparation.finish()
    kernels._preparation = lambda: preparation  # type: ignore[assignment]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    records = []
    with Balancer.embedded(process_group=mesh["dp"]) as balancer:
        batches = [make_batch(mesh["dp"].get_local_rank(), k, 8) for k in range(STEPS)]
        loader = BalancedLoader(batches, balancer, cost=cost_of, spec=SPEC)
        for batch in loader:
            records.append((str(loader.report.mode), str(loader.report.reason), batch["id"].tolist()))
            if len(records) == 4:
                preparation.finish()
    return records


@pytest.mark.parametrize("late", [1, 2])
def test_a_rank_that_trains_another_s_batches_is_waited_for_too(late: int) -> None:
    results = run_ranks(4, _run_peers, late)
    assert results[0] == results[1]
    assert results[2] == results[3]
    for records in results:
        modes = [(mode, reason) for mode, reason, _ in records]
        first = modes.index(("embedded", "no_service"))
        assert 4 <= first <= 6
        assert set(modes[:first]) == {("identity", "compiling")}
        assert set(modes[first:]) == {("embedded", "no_service")}


def test_with_memory_caps_the_first_batch_waits_since_as_loaded_it_might_not_fit() -> None:
    for records, told in run_ranks(2, _run, 0, [1e12, 1e12]):
        assert {(mode, reason) for mode, reason, _ in records} == {("embedded", "no_service")}
        assert len(records) == STEPS
        assert all("compiling" in line for line in told if "kernels" in line)


def _fail() -> None:
    raise OSError("no space")


def test_what_cannot_be_prepared_is_compiled_when_it_is_called(caplog: pytest.LogCaptureFixture) -> None:
    assert Preparation(_fail).wait(10)
    assert "could not be prepared" in caplog.text
    assert "no space" in caplog.text
