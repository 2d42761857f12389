"""What a user declares: the tables, and the keys of a batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from trainer_client.checks import is_whole
from trainer_client.embedding.routing import (
    Bucketized,
    Routing,
    RoutingLike,
    as_routing,
    block_bucketize,
    block_size,
    route,
)
from trainer_client.embedding.routing.ownership import as_int64


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedTable:
    """One embedding table, sharded by rows.

    Attributes:
        name: Unique in its collection.
        embedding_dim: Columns.
        features: Features looked up in it.
        num_embeddings: Rows over all ranks: the size of a `continuous` table, the expected number of keys otherwise.
        routing: How keys choose their rank.
        pooling: `none` returns one vector a key, `sum` and `mean` one a row of the batch.
        capacity: Rows a rank can hold when keys are inserted on first sight; 1.5 times the even share by default, and
            never less than 1024.
        seed: Seed of the initial values, which depend on it, the key and the column only.
        dtype: Type of the values.

    Raises:
        ValueError: If `features` is a text, a size is no positive whole number, or pooling or routing is unknown.
    """

    name: str
    embedding_dim: int
    features: tuple[str, ...]
    num_embeddings: int
    routing: RoutingLike = "roundrobin"
    pooling: Literal["none", "sum", "mean"] = "none"
    capacity: int | None = None
    seed: int = 0
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        features: Any = self.features  # of a caller without types
        if isinstance(features, str):
            raise ValueError(f"table {self.name}: features is {features!r}; give a tuple of names")
        capacity = 1 if self.capacity is None else self.capacity
        sizes = {"embedding_dim": self.embedding_dim, "num_embeddings": self.num_embeddings, "capacity": capacity}
        for field, size in sizes.items():
            if not is_whole(size) or size < 1:
                raise ValueError(f"table {self.name}: {field} is {size!r}; give a whole number of at least 1")
        if self.pooling not in ("none", "sum", "mean"):
            raise ValueError(f"table {self.name}: pooling is {self.pooling!r}; choose none, sum or mean")
        as_routing(self.routing)

    @property
    def resolved_routing(self) -> Routing:
        """The routing, also where it was given by its name."""
        return as_routing(self.routing)

    def rows_per_rank(self, world_size: int) -> int:
        """Rows that a rank holds at most."""
        even = block_size(self.num_embeddings, world_size)
        if self.resolved_routing.dist_type == "continuous":
            return even
        return self.capacity if self.capacity is not None else max(1024, even + even // 2)

    def route(self, keys: Tensor, world_size: int) -> tuple[Tensor, Tensor]:
        """Owner of each key, and the index that is sent to it; see `routing.route`."""
        return route(keys, self.resolved_routing, world_size=world_size, block_size=self.rows_per_rank(world_size))


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyBatch:
    """Jagged keys of several features, as a KeyedJaggedTensor holds them.

    Attributes:
        features: Their names.
        values: (num_keys): keys, feature after feature, row after row.
        lengths: (sum of batch sizes): keys of each row.
        batch_sizes: Rows of each feature.
        weights: (num_keys): weights for pooling.
    """

    features: Sequence[str]
    values: Tensor
    lengths: Tensor
    batch_sizes: Sequence[int]
    weights: Tensor | None = None

    @classmethod
    def of(cls, batch: Any) -> Self:
        """Takes a KeyBatch as it is, and reads a TorchRec KeyedJaggedTensor."""
        if isinstance(batch, cls):
            return batch
        return cls(
            features=batch.keys(),
            values=batch.values(),
            lengths=batch.lengths().view(-1),
            batch_sizes=batch.stride_per_key(),
            weights=batch.weights_or_none(),
        )

    def split(self, names: Sequence[str]) -> list[Self]:
        """A batch of each of the features named, with int64 keys. On a device the host waits for the lengths.

        Raises:
            ValueError: If a feature is missing, or lengths, keys and weights do not fit each other.
        """
        missing = [name for name in names if name not in self.features]
        if missing:
            raise ValueError(f"the batch has no feature {missing[0]!r}; it has {', '.join(self.features)}")
        values, lengths = as_int64(self.values), self.lengths
        for field, tensor in (("values", values), ("lengths", lengths)):
            if tensor.dim() != 1:
                raise ValueError(f"{field} have shape {tuple(tensor.shape)}; flatten them to one dimension")
        if lengths.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"lengths have dtype {lengths.dtype}; use int32 or int64")
        if len(lengths) != sum(self.batch_sizes):
            raise ValueError(f"batch_sizes add up to {sum(self.batch_sizes)}, but there are {len(lengths)} lengths")
        if self.weights is not None and self.weights.numel() != len(values):
            raise ValueError(f"weights has {self.weights.numel()} elements, but there are {len(values)} keys")
        by_feature = cut(lengths, self.batch_sizes)
        wrong = (lengths < 0) | (lengths > len(values))
        *counts, num_wrong = torch.stack([each.sum() for each in (*by_feature, wrong)]).tolist()
        if num_wrong:
            raise ValueError(
                f"lengths have {int(lengths[wrong][0])}, and there are {len(values)} keys; give the number of keys of "
                "each row, 0 or more"
            )
        if sum(counts) != len(values):
            raise ValueError(f"lengths add up to {sum(counts)}, but there are {len(values)} keys; they must agree")
        weights = [None] * len(counts) if self.weights is None else cut(self.weights, counts)
        parts = {
            name: type(self)(features=(name,), values=keys, lengths=rows, batch_sizes=(len(rows),), weights=weight)
            for name, keys, rows, weight in zip(self.features, cut(values, counts), by_feature, weights, strict=True)
        }
        return [parts[name] for name in names]


TableFactory = Callable[[RoutedTable, int, int, torch.device], nn.Module]
"""Builds a rank's part of a table: from the table, the rank, the number of ranks and the device.

It is called with what bucketize sent (n), and gives embeddings (n x dim). Checkpoints want its `weight`, `held_keys()`,
the keys (n) of the first n rows of it, `place(keys)`, their rows, of which new ones take the next free in the order in
which they come, and `reset_parameters()`, as if new. `refuses` says whether a lookup may raise on one rank alone, so
that ranks must compare notes; alike on all ranks, and true where it is not there.
"""


def cut(tensor: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """Views of consecutive stretches of a tensor."""
    return tuple(tensor.split(list(sizes)))  # type: ignore[no-untyped-call]


def per_table(counts: Sequence[int], tables: Sequence[RoutedTable]) -> list[int]:
    """Keys of each table, from those of each feature."""
    features = iter(counts)
    return [sum(next(features) for _ in table.features) for table in tables]


def by_owner(keys: Tensor, counts: Sequence[int], tables: Sequence[RoutedTable], world_size: int) -> Bucketized:
    """Keys, so many of each table, in the order of their owners, then of tables."""
    return block_bucketize(
        torch.tensor(counts, device=keys.device),
        keys,
        [table.rows_per_rank(world_size) for table in tables],
        world_size,
        [table.resolved_routing for table in tables],
    )
