"""Batches of random structure, made sample by sample: what a rank must get is known without any of the library.

A program is drawn from a seed, on every rank alike: fields of all kinds in containers of all kinds, batches of any
size, and in some rounds a structure that differs, on all ranks or on one.

    torchrun --nproc-per-node 3 -m tests.trainer_client.redistribution.structures --programs 2000
    torchrun --nproc-per-node 2 -m tests.trainer_client.redistribution.structures --programs 300 --cuda
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from typing import Any, NamedTuple

import attrs
import numpy as np
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from tests.trainer_client.random_batches import DTYPES, SHAPES, as_bytes, random_tensor
from trainer_client import BalanceOptions, Balancer, BatchSpec, MaxLength, Padded
from trainer_client.balancing import SchemaMismatchError
from trainer_client.batches import flatten

Sample = dict[str, Any]
"""Of each field what one sample has of it; and its number as `id`."""


@dataclass(frozen=True, slots=True)
class Field:
    """A field: how a sample's part is drawn, and how a batch is made of the parts of some samples."""

    name: str
    draw: Callable[[np.random.Generator], Any]
    collate: Callable[[list[Any]], Any]
    declared: dict[str, Any]  # keyword of BatchSpec: what is declared at the field's path; "" + suffix by _SUFFIX


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Record:
    first: Any
    second: Any = None


@dataclass(frozen=True, slots=True)
class Frozen:
    first: Any
    second: Any = None


@attrs.define
class Attributes:
    first: Any
    second: Any = None


CONTAINERS: dict[str, Callable[[Any, Any], Any]] = {
    "dict": lambda a, b: {"first": a, "second": b},
    "ordered": lambda a, b: OrderedDict(first=a, second=b),
    "default": lambda a, b: defaultdict(list, first=a, second=b),
    "user dict": lambda a, b: UserDict(first=a, second=b),
    "list": lambda a, b: [{"first": a}, {"second": b}],
    "tuple": lambda a, b: ({"first": a}, {"second": b}),
    "named tuple": Pair,
    "dataclass": Record,
    "frozen": Frozen,
    "attrs": Attributes,
}
_PATHS = {"list": ("0.first", "1.second"), "tuple": ("0.first", "1.second")}


