"""Samplers in real data loaders with workers, and in real process groups."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, Dataset

from benchmarks.harness.ranks import run_ranks
from trainer_client.balancing.sampling import GlobalBatchSampler, TokenBudgetSampler


def _lengths(count: int) -> NDArray[np.int64]:
    return np.clip(np.random.default_rng(0).lognormal(4, 1, count), 1, 900).astype(np.int64)


class _Words(Dataset[str]):
    def __init__(self, lengths: NDArray[np.int64]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> str:
        return "x" * int(self.lengths[index])


def _sampler(kind: str, **options: Any) -> GlobalBatchSampler | TokenBudgetSampler:
    if kind == "counted":
        return GlobalBatchSampler(120, global_batch_size=12, **options)
    return TokenBudgetSampler(120, budget=900, costs=_lengths(120), min_samples=4, **options)


@pytest.mark.parametrize("kind", ["counted", "budget"])
@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 0},
        {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 3, "pin_memory": torch.cuda.is_available()},
    ],
)
def test_the_state_is_that_of_the_batches_that_were_trained_however_far_workers_read(
    kind: str, options: dict[str, Any]
) -> None:
    words = _Words(_lengths(120))
    expected = [[len(words[index]) for index in batch] for batch in _sampler(kind)]
    sampler = _sampler(kind)
    loader: DataLoader[Any] = DataLoader(words, batch_sampler=sampler, collate_fn=_measure_words, **options)
    assert len(loader) == len(expected)
    assert list(loader) == expected
    assert sampler.state_after(len(expected))["position"] == 120
    sampler.set_epoch(1)
    trained = []
    for batch in loader:  # left in the middle
        trained.append(batch)
        if len(trained) == 3:
            break
    state = sampler.state_after(3)
    assert state == {**state, "epoch": 1, "position": sum(map(len, trained))}
    assert list(loader)[:3] == trained  # again from the epoch's begin
    sampler.load_state_dict(state)
    sampler.set_epoch(1)
    trained += list(loader)
    assert sorted(length for batch in trained for length in batch) == sorted(words.lengths)


def _measure_words(batch: list[str]) -> list[int]:
    return list(map(len, batch))


def _in_a_group(rank: int) -> list[Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    samplers = [
        GlobalBatchSampler(16, global_batch_size=8, shuffle=False, **options)
        for options in ({}, {"process_group": mesh["dp"]}, {"process_group": mesh["dp"].get_group()})
    ]
    found: list[Any] = [next(iter(sampler)) for sampler in samplers]
    early = GlobalBatchSampler(16, global_batch_size=8)
    early.rank, early.world_size = 0, 1  # as if it had been made before the group
    try:
        iter(early)
    except ValueError as error:
        found.append(str(error))
    with pytest.raises(ValueError, match=r"process_group is a mesh of the dimensions dp \(2\), tp \(2\)"):
        GlobalBatchSampler(16, global_batch_size=8, process_group=mesh)
    dist.barrier()
    return found


def test_ranks_are_those_of_the_group_or_of_the_mesh() -> None:
    results = run_ranks(4, _in_a_group)
    for rank, (own, mesh, group, error) in enumerate(results):
        assert own == [2 * rank, 2 * rank + 1]
        assert mesh == group == list(range(4 * (rank // 2), 4 * (rank // 2) + 4))
        assert error == (
            f"the sampler was made for rank 0 of 1, and this is rank {rank} of 4; make it after "
            "torch.distributed.init_process_group, or pass rank and world_size"
        )
