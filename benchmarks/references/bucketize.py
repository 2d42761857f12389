"""Bucketize in plain torch operations, on any device: the definition that the kernels are held against."""

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer_client.embedding.routing import Routing, route


def bucketize(
    lengths: Tensor,
    indices: Tensor,
    block_sizes: Sequence[int],
    world_size: int,
    routings: Sequence[Routing],
    *,
    weights: Tensor | None = None,
    batch_sizes: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    """The definition of `block_bucketize`: a stable sort of the indices by owner.

    Indices come sorted by (feature, row), so sorting them stably by owner sorts them by (owner, feature, row).
    Arguments and results as in `routing.block_bucketize`, with one block size and one mode per feature.
    """
    num_features, num_rows = len(block_sizes), lengths.numel()
    sizes = list(batch_sizes) if batch_sizes is not None else [num_rows // max(num_features, 1)] * num_features
    assert sum(sizes) == num_rows, (sizes, num_rows)
    counts = lengths.to(torch.int64)
    row = torch.repeat_interleave(torch.arange(num_rows, device=indices.device), counts)
    position = torch.arange(indices.numel(), device=indices.device) - (counts.cumsum(0) - counts)[row]
    owner, sent = torch.empty_like(row), indices.clone()
    row_start, start = 0, 0
    for size, block, routing in zip(sizes, block_sizes, routings, strict=True):
        stop = start + int(counts[row_start : row_start + size].sum())
        owner[start:stop], sent[start:stop] = route(
            indices[start:stop], routing, world_size=world_size, block_size=block
        )
        row_start, start = row_start + size, stop
    order = torch.argsort(owner, stable=True)
    slot = torch.empty_like(order)
    slot[order] = torch.arange(order.numel(), device=order.device)
    new_lengths = torch.bincount(owner * num_rows + row, minlength=world_size * num_rows).to(lengths.dtype)
    new_weights = weights[order] if weights is not None else None
    narrow = torch.int64 if indices.dtype == torch.uint64 else indices.dtype
    return new_lengths, sent[order], new_weights, position[order].to(narrow), slot.to(narrow)
