"""Samplers in real process groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.harness.ranks import run_ranks
from trainer_client.balancing.sampling import GlobalBatchSampler


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
