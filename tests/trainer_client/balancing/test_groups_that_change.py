"""Communicators, and loaders that outlive their process group, were begun before there was one, or share it."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.harness.ranks import run_ranks
from trainer_client import BalancedLoader, BalanceOptions, Balancer
from trainer_client.balancing.groups import _ROOM, Bytes, read_membership, take_communicators


def batches(rank: int, count: int = 4) -> list[dict[str, torch.Tensor]]:
    """Rank 0 has all the work."""
    return [{"id": torch.arange(8) + 100 * rank + 10 * step, "cost": torch.full((8,), 1 + 9 * (rank == 0))}
            for step in range(count)]  # fmt: skip


def make_loader(rank: int, balancer: Balancer, count: int = 4, name: str = "train") -> BalancedLoader[Any]:
    return BalancedLoader(batches(rank, count), balancer, cost=lambda batch: batch["cost"], name=name)


def train(loader: BalancedLoader[dict[str, torch.Tensor]]) -> tuple[list[int], float, int]:
    """The samples of a loop, its last loss scale, and how many samples moved."""
    ids, moved = [], 0
    for batch in loader:
        ids += batch["id"].tolist()
        moved += loader.report.moved_samples
    return sorted(ids), loader.loss_scale, moved


def init(folder: str, rank: int, name: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/{name}", rank=rank, world_size=2)


def looked_at_first(rank: int, folder: str) -> list[Any]:
    """One batch before there is a group, then two loops; then a new group, without `close`, and another loop."""
    dist.destroy_process_group()
    balancer = Balancer.embedded()
    loader = make_loader(rank, balancer)
    first = next(iter(loader))
    assert first["id"].tolist() == batches(rank)[0]["id"].tolist()
    init(folder, rank, "first")
    loops = [train(loader), train(loader)]
    dist.destroy_process_group()
    init(folder, rank, "second")
    loops.append(train(loader))
    balancer.close()
    return loops


def test_a_loader_balances_over_the_group_that_there_is(tmp_path: Path) -> None:
    first, second = run_ranks(2, looked_at_first, str(tmp_path))
    everything = sorted(one for rank in range(2) for batch in batches(rank) for one in batch["id"].tolist())
    for (ids, scale, moved), (other_ids, other_scale, other_moved) in zip(first, second, strict=True):
        assert sorted(ids + other_ids) == everything
        assert scale == other_scale == 2 / 16
        assert moved == other_moved > 0


def two_at_once(rank: int) -> list[list[list[int]]]:
    """Two balancers whose loaders have one name, in turns; again, where these have closed; two loaders of one."""
    results = []
    for names in (("train", "train"), ("train", "train"), ("train", "eval")):
        with Balancer.embedded() as first, Balancer.embedded() as other:
            second = first if names[1] == "eval" else other
            loaders = make_loader(rank, first), make_loader(rank, second, name=names[1])
            pairs = list(zip(*loaders, strict=True))
        columns = zip(*pairs, strict=True)
        results.append([sorted(i for batch in column for i in batch["id"].tolist()) for column in columns])
    return results


def test_balancers_that_live_at_once_do_not_wait_for_each_other() -> None:
    everything = sorted(one for rank in range(2) for batch in batches(rank) for one in batch["id"].tolist())
    for first, second in zip(*run_ranks(2, two_at_once), strict=True):
        assert [sorted(mine + other) for mine, other in zip(first, second, strict=True)] == [everything] * 2


def move_fails(rank: int) -> tuple[str, float, list[str]]:
    """Rank 1 takes longer in a step than the move of the next batch may."""
    balancer = Balancer.embedded(
        options=BalanceOptions(timeout=timedelta(seconds=1), group_timeout=timedelta(seconds=2))
    )
    try:
        for step, _ in enumerate(make_loader(rank, balancer, 8)):
            if rank == 1 and step == 2:
                time.sleep(7)
        error = ""
    except RuntimeError as raised:
        error = str(raised)
    started = time.monotonic()
    balancer.close()
    return error, time.monotonic() - started, [one.name for one in threading.enumerate() if "evenkeel" in one.name]


def test_closing_after_a_move_that_failed_wakes_whoever_waits() -> None:
    for error, seconds, threads in run_ranks(2, move_fails):
        assert error
        assert seconds < 3
        assert threads == []


def _rows_of_sizes(rank: int) -> list[bool]:
    communicators = take_communicators(read_membership(None, None), timedelta(seconds=60))

    def row(of: int, size: int) -> Bytes:
        return np.frombuffer(size.to_bytes(4, "little") + bytes([of]) * (size - 4), np.uint8).copy()

    right = []
    for size in (8, _ROOM - 1, _ROOM, _ROOM + 1, 9 * _ROOM, 12):
        rows = [row(of, (size, 8 + 8 * size, 16)[(of + size) % 3]) for of in range(3)]
        table = np.zeros((3, max(map(len, rows))), np.uint8)
        for of, one in enumerate(rows):
            table[of, : len(one)] = one
        if communicators.leads:
            gathered = communicators.gather(rows[0])
            right += [bool((gathered[of, : len(one)] == one).all()) for of, one in enumerate(rows)]
        else:
            communicators.send(rows[rank])
        found = communicators.scatter(table if communicators.leads else None)
        right.append(bool((found[: len(rows[rank])] == rows[rank]).all()))
    communicators.flush()
    return right


def test_rows_of_any_size_arrive_as_they_were_sent() -> None:
    lead, *others = run_ranks(3, _rows_of_sizes)
    assert lead == [True] * 24
    assert others == [[True] * 6] * 2
