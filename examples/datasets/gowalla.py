"""Gowalla's check-ins as SNAP publishes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from examples.datasets.histories import Histories, group_by_user
from examples.datasets.tables import Watch, chunks, open_lines, split_lines

WANTED = "user, check-in time, latitude, longitude and location id, separated by tabs"


def read_gowalla(path: str | Path, *, watch: Watch | None = None) -> Histories:
    """Reads `loc-gowalla_totalCheckins.txt`, also packed (`.txt.gz`).

    An item is a location. Times are Unix seconds; all check-ins count as liked, and there is one kind of action.

    Args:
        path: The file.
        watch: Is told how far reading is.

    Raises:
        ValueError: If it is not in its published format.
    """
    path = Path(path)
    parts = []
    with open_lines(path, watch) as lines:
        for first, chunk in chunks(lines, 1):
            rows = split_lines(chunk, path, first=first, separator="\t", columns=5, wanted=WANTED)
            try:
                parts.append(_numbers(rows))
            except ValueError:
                for row in rows:  # which one it was
                    try:
                        _numbers([row])
                    except ValueError as error:
                        raise ValueError(f"{path}: {' '.join(row)[:200]!r} is not {WANTED}") from error
                raise
    table = np.concatenate(parts or [np.zeros((0, 3), dtype=np.int64)])
    if not len(table):
        raise ValueError(f"{path} holds no check-ins; download it anew")
    return group_by_user(
        users=table[:, 0],
        items=table[:, 2],
        actions=np.zeros(len(table), dtype=np.int64),
        liked=np.ones(len(table), dtype=np.bool_),
        times=table[:, 1],
    )


def _numbers(rows: list[list[str]]) -> NDArray[np.int64]:
    """(rows, 3) user, time and location."""
    users, times, _, _, places = zip(*rows, strict=True) if rows else ((),) * 5
    seconds = np.array([time.removesuffix("Z") for time in times], dtype="datetime64[s]")
    if np.isnat(seconds).any():
        raise ValueError("a time is missing")
    return np.column_stack([
        np.array(users, dtype=np.str_).astype(np.int64), seconds.astype(np.int64),
        np.array(places, dtype=np.str_).astype(np.int64),
    ])  # fmt: skip
