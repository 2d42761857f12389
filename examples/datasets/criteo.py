"""Criteo's click logs as published: those of one terabyte (`day_0` to `day_23`) and those of the challenge of 2014."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from examples.datasets.tables import Watch, chunks, open_lines, split_lines

NUM_COUNTS = 13
NUM_FEATURES = 26
MISSING = -1
WANTED = f"a label, {NUM_COUNTS} counts and {NUM_FEATURES} hashed features, separated by tabs"


def read_criteo(path: str | Path, *, rows: int | None = None, watch: Watch | None = None) -> NDArray[np.int64]:
    """Reads the hashed features of the first rows of `day_0`, `train.txt` and the like, also packed (`.gz`).

    Args:
        path: The file. That of tests (`test.txt`), which lacks the label, is read too.
        rows: How many rows; default: all.
        watch: Is told how far reading is.

    Returns:
        (rows, 26) keys of 32 bits, 0 to 2**32 - 1; `MISSING` where the field is empty.

    Raises:
        ValueError: If it is not in its published format.
    """
    path = Path(path)
    parts = [np.zeros((0, NUM_FEATURES), dtype=np.int64)]
    with open_lines(path, watch) as lines:
        for first, chunk in chunks(islice(lines, rows), 1):
            fields = chunk[0].count("\t") + 1
            columns = fields if fields == NUM_COUNTS + NUM_FEATURES else 1 + NUM_COUNTS + NUM_FEATURES
            table = split_lines(chunk, path, first=first, separator="\t", columns=columns, wanted=WANTED)
            try:
                keys = [[int(key, 16) if key else MISSING for key in row[-NUM_FEATURES:]] for row in table]
            except ValueError as error:
                raise ValueError(f"{path}, lines {first} to {first + len(chunk) - 1}: a feature is no number in base "
                                 f"16 ({error}); expected {WANTED}") from error  # fmt: skip
            found = np.array(keys, dtype=np.int64).reshape(-1, NUM_FEATURES)
            if found.size and (found.max() >= 1 << 32 or found.min() < MISSING):
                raise ValueError(f"{path} has a feature beyond 32 bits; expected {WANTED}")
            parts.append(found)
    return np.concatenate(parts)
