"""Groups of our own: made by their members, whatever other groups each of them is in."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness.ranks import run_ranks
from tests.trainer_client.balancing.jobs import SPEC, cost_of, make_batch
from trainer_client import BalancedLoader, Balancer
from trainer_client.embedding.tables.exchange import exchange_group


def trained(rank: int, group: dist.ProcessGroup) -> list[int]:
    with Balancer.embedded(process_group=group) as balancer:
        batches = [make_batch(rank, step, 5) for step in range(3)]
        loader = BalancedLoader(batches, balancer, cost=cost_of, spec=SPEC)
        return [int(sample) for batch in loader for sample in batch["id"]]


def stages(rank: int) -> Any:
    """Columns 0 2 and 1 3 balance; the ranks are in other groups besides, each in another number of them."""
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    ends = [dist.new_group([0, 1]), dist.new_group([0, 1, 2])]  # torch counts them on their members only
    column = columns[rank % 2]
    samples = trained(rank, column)
    total = torch.ones(1)
    dist.all_reduce(total, group=exchange_group(column))
    again = trained(rank, ends[0]) if rank < 2 else []  # no other rank knows of it
    return samples, again, total.item()


def test_ranks_of_different_numbers_of_groups_meet() -> None:
    results = run_ranks(4, stages)
    ids = [sorted(int(one) for step in range(3) for one in make_batch(rank, step, 5)["id"]) for rank in range(4)]
    for one, other in ((0, 2), (1, 3)):
        assert sorted(results[one][0] + results[other][0]) == sorted(ids[one] + ids[other])
    assert sorted(results[0][1] + results[1][1]) == sorted(ids[0] + ids[1])
    assert [total for *_, total in results] == [2.0] * 4
