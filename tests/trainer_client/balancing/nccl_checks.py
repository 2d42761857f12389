"""Ranks with nothing but NCCL: batches of the host without `device`, batches of the GPU, a mesh, and what they cost.

`torchrun --standalone --nproc-per-node 4 -m tests.trainer_client.balancing.nccl_checks [--json FILE]`; an even number
of ranks, which may be more than there are GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
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


def check_resume(batches: list[Batch], window: int) -> None:
    """What comes after a state of each step is what came after it before."""
    with Balancer.embedded(options=BalanceOptions(window=window)) as balancer:

        def make() -> BalancedLoader[Batch]:
            return BalancedLoader(batches, balancer, cost=cost_of, spec=SPEC)

        loader = make()
        states, steps = [loader.state_dict()], []
        for batch in loader:
            steps.append((batch["id"].tolist(), loader.loss_scale))
            states.append(loader.state_dict())
        for number, state in enumerate(states):
            again = make()
            again.load_state_dict(state)
            assert [(batch["id"].tolist(), again.loss_scale) for batch in again] == steps[number:], (window, number)
    if dist.get_rank() == 0:
        print(f"resumed after each of {len(steps)} steps, window={window}", flush=True)


def milliseconds(loop: Callable[[], Iterator[Batch]], work: Callable[[], None], device: torch.device) -> float:
    """Median time of a step that computes for some milliseconds."""
    times: list[float] = []
    began = time.perf_counter()
    for step, _ in enumerate(loop()):
        work()
        if step % 10 == 9:  # the host runs ahead in between
            torch.cuda.synchronize(device)
            times.append((time.perf_counter() - began) * 100)
            began = time.perf_counter()
    return statistics.median(times[2:])


def measure(rank: int, device: torch.device) -> dict[str, float]:
    """Steps over batches of the GPU, unbalanced and balanced, and over the same in page-locked memory."""
    size, steps = 128, 200
    sources = [make_batch(rank, step, size) for step in range(8)]
    pinned = [{key: value.pin_memory() for key, value in batch.items()} for batch in sources]
    there = [on(device, batch) for batch in sources]
    square = torch.rand((4096, 4096), device=device)

    def work() -> None:
        for _ in range(4):
            torch.mm(square, square)

    def balanced(batches: list[Batch], cost: Any) -> Iterator[Batch]:
        repeated = [batches[step % len(batches)] for step in range(steps)]
        with Balancer.embedded() as balancer:
            yield from BalancedLoader(repeated, balancer, cost=cost, spec=SPEC, device=device)

    ways: dict[str, Callable[[], Iterator[Batch]]] = {
        "gpu batches, unbalanced": lambda: iter([there[step % 8] for step in range(steps)]),
        "gpu batches, own cost": lambda: balanced(there, cost_of),
        "gpu batches, library's cost": lambda: balanced(there, TokenCost(tokens="count")),
        "page-locked batches": lambda: balanced(pinned, cost_of),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(3):
        for name, way in ways.items():
            found[name].append(milliseconds(way, work, device))
    return {name: round(statistics.median(values), 3) for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
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
    for window in (1, 3):
        check_resume(ours, window)
        check_resume([on(device, batch) for batch in ours], window)
    torch.set_default_device(device)
    check("a default device", ours)
    torch.set_default_device("cpu")
    if not options.bound:  # init_device_mesh fails on some versions of PyTorch there
        check_mesh(device)
    check_stage(device)
    times = {} if options.bound else measure(rank, device)
    if rank == 0 and times:
        print(json.dumps(times, indent=1), flush=True)
        if options.json is not None:
            ranks = {"ranks": dist.get_world_size(), "gpus": torch.cuda.device_count(), "torch": torch.__version__}
            options.json.write_text(
                json.dumps(ranks | {"gpu": torch.cuda.get_device_name(), "ms_a_step": times}, indent=1)
            )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    main()
