"""Random jagged batches for the tests of bucketize, bucketized and by the definition."""

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.references.bucketize import bucketize as reference
from trainer_client.embedding.routing import (
    Bucketized,
    Routing,
    block_bucketize,
    continuous,
    hash_roundrobin,
    roundrobin,
)

MODES = (continuous(), roundrobin(), hash_roundrobin(), hash_roundrobin(12345))


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    lengths: Tensor
    indices: Tensor
    block_sizes: list[int]
    routings: list[Routing]
    world_size: int
    weights: Tensor | None
    batch_sizes: list[int] | None

    def bucketized(
        self, *, positions: bool = True, permutation: bool = True, device: torch.device | str = "cpu"
    ) -> Bucketized:
        return block_bucketize(
            self.lengths.to(device),
            self.indices.to(device),
            self.block_sizes,
            self.world_size,
            self.routings,
            weights=None if self.weights is None else self.weights.to(device),
            positions=positions,
            permutation=permutation,
            batch_sizes=self.batch_sizes,
        )

    def by_definition(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
        return reference(
            self.lengths,
            self.indices,
            self.block_sizes,
            self.world_size,
            self.routings,
            weights=self.weights,
            batch_sizes=self.batch_sizes,
        )


def make_batch(
    seed: int,
    *,
    num_features: int,
    max_rows: int,
    max_length: int,
    world_size: int,
    routings: list[Routing],
    index_dtype: torch.dtype = torch.int64,
    length_dtype: torch.dtype = torch.int64,
    weight_dtype: torch.dtype | None = None,
    variable: bool = False,
    negative: bool = True,
    giant: bool = False,
) -> Batch:
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, size: int) -> Tensor:
        return torch.randint(low, high, (size,), generator=generator)

    sizes = draw(0, max_rows + 1, num_features) if variable else draw(0, max_rows + 1, 1).expand(num_features)
    lengths = draw(0, max_length + 1, int(sizes.sum()))
    lengths[draw(0, 2, lengths.numel()).bool()] = 0
    if giant and lengths.numel():
        lengths[int(draw(0, lengths.numel(), 1))] = 3_000
    total = int(lengths.sum())
    bits = 31 if index_dtype == torch.int32 else 63
    top = draw(4, bits, total)
    indices = torch.randint(0, 2**63 - 1, (total,), generator=generator) % (2**top)
    if negative:
        indices = torch.where(draw(0, 4, total) == 0, -indices, indices)
    blocks = [
        int(2 ** int(b)) + int(e) for b, e in zip(draw(0, 24, num_features), draw(0, 9, num_features), strict=True)
    ]
    weights = None
    if weight_dtype is not None:
        weights = torch.rand(total, generator=generator, dtype=torch.float64).to(weight_dtype)
    return Batch(
        lengths=lengths.to(length_dtype),
        indices=indices.to(index_dtype),
        block_sizes=blocks,
        routings=routings,
        world_size=world_size,
        weights=weights,
        batch_sizes=sizes.tolist() if variable else None,
    )
