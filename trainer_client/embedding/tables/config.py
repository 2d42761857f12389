"""What a user declares: the tables, and the keys of a batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from trainer_client.checks import is_whole
from trainer_client.embedding.routing import Routing, RoutingLike, as_routing, block_size, route


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

    def keys_per_feature(self) -> list[int]:
        """Keys of each feature; the host reads them, which on a device is waited for."""
        rows = self.lengths.split(list(self.batch_sizes))  # type: ignore[no-untyped-call]
        counts: list[int] = torch.stack([lengths.sum() for lengths in rows]).tolist()
        return counts

    def select(self, names: Sequence[str]) -> Self:
        """The features named, in that order. The host reads the lengths once if the order changes.

        Raises:
            ValueError: If a feature is missing.
        """
        if list(names) == list(self.features):
            return self
        missing = [name for name in names if name not in self.features]
        if missing:
            raise ValueError(f"the batch has no feature {missing[0]!r}; it has {', '.join(self.features)}")
        rows = torch.tensor([0, *self.batch_sizes], device="cpu").cumsum(0).tolist()
        ends = [0, *self.lengths.cumsum(0).cpu().tolist()]
        picked = [list(self.features).index(name) for name in names]
        spans = [(ends[rows[i]], ends[rows[i + 1]]) for i in picked]

        def cut(tensor: Tensor, spans: list[tuple[int, int]]) -> Tensor:
            return torch.cat([tensor[a:b] for a, b in spans])

        return type(self)(
            features=list(names),
            values=cut(self.values, spans),
            lengths=cut(self.lengths, [(rows[i], rows[i + 1]) for i in picked]),
            batch_sizes=[self.batch_sizes[i] for i in picked],
            weights=cut(self.weights, spans) if self.weights is not None else None,
        )


TableFactory = Callable[[RoutedTable, int, int, torch.device], nn.Module]
"""Builds a rank's part of a table: from the table, the rank, the number of ranks and the device.

It is called with what bucketize sent (n), and gives embeddings (n x dim). Checkpoints want its `weight`, `held_keys()`,
the keys (n) of the first n rows of it, `place(keys)`, their rows, of which new ones take the next free in the order in
which they come, and `reset_parameters()`, as if new. `refuses` says whether a lookup may raise on one rank alone, so
that ranks must compare notes; alike on all ranks, and true where it is not there.
"""


def per_table(counts: Sequence[int], tables: Sequence[RoutedTable]) -> list[int]:
    """Keys of each table, from those of each feature."""
    features = iter(counts)
    return [sum(next(features) for _ in table.features) for table in tables]
