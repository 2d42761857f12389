"""Random programs of training on Gloo ranks, and what there is of their tables."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor

from tests.trainer_client.balancing.redistribution.pool import group_of
from trainer_client.embedding.routing import DIST_TYPES, RoutingLike, hash_roundrobin
from trainer_client.embedding.tables import KeyBatch, RoutedEmbeddingCollection, RoutedTable, clip_grad_norm_

KEYS = 40
FEATURES = ("other", "user", "item", "tag")
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9, "weight_decay": 0.1},
    "Adam": {"amsgrad": True},
    "AdamW": {},
    "Adagrad": {"initial_accumulator_value": 0.1},
    "RMSprop": {"centered": True},
    "Adamax": {},
    "NAdam": {},
    "RAdam": {},
    "Rprop": {},
    "Adadelta": {},
    "ASGD": {},
    "Adafactor": {},
}


@dataclass(frozen=True, kw_only=True)
class Program:
    """Some steps of training.

    Attributes:
        sizes: By step and rank, rows of each feature's batch.
        hot: By step, keys of each table that are hot from there on; None leaves them as they are.
    """

    world_size: int
    routings: tuple[RoutingLike, RoutingLike, RoutingLike]
    poolings: tuple[Any, Any, Any]
    deduplicate: bool
    optimizer: str
    factor: float | None
    weighted: bool
    clipped: bool
    accumulated: bool
    sizes: list[list[int]]
    hot: list[dict[str, list[int]] | None]
    seed: int


ROUTINGS = st.sampled_from([*DIST_TYPES, hash_roundrobin(3)])
POOLINGS = st.sampled_from(["none", "sum", "mean"])
HOT = st.fixed_dictionaries(
    {}, optional={name: st.lists(st.integers(0, KEYS - 1), max_size=KEYS) for name in ("users", "items", "tags")}
)
PROGRAMS = st.builds(
    Program,
    world_size=st.integers(1, 4),
    routings=st.tuples(ROUTINGS, ROUTINGS, ROUTINGS),
    poolings=st.tuples(POOLINGS, POOLINGS, POOLINGS),
    deduplicate=st.booleans(),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    factor=st.sampled_from([None, 1.0]),
    weighted=st.booleans(),
    clipped=st.booleans(),
    accumulated=st.booleans(),
    sizes=st.lists(st.lists(st.sampled_from([0, 1, 3]), min_size=4, max_size=4), min_size=3, max_size=5),
    hot=st.lists(st.none() | HOT, min_size=5, max_size=5),
    seed=st.integers(0, 2**30),
)


class Training:
    """A collection and its optimizer on this rank, in float64: only the order of sums tells two of them apart."""

    def __init__(self, program: Program, world_size: int) -> None:
        self.program, self.rank = program, dist.get_rank()
        users, items, tags = zip(program.routings, program.poolings, strict=True)
        plain: dict[str, Any] = {"num_embeddings": KEYS, "dtype": torch.float64}
        self.collection = RoutedEmbeddingCollection(
            [
                self._table("users", users, features=("user", "other"), embedding_dim=2, **plain),
                self._table("items", items, features=("item",), embedding_dim=2, **plain),
                self._table("tags", tags, features=("tag",), embedding_dim=3, **plain),
            ],
            process_group=group_of(world_size),
            deduplicate=program.deduplicate,
            gradient_divide_factor=program.factor,
        )
        make = getattr(torch.optim, program.optimizer)
        self.optimizer = make(self.collection.parameters(), lr=0.05, **OPTIMIZERS[program.optimizer])

    @staticmethod
    def _table(name: str, how: tuple[RoutingLike, Any], **changes: Any) -> RoutedTable:
        return RoutedTable(name=name, routing=how[0], pooling=how[1], **changes)

    def step(self, number: int) -> dict[str, Tensor]:
        results: dict[str, Tensor] = self.collection(draw_batch(self.program, number, self.rank))
        if number % 2 == 0 or not self.program.accumulated:
            self.optimizer.zero_grad()
        losses = [(result - at).square().sum() for at, result in enumerate(results.values())]
        torch.stack(losses).sum().backward()
        if self.program.clipped:
            clip_grad_norm_(self.collection, 1.0)
        self.optimizer.step()
        return results

    def rows(self) -> dict[str, Tensor]:
        """All that there is of the tables: keys, values and what the optimizer keeps."""
        found = {}
        for name, part in self.collection.tables.items():
            found |= {f"{name} keys": part.held_keys(), f"{name} values": part.weight.detach()}
            for kind, state in self.optimizer.state[part.weight].items():
                found[f"{name} {kind}"] = torch.as_tensor(state)
        return found


def draw_batch(program: Program, step: int, rank: int) -> KeyBatch:
    generator = torch.Generator().manual_seed(program.seed + 10 * step + rank)
    size = program.sizes[step % len(program.sizes)][rank]
    lengths = torch.randint(0, 6, (4 * size,), generator=generator)
    # half of the lookups are of a few keys.
    few = torch.randint(0, 5, (int(lengths.sum()),), generator=generator)
    values = torch.where(torch.rand(len(few), generator=generator) < 0.5, few, (few + 1) * 7 % KEYS)
    weights = torch.rand(len(values), generator=generator, dtype=torch.float64) if program.weighted else None
    return KeyBatch(features=FEATURES, values=values, lengths=lengths, batch_sizes=[size] * 4, weights=weights)


def assert_alike(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-6, atol=1e-9, msg=lambda text, name=name: f"{name} {text}"
        )


def hold(training: Training, keys: dict[str, list[int]]) -> None:
    """Names hot rows; what other ranks than 0 say does not matter."""
    chosen = {name: torch.tensor(hot, dtype=torch.int64) for name, hot in keys.items()}
    training.collection.hold_hot_rows(chosen if training.rank == 0 else None)
