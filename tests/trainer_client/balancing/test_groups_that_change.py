"""Loaders that outlive their process group, or were iterated before there was one, on real Gloo ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness.ranks import run_ranks
from trainer_client import BalancedLoader, Balancer


def batches(rank: int, count: int = 4) -> list[dict[str, torch.Tensor]]:
    """Rank 0 has all the work."""
    return [{"id": torch.arange(8) + 100 * rank + 10 * step, "cost": torch.full((8,), 1 + 9 * (rank == 0))}
            for step in range(count)]  # fmt: skip


def make_loader(rank: int, balancer: Balancer, count: int = 4) -> BalancedLoader[dict[str, torch.Tensor]]:
    return BalancedLoader(batches(rank, count), balancer, cost=lambda batch: batch["cost"])


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
