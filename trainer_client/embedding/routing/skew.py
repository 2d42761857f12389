"""How evenly a batch's keys spread over ranks, and whether another routing could do better."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from trainer_client.embedding.routing.bucketize import block_bucketize
from trainer_client.embedding.routing.ownership import RoutingLike, as_int64


@dataclass(frozen=True, slots=True)
class HotKey:
    """A key that occurs often: its feature, value and number of occurrences."""

    feature: str
    key: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SkewReport:
    """Spread of a batch's keys.

    Attributes:
        keys_per_rank: Occurrences that each rank would look up.
        max_over_mean: Load of the fullest rank over the mean; 1 is even, 0 a batch without keys.
        best_max_over_mean: No owner function that gives a key one owner can stay below this: of the heaviest
            `j * ranks + 1` keys some rank owns `j + 1`.
        hottest: The heaviest keys.
    """

    keys_per_rank: tuple[int, ...]
    max_over_mean: float
    best_max_over_mean: float
    hottest: tuple[HotKey, ...]

    def __str__(self) -> str:
        spread = f"keys per rank {min(self.keys_per_rank):,} to {max(self.keys_per_rank):,}"
        best = f"no routing can do better than {self.best_max_over_mean:.3f}"
        lines = [f"{spread}, max/mean {self.max_over_mean:.3f} ({best})"]
        lines += [f"  {hot.feature} {hot.key}: {hot.count:,}" for hot in self.hottest]
        return "\n".join(lines)


def lower_bound(counts: Tensor, world_size: int) -> float:
    """Least possible load of the fullest rank."""
    ordered = counts.sort(descending=True).values.to(torch.float64)
    padded = torch.cat([torch.zeros(1, dtype=torch.float64, device=ordered.device), ordered.cumsum(0)])
    j = torch.arange((ordered.numel() - 1) // world_size + 1, device=ordered.device)
    last = j * world_size + 1  # the keys in question, of which the j + 1 lightest may share a rank
    pigeonhole = padded[last] - padded[last - j - 1]
    return max(float(ordered.sum()) / world_size, float(pigeonhole.max()))


def _loads(
    kjt: Any, world_size: int, routing: RoutingLike | Sequence[RoutingLike], block_sizes: Sequence[int] | None
) -> Tensor:
    """(ranks x features) how many of each feature's keys each rank owns."""
    lengths = torch.tensor(kjt.length_per_key(), dtype=torch.int64, device="cpu")
    blocks = [0] * len(lengths) if block_sizes is None else block_sizes
    if len(blocks) != len(lengths):
        raise ValueError(f"{len(blocks)} block sizes for {len(lengths)} features; give one each")
    sent = block_bucketize(lengths, kjt.values().cpu(), blocks, world_size, routing, permutation=False)
    return sent.lengths.view(world_size, -1)


def feature_skew(
    kjt: Any,
    *,
    world_size: int,
    routing: RoutingLike | Sequence[RoutingLike] = "roundrobin",
    block_sizes: Sequence[int] | None = None,
) -> dict[str, float]:
    """Keys of the rank with the most over the mean, of each feature that has any; arguments as in `report`."""
    heaviest = _loads(kjt, world_size, routing, block_sizes).amax(0).tolist()
    features = zip(kjt.keys(), kjt.length_per_key(), heaviest, strict=True)
    return {name: most * world_size / length for name, length, most in features if length}


def report(
    kjt: Any,
    *,
    world_size: int,
    routing: RoutingLike | Sequence[RoutingLike] = "roundrobin",
    block_sizes: Sequence[int] | None = None,
    top: int = 5,
) -> SkewReport:
    """Reports the spread of a KeyedJaggedTensor's keys; a diagnosis that copies the batch to the host.

    Args:
        kjt: A KeyedJaggedTensor.
        world_size: Ranks.
        routing: One for all features, or one per feature.
        block_sizes: Rows a rank of each feature's table, for `continuous`.
        top: Number of hottest keys.

    Raises:
        ValueError: If the numbers of routings, block sizes and features differ.
    """
    load = _loads(kjt, world_size, routing, block_sizes).sum(1)
    counts, hottest = list[Tensor](), list[HotKey]()
    by_feature = as_int64(kjt.values()).cpu().split(kjt.length_per_key())  # type: ignore[no-untyped-call]
    for name, keys in zip(kjt.keys(), by_feature, strict=True):
        unique, count = torch.unique(keys, return_counts=True)
        counts.append(count)
        heavy = count.topk(min(top, count.numel()))
        hottest += map(HotKey, repeat(name), unique[heavy.indices].tolist(), heavy.values.tolist())
    total = int(load.sum())
    return SkewReport(
        keys_per_rank=tuple(load.tolist()),
        max_over_mean=int(load.max()) * world_size / total if total else 0.0,
        best_max_over_mean=lower_bound(torch.cat(counts), world_size) * world_size / total if total else 0.0,
        hottest=tuple(sorted(hottest, key=lambda hot: -hot.count)[:top]),
    )
