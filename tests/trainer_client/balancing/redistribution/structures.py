"""Batches of random nesting through a stream: each rank must get what its samples make, or all hear that they differ.

A program is drawn from a seed, on every rank alike: fields of all kinds in containers of all kinds, batches of any
size, and in some rounds a structure that differs, on all ranks or on one.

    torchrun --nproc-per-node 3 -m tests.trainer_client.balancing.redistribution.structures --programs 2000
    torchrun --nproc-per-node 2 -m tests.trainer_client.balancing.redistribution.structures --programs 300 --cuda
"""

import argparse
import os
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from tests.trainer_client.nests import CONTAINERS, KINDS, Shape, make, parts, spec_of
from trainer_client import BalanceOptions, Balancer
from trainer_client.balancing import SchemaMismatchError
from trainer_client.balancing.batches import flatten
from trainer_client.balancing.redistribution import exchange


def draw_shape(rng: np.random.Generator, depth: int = 3) -> Shape:
    """A shape of a batch."""
    if depth == 0 or rng.random() < 0.2:
        return str(rng.choice(list(KINDS)))
    container = str(rng.choice(list(CONTAINERS)))
    return container, draw_shape(rng, depth - 1), draw_shape(rng, depth - 1)


def run_program(seed: int, world_size: int, group: Any, device: torch.device | None = None) -> str:
    """In a rank: runs a program, whose ranks are those of a group (None: one alone); "" or what is wrong."""
    rng = np.random.default_rng(seed)
    kinds = [draw_shape(rng) for _ in range(2)]
    rounds = int(rng.integers(1, 5))
    changes = rng.random() < 0.3
    shapes = [[kinds[int(rng.integers(2)) if changes else 0]] * world_size for _ in range(rounds)]
    if rng.random() < 0.25:  # one rank has another structure in one round
        shapes[int(rng.integers(rounds))][int(rng.integers(world_size))] = kinds[1]
    sizes = rng.integers(0 if rng.random() < 0.3 else 1, 7, (rounds, world_size)).tolist()
    rank = dist.get_rank(group) if group is not None else 0
    samples = [
        [[1000 * number + 10 * other + index for index in range(size)] for other, size in enumerate(row)]
        for number, row in enumerate(sizes)
    ]
    specs = {id(shape): spec_of(shape) for row in shapes for shape in row}
    differ, columns = False, set()
    for row, ids in zip(shapes, samples, strict=True):  # batches without samples have no say
        flats = [flatten(make(shape, own), specs[id(shape)]) for shape, own in zip(row, ids, strict=True) if own]
        differ |= len({flat.schema.hash for flat in flats}) > 1
        columns |= {flat.structure.columns for flat in flats}
    differ |= len(columns) > 1  # jagged fields stay the same for all rounds of a stream
    trained: list[list[int]] = []
    pieces: AbstractContextManager[Any] = nullcontext()
    if device is None and rng.random() < 0.5:  # as a device does it with large batches: in pieces, beside the All2All
        most = int(rng.integers(1, 40))
        pieces = mock.patch.multiple(exchange, piece_bytes=lambda _: most, OVERLAP_BYTES=0)
    with pieces, Balancer.embedded(process_group=group, options=BalanceOptions(depth=1)) as balancer:
        stream = balancer.stream()
        try:
            for number, row in enumerate(shapes):
                spec, own = specs[id(row[rank])], samples[number][rank]
                batch = make(row[rank], own)
                ticket = stream.submit_window([batch], cost=_cost, spec=spec, device=device)
                flat = stream.start(ticket, device).wait()
                if device is None and flat.totals.tolist() != flat.lengths.sum(0).tolist():
                    return f"round {number}: {flat.totals} values, of lengths {flat.lengths}"
                moved = flat.unflatten(spec)
                trained.append(moved["id"].tolist())
                # a rank without samples gets what the others have; without any, nobody knows what there could be
                holders = [shape for shape, ids in zip(row, samples[number], strict=True) if ids]
                if holders and parts(moved) != parts(make(row[rank] if own else holders[0], trained[-1])):
                    return f"round {number}: {parts(moved)} instead of what {trained[-1]} make"
        except SchemaMismatchError as error:
            return "" if differ else f"ranks whose batches agree are told: {error}"
    if differ:
        return "ranks whose batches differ were not told"
    gathered: list[Any] = [trained]
    if world_size > 1:
        gathered = [None] * world_size
        dist.all_gather_object(gathered, trained, group=group)
    for number, ids in enumerate(samples):
        if sorted(one for ranks in gathered for one in ranks[number]) != sorted(one for own in ids for one in own):
            return f"round {number}: loaded {ids}, trained {[ranks[number] for ranks in gathered]}"
    return ""


def _cost(batch: dict[str, Any]) -> Any:
    return (batch["id"] * 2654435761) % 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="seed of the first program")
    parser.add_argument("--cuda", action="store_true", help="train on GPUs, over NCCL")
    options = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if options.cuda else None
    if device is not None:
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo,cuda:nccl" if options.cuda else "gloo")
    for seed in range(options.first, options.first + options.programs):
        wrong = run_program(seed, dist.get_world_size(), dist.group.WORLD, device)
        if wrong:
            sys.exit(f"seed {seed}, rank {dist.get_rank()}: {wrong}")
    if dist.get_rank() == 0:
        print(f"{options.programs} programs on {dist.get_world_size()} ranks: every batch is what its samples make")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
