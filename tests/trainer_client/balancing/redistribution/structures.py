"""Batches of random structure, made sample by sample: what a rank must get is known without any of the library.

A program is drawn from a seed, on every rank alike: fields of all kinds in containers of all kinds, batches of any
size, and in some rounds a structure that differs, on all ranks or on one.

    torchrun --nproc-per-node 3 -m tests.trainer_client.balancing.redistribution.structures --programs 2000
    torchrun --nproc-per-node 2 -m tests.trainer_client.balancing.redistribution.structures --programs 300 --cuda
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.trainer_client.balancing.redistribution.differences import difference
from tests.trainer_client.balancing.redistribution.random_fields import CONTAINERS, PATHS, Field, make_field
from trainer_client import BalanceOptions, Balancer, BatchSpec, MaxLength, Padded
from trainer_client.balancing import SchemaMismatchError
from trainer_client.balancing.batches import flatten

Sample = dict[str, Any]
"""Of each field what one sample has of it; and its number as `id`."""


@dataclass(frozen=True, slots=True)
class Structure:
    """How the fields of a batch are nested: pairs of fields in a container each."""

    fields: tuple[Field, ...]
    containers: tuple[str, ...]

    def collate(self, samples: list[Sample]) -> Any:
        """A batch of samples."""
        batch: dict[str, Any] = {"id": torch.tensor([sample["id"] for sample in samples], dtype=torch.int64)}
        made = [field.collate([sample[field.name] for sample in samples]) for field in self.fields]
        for index, container in enumerate(self.containers):
            first, second = made[2 * index], made[2 * index + 1]
            batch[f"group{index}"] = CONTAINERS[container](first, second)
        return batch

    def spec(self) -> BatchSpec:
        """What must be declared."""
        declared: dict[str, Any] = {
            "rows_per_sample": {}, "padded": {}, "derived": {}, "shared": [], "batch_size": [], "objects": [],
        }  # fmt: skip
        for index, field in enumerate(self.fields):
            container = self.containers[index // 2]
            inner = PATHS.get(container, ("first", "second"))[index % 2]
            path = f"group{index // 2}.{inner}"
            for name, what in field.declared.items():
                if name == "derived function":
                    declared["derived"][path + what] = _Sum(path)
                elif name in ("shared", "batch_size", "objects"):
                    declared[name].append(path + what)
                elif name == "derived":
                    declared[name][path + what[0]] = MaxLength(path + what[1])
                elif isinstance(what, tuple) and isinstance(what[1], Padded):
                    one = what[1]
                    declared[name][path + what[0]] = Padded(lengths=path + ".n", value=one.value, side=one.side)
                elif isinstance(what, tuple):
                    declared[name][path + what[0]] = path + what[1]
                else:
                    declared[name][path] = what
        return BatchSpec(**declared)


@dataclass(frozen=True, slots=True)
class _Sum:
    path: str

    def __call__(self, batch: Any) -> int:
        from trainer_client.balancing.batches import lookup

        return int(lookup(batch, f"{self.path}.v").sum())


@dataclass(frozen=True, slots=True)
class Program:
    """What all ranks do.

    Attributes:
        rounds: The structure of each round, the same on all ranks.
        sizes: (rounds, ranks) samples.
        odd: Rank and round in which one rank has another structure; None: nowhere.
    """

    rounds: tuple[Structure, ...]
    sizes: np.ndarray
    odd: tuple[int, int] | None
    other: Structure

    @staticmethod
    def draw(seed: int, world_size: int) -> Program:
        """A program."""
        rng = np.random.default_rng(seed)

        def structure() -> Structure:
            groups = int(rng.integers(1, 4))
            fields = tuple(make_field(rng, f"field{index}") for index in range(2 * groups))
            return Structure(fields, tuple(rng.choice(list(CONTAINERS), groups).tolist()))

        count = int(rng.integers(1, 5))
        kinds = [structure() for _ in range(2)]
        changing = rng.random() < 0.3
        rounds = tuple(kinds[int(rng.integers(2)) if changing else 0] for _ in range(count))
        sizes = rng.integers(0 if rng.random() < 0.3 else 1, 7, (count, world_size))
        odd = (int(rng.integers(world_size)), int(rng.integers(count))) if rng.random() < 0.25 else None
        return Program(rounds, sizes, odd, kinds[1])

    def structures(self, rank: int) -> list[Structure]:
        """What a rank's batches are like, by round."""
        return [self.other if self.odd == (rank, number) else usual for number, usual in enumerate(self.rounds)]

    def holders(self, number: int) -> list[Structure]:
        """The structures of the ranks that have samples in a round."""
        return [self.structures(rank)[number] for rank, count in enumerate(self.sizes[number]) if count]

    def samples(self, seed: int, rank: int) -> list[list[Sample]]:
        """The samples of a rank, by round."""
        result = []
        for number, structure in enumerate(self.structures(rank)):
            rng = np.random.default_rng([seed, rank, number])
            width = int(rng.integers(0, 6))
            batch = []
            for index in range(int(self.sizes[number, rank])):
                sample = {field.name: field.draw(rng) for field in structure.fields}
                for field in structure.fields:
                    if isinstance(field.declared.get("padded"), Padded):
                        sample[field.name] = sample[field.name][:width]
                sample["id"] = 10_000 * rank + 100 * number + index
                batch.append(sample)
            result.append(batch)
        return result


