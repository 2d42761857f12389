"""Groups of our own: made by their members, whatever other groups each of them is in."""

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness.ranks import run_ranks
from tests.trainer_client.balancing.jobs import SPEC, cost_of, make_batch
from trainer_client import BalancedLoader, Balancer
from trainer_client.embedding.tables.exchange import exchange_group
from trainer_client.process_groups import make_group


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


def attempt(rank: int, port: int) -> float:
    """One attempt of a job over its launcher's store; the ranks come to their group one after the other."""
    dist.destroy_process_group()
    agent = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=agent, rank=rank, world_size=2)
    dist.barrier()
    if rank:
        time.sleep(0.3)  # the other one finds what is in the store already
    group, total = make_group([0, 1], "gloo", timedelta(seconds=20)), torch.ones(1)
    dist.all_reduce(total, group=group)
    dist.barrier()
    return total.item()


def test_a_restart_over_the_store_of_the_attempt_before_does_not_look_for_the_dead() -> None:
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for _ in range(2):
        for key in agent.list_keys():
            if "evenkeel" not in key:  # PyTorch's default group has the same trouble, which is not looked at here
                agent.delete_key(key)
        assert run_ranks(2, attempt, agent.port) == [2.0, 2.0]
        assert any("evenkeel" in key for key in agent.list_keys())


def alone(rank: int) -> str:
    if not rank:
        dist.barrier()  # stays for the store
        return ""
    try:
        make_group([0, 1], "gloo", timedelta(seconds=1))
    except RuntimeError as error:
        dist.barrier()
        return str(error)
    return "made"


def test_who_does_not_come_is_named() -> None:
    assert "ranks 0 did not come to the process group evenkeel/0_1 within 1 s" in run_ranks(2, alone)[1]
