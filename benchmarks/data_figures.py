"""Loads and key skew of a data set's batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from evenkeel.partitioning import partition
from examples.datasets import Histories
from examples.datasets.criteo import MISSING
from examples.datasets.histories import ranges
from trainer_client.embedding.routing import DIST_TYPES, as_routing, block_size, owners
from trainer_client.embedding.routing.skew import lower_bound

COSTS: dict[str, Callable[[NDArray[np.int64]], NDArray[np.int64]]] = {
    "tokens": lambda lengths: lengths,
    "L² + 5120 L": lambda lengths: lengths * lengths + 5120 * lengths,  # an HSTU of width 1024
}


def order_of(count: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """Epoch after epoch, each sample once in an order of its own."""
    epoch = 0
    while True:
        yield np.random.default_rng([seed, epoch]).permutation(count)
        epoch += 1


def batches_of(count: int, size: int, batches: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """The samples of each global batch; what an epoch leaves begins the next batch."""
    epochs, left = order_of(count, seed), np.zeros(0, dtype=np.int64)
    for _ in range(batches):
        while len(left) < size:
            left = np.concatenate([left, next(epochs)])
        yield left[:size]
        left = left[size:]


def _check_batch(count: int, world_size: int, each: int, what: str) -> None:
    if count < world_size * each:
        raise ValueError(f"{count:,} {what} are less than a batch of {world_size} ranks × {each}; use fewer")


def load_figures(
    lengths: NDArray[np.int64],
    *,
    ranks: list[int],
    samples: list[int],
    batches: int,
    max_length: int,
    strategy: str = "minimal_move",
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Loads before and after balancing, a row for each number of ranks, samples a rank, and cost.

    Args:
        lengths: (users,) events of each user.
        ranks: Numbers of ranks.
        samples: Numbers of samples a rank.
        batches: Global batches to look at; figures are means over them.
        max_length: Longer histories are cut.
        strategy: That balances.
        seed: Of the order of the users.

    Raises:
        ValueError: If there are fewer users than a batch has samples.
    """
    tokens = np.minimum(lengths, max_length)
    for world_size, each in product(ranks, samples):
        _check_batch(len(tokens), world_size, each, "users")
    rows = []
    for world_size in ranks:
        for each in samples:
            homes = np.repeat(np.arange(world_size, dtype=np.int32), each)
            for name, cost in COSTS.items():
                figures = []
                for chosen in batches_of(len(tokens), world_size * each, batches, seed):
                    plan = partition(cost(tokens[chosen]), homes, world_size, sizes=tokens[chosen], strategy=strategy)
                    mean = float(plan.loads.mean())
                    figures.append([
                        plan.home_loads.max() / mean, plan.loads.max() / mean, plan.lower_bound / mean,
                        plan.loads.max() / plan.home_loads.max(), plan.moved_size / tokens[chosen].sum(),
                    ])  # fmt: skip
                before, after, bound, time, moved = np.mean(np.array(figures, dtype=np.float64), axis=0).tolist()
                rows.append({
                    "ranks": world_size, "samples": each, "cost": name, "batches": batches, "before": before,
                    "after": after, "bound": bound, "saved": 1 - time, "moved_share": moved,
                })  # fmt: skip
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """Keys of samples, as embedding tables are asked for them.

    Attributes:
        offsets: (samples + 1,) where each sample's keys begin.
        values: (keys,) int64.
        features: (keys,) which table each key is of; None: all of one.
        num_features: Tables.
        num_embeddings: Rows of each table, for `continuous`.
    """

    offsets: NDArray[np.int64]
    values: NDArray[np.int64]
    features: NDArray[np.int64] | None
    num_features: int
    num_embeddings: int


def keys_of_histories(data: Histories, *, max_length: int, seed: int) -> Keys:
    """The items of all users' latest events under the file's own ids, users in a random order."""
    users = next(order_of(len(data.users), seed))
    ends = data.offsets[users + 1]
    begins = np.maximum(data.offsets[users], ends - max_length)
    values = data.item_ids[data.items[ranges(begins, ends)]]
    offsets = np.concatenate([[0], np.cumsum(ends - begins)])
    return Keys(
        offsets=offsets, values=values, features=None, num_features=1, num_embeddings=int(data.item_ids.max()) + 1
    )


def keys_of_rows(table: NDArray[np.int64]) -> Keys:
    """The hashed features of rows in the order of the file, missing ones left out."""
    if not len(table):
        raise ValueError("the file holds no rows; download it anew")
    present = table != MISSING
    features = np.broadcast_to(np.arange(table.shape[1]), table.shape)[present]
    offsets = np.concatenate([[0], np.cumsum(present.sum(axis=1))])
    return Keys(
        offsets=offsets, values=table[present], features=features, num_features=table.shape[1],
        num_embeddings=1 << 32,
    )  # fmt: skip


def key_skews(data: Keys, *, ranks: list[int], samples: list[int], batches: int) -> list[dict[str, Any]]:
    """The spread of keys over their owners, a row for each number of ranks, samples a rank, and routing.

    Batches are consecutive samples. Where there are fewer than asked for, all full ones are looked at.

    Raises:
        ValueError: If there is not one full batch.
    """
    rows = []
    count = len(data.offsets) - 1
    for world_size in ranks:
        for each in samples:
            size = world_size * each
            _check_batch(count, world_size, each, "samples")
            looked_at = min(batches, count // size)
            found = [
                _skews_of_batch(data, np.arange(batch * size, (batch + 1) * size), world_size)
                for batch in range(looked_at)
            ]
            for routing in DIST_TYPES:
                figures = {key: float(np.mean([one[routing][key] for one in found])) for key in found[0][routing]}
                rows.append({"ranks": world_size, "samples": each, "batches": looked_at, "routing": routing} | figures)
    return rows


def _skews_of_batch(data: Keys, batch: NDArray[np.int64], world_size: int) -> dict[str, dict[str, float]]:
    """Of one global batch, by routing."""
    begin, end = int(data.offsets[batch[0]]), int(data.offsets[batch[-1] + 1])
    counts = np.diff(data.offsets[batch[0] : batch[-1] + 2])
    sources = np.repeat(np.repeat(np.arange(world_size), len(batch) // world_size), counts)
    values = data.values[begin:end]
    # A key of a table as one number, then a key that a rank asks for.
    features = np.zeros(len(values), dtype=np.int64) if data.features is None else data.features[begin:end]
    _, places, numbers = np.unique(np.stack([features, values]), axis=1, return_index=True, return_inverse=True)
    numbers = numbers.reshape(-1)
    asked = np.unique(numbers * world_size + sources) // world_size
    distinct = torch.from_numpy(values[places])
    occurrences = {"raw": np.bincount(numbers), "deduplicated": np.bincount(asked)}
    best = {name: lower_bound(torch.from_numpy(of_key), world_size) for name, of_key in occurrences.items()}
    skews: dict[str, dict[str, float]] = {}
    for routing in DIST_TYPES:
        owner = owners(
            distinct, as_routing(routing), world_size=world_size, block_size=block_size(data.num_embeddings, world_size)
        ).numpy()
        figures = {"keys": float(len(values)), "left": len(asked) / max(len(values), 1)}
        for name, of_key in occurrences.items():
            mean = max(of_key.sum() / world_size, 1e-9)
            figures[name] = float(np.bincount(owner, of_key, world_size).max() / mean)
            figures[f"{name}_best"] = best[name] / mean
        skews[routing] = figures
    return skews
