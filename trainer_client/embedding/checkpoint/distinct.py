"""Finding a repeated key among more keys than memory should hold."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from trainer_client.embedding.checkpoint.rows import as_bytes
from trainer_client.embedding.routing import hash_roundrobin, owners

LIMIT = 1 << 22
"""Keys that are sorted at a time: 32 MiB."""
_MIXED = hash_roundrobin(0x5EED)  # another hash than that which put the keys into one file


def _repeated(keys: NDArray[np.int64]) -> int | None:
    keys.sort()
    twice = keys[1:][keys[1:] == keys[:-1]]
    return int(twice[0]) if twice.size else None


def find_repeated(pieces: Iterable[torch.Tensor], total: int, scratch: Path, *, limit: int = LIMIT) -> int | None:
    """A key that comes twice, or None.

    Up to `limit` keys are sorted in memory. More are first cut by a hash into files of about half as many each.

    Args:
        pieces: int64 keys, some at a time.
        total: Keys in all.
        scratch: A directory for the files, which are removed again.
        limit: Keys in memory at a time.
    """
    parts = min(4096, -(-2 * total // limit)) if total > limit else 1
    if parts == 1:
        collected = [piece.numpy() for piece in pieces]
        return _repeated(np.concatenate(collected)) if collected else None
    files = [scratch / f"keys{part}" for part in range(parts)]
    try:
        for path in files:
            path.write_bytes(b"")
        for piece in pieces:
            part = owners(piece, _MIXED, num_ranks=parts)
            order = torch.argsort(part, stable=True)
            counts = torch.bincount(part, minlength=parts).tolist()
            keys, at = piece[order], 0
            for path, count in zip(files, counts, strict=True):
                with path.open("ab") as file:
                    file.write(as_bytes(keys[at : at + count]))
                at += count
        found = (_repeated(np.fromfile(path, dtype=np.int64)) for path in files)
        return next((key for key in found if key is not None), None)
    finally:
        for path in files:
            path.unlink(missing_ok=True)
