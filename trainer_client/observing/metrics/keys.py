"""How unevenly the keys of a batch fall on the ranks, by feature."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from trainer_client.embedding.routing.modes import RoutingLike, as_routings
from trainer_client.embedding.routing.reference import as_int64, owners


def key_skew(
    kjt: Any,
    *,
    num_ranks: int,
    routing: RoutingLike | Sequence[RoutingLike] = "roundrobin",
    block_sizes: Sequence[int] | None = None,
) -> dict[str, float]:
    """Keys of the rank with the most over the mean, of each feature that has any.

    Args:
        kjt: A KeyedJaggedTensor; it is copied to the host.
        num_ranks: Ranks that own the keys.
        routing: A mode, or one per feature.
        block_sizes: Rows a rank of each feature's table, for `continuous`.

    Raises:
        ValueError: If the numbers of modes, block sizes and features differ.
    """
    names = list(kjt.keys())
    modes = as_routings(routing)
    modes = modes * len(names) if len(modes) == 1 else modes
    blocks = list(block_sizes) if block_sizes is not None else [0] * len(names)
    if len(modes) != len(names) or len(blocks) != len(names):
        raise ValueError(f"{len(modes)} modes and {len(blocks)} block sizes for {len(names)} features; give one each")
    values, at, found = as_int64(kjt.values()).cpu(), 0, dict[str, float]()
    for name, mode, block, length in zip(names, modes, blocks, kjt.length_per_key(), strict=True):
        keys = values[at : at + length]
        at += length
        if length:
            load = torch.bincount(owners(keys, mode, num_ranks=num_ranks, block_size=block), minlength=num_ranks)
            found[name] = int(load.max()) * num_ranks / length
    return found
