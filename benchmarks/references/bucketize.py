"""Bucketize in plain torch and NumPy operations: the definition that the kernels are held against."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from trainer_client.embedding.routing import Routing


def route(keys: Tensor, routing: Routing, world_size: int, block: int) -> tuple[Tensor, Tensor]:
    """Owner of each of (n) keys and the index sent to it, in unsigned integers."""
    key = keys.to(torch.int64).numpy().view(np.uint64)
    ranks, width, bits = np.uint64(world_size), np.uint64(max(block, 1)), np.uint64(33)
    sent, inside = key, np.zeros(key.shape, dtype=bool)
    if routing.dist_type == "continuous":
        inside = (key // width < ranks) & (block > 0)
        sent = np.where(inside, key % width, key // ranks)
    elif routing.dist_type == "hash_roundrobin":
        key = key ^ np.uint64(routing.mix % 2**64)
        for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
            key = (key ^ key >> bits) * np.uint64(factor)
        key = key ^ key >> bits
    owner = np.where(inside, key // width, key % ranks)
    return torch.from_numpy(owner.view(np.int64)), torch.from_numpy(sent.view(np.int64)).to(keys.dtype)


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
    counts = lengths.to(torch.int64)
    row = torch.repeat_interleave(torch.arange(num_rows), counts)
    position = torch.arange(indices.numel()) - (counts.cumsum(0) - counts)[row]
    feature = torch.repeat_interleave(torch.arange(num_features), torch.tensor(sizes, dtype=torch.int64))[row]
    owner, sent = torch.empty_like(row), indices.clone()
    for number, (block, routing) in enumerate(zip(block_sizes, routings, strict=True)):
        of_it = feature == number
        owner[of_it], sent[of_it] = route(indices[of_it], routing, world_size, block)
    order = torch.argsort(owner, stable=True)
    slot = torch.empty_like(order)
    slot[order] = torch.arange(order.numel())
    new_lengths = torch.bincount(owner * num_rows + row, minlength=world_size * num_rows).to(lengths.dtype)
    places = position[order].to(indices.dtype), slot.to(indices.dtype)
    return new_lengths, sent[order], None if weights is None else weights[order], *places
