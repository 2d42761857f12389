"""Ranks with nothing but NCCL: batches of the host without `device`, batches of the GPU, a mesh.

`torchrun --standalone --nproc-per-node 4 -m tests.trainer_client.balancing.nccl_checks [--bound]`; an even number
of ranks, which may be more than there are GPUs.
"""

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.gpus import own_gpu
from tests.trainer_client.balancing.jobs import SPEC, cost_of, make_batch
from trainer_client import BalancedLoader, BalanceOptions, Balancer
from trainer_client.balancing.costs import TokenCost

Batch = dict[str, torch.Tensor]


def on(device: torch.device | str, batch: Batch) -> Batch:
    return {key: value.to(device) for key, value in batch.items()}


def steps_of(rank: int) -> int:
    """The last rank has no batch at all."""
    return 0 if rank == dist.get_world_size() - 1 else 4 + rank % 2


def check(name: str, batches: list[Batch], *, cost: Any = cost_of, options: BalanceOptions | None = None) -> None:
    """All ranks together train on their GPUs exactly what all of them loaded."""
    trained: list[int] = []
    with Balancer.embedded(options=options) as balancer:
        for batch in BalancedLoader(batches, balancer, cost=cost, spec=SPEC):
            assert all(tensor.is_cuda for tensor in batch.values()), name
            expected = batch["id"].repeat_interleave(batch["count"])
            assert torch.equal(batch["values"], expected), name
            trained += batch["id"].tolist()
    everything: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everything, (trained, [sample for batch in batches for sample in batch["id"].tolist()]))
    found = sorted(sample for ids, _ in everything for sample in ids)
    assert found == sorted(sample for _, ids in everything for sample in ids), name
    if dist.get_rank() == 0:
        print(f"{name}: {len(found)} samples", flush=True)


def check_mesh(device: torch.device) -> None:
    """Peers hold the same samples, and both columns together all."""
    mesh = init_device_mesh("cuda", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    dp = mesh["dp"].get_local_rank()
    trained: list[int] = []
    with Balancer.embedded(process_group=mesh["dp"]) as balancer:
        batches = [on(device, make_batch(dp, step, 8)) for step in range(5)]
        for batch in BalancedLoader(batches, balancer, cost=cost_of, spec=SPEC):
            trained += batch["id"].tolist()
    everything: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everything, trained)
    assert everything[0::2] == everything[1::2]
    found = sorted(sample for ids in everything[0::2] for sample in ids)
    shards = range(dist.get_world_size() // 2)
    assert found == sorted(
        s for shard in shards for step in range(5) for s in make_batch(shard, step, 8)["id"].tolist()
    )
    if dist.get_rank() == 0:
        print(f"mesh: {len(found)} samples, the same on peers", flush=True)


def check_stage(device: torch.device) -> None:
    """Some ranks balance, the others know nothing of it, and each is in another number of groups."""
    rank, everyone = dist.get_rank(), range(dist.get_world_size())
    counted = [dist.new_group([other]) for other in everyone for _ in range(other + 1)]  # on its members only
    stage = dist.new_group([0, 1])
    trained: list[int] = []
    if rank < 2:
        with Balancer.embedded(process_group=stage) as balancer:
            batches = [on(device, make_batch(rank, step, 8)) for step in range(5)]
            for batch in BalancedLoader(batches, balancer, cost=cost_of, spec=SPEC):
                trained += batch["id"].tolist()
    everything: list[Any] = [None] * len(everyone)
    dist.all_gather_object(everything, trained)
    found = sorted(sample for ids in everything for sample in ids)
    assert len(counted) > rank
    assert found == sorted(s for one in range(2) for step in range(5) for s in make_batch(one, step, 8)["id"].tolist())
    if rank == 0:
        print(f"two ranks of {len(everyone)}: {len(found)} samples", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bound", action="store_true", help="bind the default group to the ranks' devices")
    options = parser.parse_args()
    device = own_gpu()
    dist.init_process_group("nccl", device_id=device if options.bound else None)
    rank = dist.get_rank()
    ours = [make_batch(rank, step, 6) for step in range(steps_of(rank))]
    check("batches of the host, no device named", ours)
    check("batches of the GPU, a cost of one's own", [on(device, batch) for batch in ours])
    check(
        "batches of the GPU, a cost of the library",
        [on(device, batch) for batch in ours],
        cost=TokenCost(tokens="count"),
    )
    check("batches of the GPU, windows", [on(device, batch) for batch in ours], options=BalanceOptions(window=2))
    torch.set_default_device(device)
    check("a default device", ours)
    torch.set_default_device("cpu")
    if not options.bound:  # init_device_mesh fails on some versions of PyTorch there
        check_mesh(device)
    check_stage(device)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    main()
