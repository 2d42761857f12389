"""Streams that close leave their communicators to the next ones."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from benchmarks.harness.ranks import run_ranks
from trainer_client import BalancedLoader, Balancer, BatchSpec
from trainer_client.balancing import groups
from trainer_client.balancing.groups import _common, _explained

MINUTE = timedelta(minutes=1)


def costs(batch: Any) -> torch.Tensor:
    return batch["id"] % 7 + 1


def epoch(rank: int, balancer: Balancer, steps: int = 3) -> list[int]:
    """The samples that this rank trained."""
    batches = [{"id": torch.arange(4) + 4 * (2 * step + rank)} for step in range(steps)]
    loader = BalancedLoader(batches, balancer, cost=costs, spec=BatchSpec())
    return [int(sample) for batch in loader for sample in batch["id"]]


def threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def open_one_after_the_other(rank: int) -> Any:
    trained, counts, pairs = [], [], set()
    for _ in range(5):
        with Balancer.embedded() as balancer:
            trained.append(epoch(rank, balancer))
            pairs.add(balancer.stream()._groups.pair.serial)  # type: ignore[union-attr]
        counts.append(threads())
    return trained, counts, pairs, threading.active_count()


def test_balancers_one_after_the_other_share_one_pair() -> None:
    results = run_ranks(2, open_one_after_the_other)
    for trained, counts, pairs, python_threads in results:
        assert pairs == {1}
        assert counts[-1] - counts[0] < 6, f"threads gather: {counts}"  # a pair has six, and one that ends may linger
        assert python_threads == 1
        assert trained == trained[:1] * 5
    assert sorted(sample for trained, *_ in results for sample in trained[0]) == list(range(24))


def leave_on_one_rank_only(rank: int) -> Any:
    serials, trained = [], []

    def use(balancer: Balancer) -> None:
        trained.append(sorted(epoch(rank, balancer)))
        serials.append(balancer.stream()._groups.pair.serial)  # type: ignore[union-attr]

    first, second, third = (Balancer.embedded() for _ in range(3))
    use(first)
    if rank == 0:
        first.close()
    use(second)  # rank 1 still holds the first pair
    first.close()
    second.close()
    use(third)
    third.close()
    return serials, trained


def test_a_pair_that_one_rank_still_holds_is_not_used() -> None:
    results = run_ranks(2, leave_on_one_rank_only)
    assert [serials for serials, _ in results] == [[1, 2, 1]] * 2
    for step in range(3):
        assert sorted(sample for _, trained in results for sample in trained[step]) == list(range(24))


def abandon_a_move(rank: int) -> Any:
    balancer = Balancer.embedded()
    batch = {"id": torch.arange(4) + 4 * rank}
    stream = balancer.stream()
    (flat,), ticket = stream.submit_window([batch], cost=costs)
    pending = stream.start(flat, ticket, stream.outcome(ticket))
    if rank == 0:
        pending.wait()
    balancer.close()
    left = [len(shelf.left) for shelf in groups._shelves[dist.group.WORLD].values()]
    pending.wait()
    with Balancer.embedded() as other:
        samples = epoch(rank, other)
        return left, other.stream()._groups.pair.serial, samples  # type: ignore[union-attr]


def test_a_move_in_flight_is_waited_for_before_its_pair_is_left() -> None:
    results = run_ranks(2, abandon_a_move)
    assert [left for left, *_ in results] == [[1], [1]]
    assert [serial for _, serial, _ in results] == [1, 1]
    assert sorted(sample for *_, samples in results for sample in samples) == list(range(24))


def test_all_ranks_must_have_left_a_pair_in_the_same_state() -> None:
    state = (MINUTE, 5, 5)
    assert _common([{3: state, 7: state}, {7: state, 3: state}], MINUTE) == 3
    assert _common([{3: state, 7: state}, {7: state}], MINUTE) == 7
    assert _common([{3: (MINUTE, 5, 4)}, {3: state}], MINUTE) is None
    assert _common([{3: state}, {3: state}], 2 * MINUTE) is None
    assert _common([{}, {3: state}], MINUTE) is None


def test_a_dataloader_worker_that_dies_among_agreements_is_named_as_the_cause() -> None:
    batches = iter(DataLoader(range(1000), num_workers=1, multiprocessing_context="fork"))  # type: ignore[arg-type]
    next(batches)
    (worker,) = batches._workers  # type: ignore[attr-defined]
    threading.Timer(0.5, os.kill, (worker.pid, signal.SIGKILL)).start()
    with pytest.raises(RuntimeError, match=r"DataLoader worker .* killed") as caught, _explained():
        time.sleep(60)
    (note,) = caught.value.__notes__
    assert "A worker of this rank's DataLoader died" in note
    assert "another rank" not in note
    with pytest.raises(RuntimeError) as other, _explained():
        raise RuntimeError("Connection closed by peer")
    assert "another rank has ended or failed" in other.value.__notes__[0]