def _stack(parts: list[torch.Tensor], dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.stack(parts) if parts else torch.empty((0, *shape), dtype=dtype)


def _join(parts: list[torch.Tensor], dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.cat([torch.empty((0, *shape), dtype=dtype), *parts])


def _pad(parts: list[torch.Tensor], dtype: torch.dtype, shape: tuple[int, ...], width: int, left: bool) -> torch.Tensor:
    result = torch.ones((len(parts), width, *shape)).to(dtype)
    for index, part in enumerate(parts):
        if part.numel():
            place = slice(width - len(part), width) if left else slice(0, len(part))
            _raw(result)[index, place] = _raw(part)
    return result


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def _lengths(parts: list[torch.Tensor], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor([len(part) for part in parts], dtype=dtype)


OBJECTS: list[Callable[[np.random.Generator], Any]] = [
    lambda rng: "s" * int(rng.integers(0, 9)),
    lambda rng: int(rng.integers(-(2**60), 2**60)),
    lambda rng: date.fromordinal(int(rng.integers(1, 9**6))),
    lambda rng: bytes(rng.integers(0, 256, int(rng.integers(0, 500)), dtype=np.uint8)),
    lambda rng: None if rng.random() < 0.3 else "x",
]


def make_field(rng: np.random.Generator, name: str) -> Field:
    """A field of a random kind."""
    kind = rng.choice(
        ["dense", "rows", "counted", "jagged", "keyed", "nested", "padded", "widths", "array", "texts", "objects",
         "declared objects", "shared", "size", "derived", "none"]
    )  # fmt: skip
    dtype, shape = DTYPES[rng.integers(len(DTYPES))], SHAPES[rng.integers(len(SHAPES))]

    def rows(count: int) -> Callable[[np.random.Generator], torch.Tensor]:
        return lambda rng: random_tensor(rng, count, shape, dtype)

    def some(rng: np.random.Generator) -> torch.Tensor:
        return random_tensor(rng, min(int(rng.zipf(1.6)), 30) * int(rng.random() > 0.2), shape, dtype)

    if kind == "dense":
        return Field(name, lambda rng: rows(1)(rng)[0], lambda parts: _stack(parts, dtype, shape), {})
    if kind == "rows":
        count = int(rng.integers(2, 4))
        declared = {"rows_per_sample": count}
        return Field(name, rows(count), lambda parts: _join(parts, dtype, shape), declared)
    if kind == "counted":
        return Field(
            name, some,
            lambda parts: {"v": _join(parts, dtype, shape), "n": _lengths(parts), "longest": _longest(parts)},
            {"rows_per_sample": (".v", ".n"), "derived": (".longest", ".n")},
        )  # fmt: skip
    if kind == "jagged":
        narrow = torch.int32 if rng.random() < 0.5 else torch.int64
        return Field(
            name, some, lambda parts: JaggedTensor(_join(parts, dtype, shape), lengths=_lengths(parts, narrow)), {}
        )
    if kind == "keyed":
        keys = ["z", "b", "k"][: int(rng.integers(1, 4))]
        weighted = bool(rng.random() < 0.5)

        def keyed(parts: list[list[torch.Tensor]]) -> KeyedJaggedTensor:
            columns = [[part[index] for part in parts] for index in range(len(keys))]
            values = torch.cat([_join(column, dtype, ()) for column in columns])
            lengths = torch.cat([_lengths(column) for column in columns])
            weights = torch.arange(len(values)) * 0 + len(keys) if weighted else None
            return KeyedJaggedTensor(keys, values, weights, lengths=lengths, stride=len(parts))

        return Field(
            name, lambda rng: [random_tensor(rng, int(rng.integers(0, 5)), (), dtype) for _ in keys], keyed, {}
        )
    if kind == "nested":
        return Field(
            name,
            lambda rng: torch.from_numpy(rng.random((int(rng.integers(0, 5)), 2))),
            lambda parts: torch.nested.nested_tensor_from_jagged(
                _join(parts, torch.float64, (2,)), torch.nn.functional.pad(torch.cumsum(_lengths(parts), 0), (1, 0))
            ),
            {},
        )
    if kind == "padded":
        left = bool(rng.random() < 0.5)
        padded = Padded(lengths="{}.n", value=1, side="left" if left else "right")
        return Field(
            name, some,
            lambda parts: {
                "p": _pad(parts, dtype, shape, _longest(parts), left), "n": _lengths(parts), "longest": _longest(parts)
            },
            {"padded": (".p", padded), "derived": (".longest", ".n")},
        )  # fmt: skip
    if kind == "widths":  # all samples of a rank's batch are as wide as each other: `widen` sees to it
        return Field(
            name, lambda rng: random_tensor(rng, 6, shape, dtype),
            lambda parts: _pad(parts, dtype, shape, _longest(parts), False), {"padded": Padded(value=1)},
        )  # fmt: skip
    if kind == "array":
        numeric = rng.choice(["u2", "i8", "f4", "c8", "M8[s]", "?"])

        def draw(rng: np.random.Generator) -> Any:
            return np.array(int(rng.integers(0, 2)) if numeric == "?" else rng.integers(0, 100, 2)).astype(numeric)

        return Field(
            name, draw,
            lambda parts: np.stack(parts) if parts else np.empty((0,) if numeric == "?" else (0, 2), numeric), {},
        )  # fmt: skip
    if kind == "texts":
        return Field(name, lambda rng: "t" * int(rng.integers(0, 7)), lambda parts: np.array(parts, dtype="U"), {})
    if kind == "objects":
        kinds = [OBJECTS[rng.integers(len(OBJECTS))]] * 3 + [OBJECTS[0]]
        pack = list if rng.random() < 0.5 else tuple
        return Field(name, lambda rng: kinds[rng.integers(4)](rng), pack, {"objects": ""})
    if kind == "declared objects":
        return Field(name, lambda rng: {"a": [int(rng.integers(9))] * int(rng.integers(3))}, list, {"objects": ""})
    if kind == "shared":
        return Field(name, lambda _: None, lambda _: {"rate": 0.5, "names": ["a", "b"]}, {"shared": ""})
    if kind == "size":
        return Field(name, lambda _: None, len, {"batch_size": ""})
    if kind == "derived":
        return Field(
            name,
            lambda rng: int(rng.integers(100)),
            lambda parts: {"v": torch.tensor(parts, dtype=torch.int64), "sum": sum(parts)},
            {"derived function": ".sum"},
        )
    return Field(name, lambda _: None, lambda _: None, {"shared": ""} if rng.random() < 0.5 else {})


def _longest(parts: list[torch.Tensor]) -> int:
    return max(map(len, parts), default=0)


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
            inner = _PATHS.get(container, ("first", "second"))[index % 2]
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
        from trainer_client.batches import lookup

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
                ticket = stream.submit(batch, cost=_cost, spec=spec, device=device)
                moved = stream.start(*ticket, device).wait().unflatten(spec)
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
            if samples or (number == 0 and not program.sizes[0].any()):  # without any samples all have a say
                schemas.add(flatten(structure.collate(samples), structure.spec()).schema.hash)
        if len(schemas) > 1:
            return True
    return False


def _cost(batch: dict[str, Any]) -> Any:
    return (batch["id"] * 2654435761) % 1000


def difference(found: Any, expected: Any, path: str) -> str:
    """Where two batches differ; "" if they do not."""
    if type(found) is not type(expected):
        return f"{path}: {type(found)} instead of {type(expected)}"
    if isinstance(expected, KeyedJaggedTensor):
        pairs = [("lengths", found.lengths(), expected.lengths()), ("values", found.values(), expected.values())]
        pairs.append(("weights", found.weights_or_none(), expected.weights_or_none()))
        if found.keys() != expected.keys() or found.stride() != expected.stride():
            return f"{path}: keys or stride"
        return next((wrong for name, one, two in pairs if (wrong := difference(one, two, f"{path}.{name}"))), "")
    if isinstance(expected, JaggedTensor):
        wrong = difference(found.values(), expected.values(), f"{path}.values")
        return wrong or difference(found.lengths(), expected.lengths(), f"{path}.lengths")
    if isinstance(expected, torch.Tensor):
        if expected.is_nested:
            wrong = difference(found.values(), expected.values(), f"{path}.values")
            return wrong or difference(found.offsets(), expected.offsets(), f"{path}.offsets")
        found = found.cpu()
        if found.dtype != expected.dtype or found.shape != expected.shape or as_bytes(found) != as_bytes(expected):
            return f"{path}: {found} instead of {expected}"
        return ""
    if isinstance(expected, np.ndarray):
        same = found.dtype == expected.dtype and found.shape == expected.shape and np.array_equal(found, expected)
        return "" if same else f"{path}: {found!r} instead of {expected!r}"
    if isinstance(expected, dict | UserDict):
        if list(found) != list(expected):
            return f"{path}: keys {list(found)} instead of {list(expected)}"
        return next(
            (wrong for key in expected if (wrong := difference(found[key], expected[key], f"{path}.{key}"))), ""
        )
    if isinstance(expected, Record | Frozen | Attributes):
        names = ("first", "second")
        return next(
            (wrong for n in names if (wrong := difference(getattr(found, n), getattr(expected, n), f"{path}.{n}"))), ""
        )
    if isinstance(expected, list | tuple):
        if len(found) != len(expected):
            return f"{path}: {found} instead of {expected}"
        pairs = [(f"{path}.{i}", one, two) for i, (one, two) in enumerate(zip(found, expected, strict=True))]
        return next((wrong for where, one, two in pairs if (wrong := difference(one, two, where))), "")
    return "" if found == expected else f"{path}: {found!r} instead of {expected!r}"


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
