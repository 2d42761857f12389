"""Small checkpoints whose every value is a function of its key."""

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

from trainer_client.embedding.checkpoint import Checkpoint, open_checkpoint
from trainer_client.embedding.routing import Routing, block_size

DIM = 3
NUM_EMBEDDINGS = 90
MODES = (Routing(dist_type="continuous"), Routing(dist_type="roundrobin"), Routing(dist_type="hash_roundrobin"))
KEYS = np.unique(
    np.concatenate(
        [
            np.arange(0, 90, 2),
            -np.arange(1, 30) * 7,
            np.arange(1, 20) * 2**40,
            np.array([-(2**63), 2**63 - 1, -(2**31), 2**31 - 1]),
        ]
    )
).astype(np.int64)


def values_of(keys: np.ndarray, width: int, salt: int) -> np.ndarray:
    """(n x width) float32, different for each key, column and salt."""
    wide = keys.astype(np.uint64)[:, None] * np.uint64(2 * salt + 1) + np.arange(width, dtype=np.uint64)
    return ((wide * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(40)).astype(np.float32)


def write_dump(
    path: Path,
    routing: Routing,
    world_size: int,
    *,
    table: str = "items",
    keys: np.ndarray = KEYS,
    dist_type: bool = True,
    counter: bool = True,
) -> None:
    """A DynamicEmb dump, written from its description and without the code under test."""
    path.mkdir(exist_ok=True)
    options: dict[str, object] = {"lr": 0.1, "evict_strategy": "lru", "num_embeddings": NUM_EMBEDDINGS}
    if dist_type:
        options["dist_type"] = routing.dist_type
    (path / f"{table}_opt_args.json").write_text(json.dumps(options))
    block = block_size(NUM_EMBEDDINGS, world_size)
    owner = np.array([routing.owner(int(k), world_size=world_size, block_size=block) for k in keys])
    for rank in range(world_size):
        mine, tail = keys[owner == rank], f".rank_{rank}.world_size_{world_size}"
        mine.tofile(path / f"{table}_emb_keys{tail}")
        values_of(mine, DIM, 1).tofile(path / f"{table}_emb_values{tail}")
        values_of(mine, 2 * DIM, 2).tofile(path / f"{table}_emb_opt_values{tail}")
        values_of(mine, 2, 3).astype(np.int64).tofile(path / f"{table}_emb_scores{tail}")
        if counter:
            mine[::2].tofile(path / f"{table}_counter_keys{tail}")
            values_of(mine[::2], 1, 4).astype(np.int64).tofile(path / f"{table}_counter_frequencies{tail}")


def check_rows(
    checkpoint: Checkpoint, routing: Routing, world_size: int, *, table: str = "items", keys: Iterable[int] = KEYS
) -> None:
    """Every row on exactly its owner, with the values and state of its key, bit for bit."""
    record = checkpoint.records[table]
    assert (record.routing, record.world_size) == (routing, world_size)
    block = block_size(NUM_EMBEDDINGS, world_size)
    found = []
    for rank in range(world_size):
        for rows in checkpoint.rows(table, rank):
            for key in rows.keys.tolist():
                assert routing.owner(key, world_size=world_size, block_size=block) == rank
            raw = rows.keys.numpy()
            assert np.array_equal(rows.arrays["values"].numpy(), values_of(raw, DIM, 1))
            if "opt_values" in rows.arrays:
                assert np.array_equal(rows.arrays["opt_values"].numpy(), values_of(raw, 2 * DIM, 2))
                assert torch.equal(rows.arrays["scores"], torch.from_numpy(values_of(raw, 2, 3).astype(np.int64)))
            found += rows.keys.tolist()
    assert sorted(found) == sorted(int(key) for key in keys)


def opened(path: Path) -> Checkpoint:
    return open_checkpoint(path)