def run_program(seed: int, world_size: int, group: Any, device: torch.device | None = None) -> str:
    """In a rank: runs a program and compares every batch with what its samples make.

    Args:
        seed: Of the program.
        world_size: Number of ranks.
        group: The ranks; None for one rank alone.
        device: Where batches are trained; None for the host.

    Returns:
        "" if all is right, else what is wrong.
    """
    program = Program.draw(seed, world_size)
    rank = dist.get_rank(group) if group is not None else 0
    own = program.samples(seed, rank)
    everywhere = {
        sample["id"]: sample
        for other in range(world_size)
        for batch in program.samples(seed, other)
        for sample in batch
    }
    structures = program.structures(rank)
    specs = {id(structure): structure.spec() for structure in structures}
    differ = _differ(program, seed, world_size)
    found: list[int] = []
    with Balancer.embedded(process_group=group, options=BalanceOptions(depth=1)) as balancer:
        stream = balancer.stream()
        try:
            for number, structure in enumerate(structures):
                batch, spec = structure.collate(own[number]), specs[id(structure)]
                ticket = stream.submit_window([batch], cost=_cost, spec=spec, device=device)
                moved = stream.start(ticket, stream.directive(ticket), device).wait().unflatten(spec)
                ids = moved["id"].tolist()
                # a rank without samples gets what the others have; without any, nobody knows what there could be
                holders = [structure] if own[number] else program.holders(number)
                if holders:
                    expected = holders[0].collate([everywhere[one] for one in ids])
                    wrong = difference(moved, expected, "")
                    if wrong:
                        return f"round {number}: {wrong}"
                found += ids
        except SchemaMismatchError as error:
            return "" if differ else f"ranks whose batches agree are told: {error}"
        if differ:
            return "ranks whose batches differ were not told"
    expected_ids = sorted(sample["id"] for batch in own for sample in batch)
    gathered: list[Any] = [None] * world_size
    if world_size > 1:
        dist.all_gather_object(gathered, (sorted(found), expected_ids), group=group)
    else:
        gathered = [(sorted(found), expected_ids)]
    trained = sorted(one for ids, _ in gathered for one in ids)
    loaded = sorted(one for _, ids in gathered for one in ids)
    return "" if trained == loaded else f"loaded {loaded}, trained {trained}"


def _differ(program: Program, seed: int, world_size: int) -> bool:
    """Whether in some round the batches of two ranks, of those that have samples, have other fields."""
    for number in range(len(program.rounds)):
        schemas = set()
        for rank in range(world_size):
            structure, samples = program.structures(rank)[number], program.samples(seed, rank)[number]
            if samples:  # batches without any may have been padded to nothing, and have no say
                schemas.add(flatten(structure.collate(samples), structure.spec()).schema.hash)
        if len(schemas) > 1:
            return True
    return False


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
