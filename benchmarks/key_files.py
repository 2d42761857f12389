"""Keys of a table in the order in which they were looked up, read from files of some kinds."""

from __future__ import annotations

import gzip
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import typer

Array = npt.NDArray[Any]

_PACKED: dict[str, Callable[[Path], Any]] = {".gz": gzip.open, ".xz": lzma.open}


def read_keys(path: Path, column: int = 0) -> Array:
    """(lookups,) int64 keys.

    Args:
        path: A `.npy` file of integers, or a text file with a line for each lookup, its columns parted by commas,
            semicolons, tabs or blanks. Either may be packed as `.gz` or `.xz`.
        column: Which column of a text file; keys there may be any words. A first line without a digit is a heading.
    """
    unpack = _PACKED.get(path.suffix)
    with unpack(path) if unpack else path.open("rb") as file:
        if (path.with_suffix("") if unpack else path).suffix == ".npy":
            found: Array = np.load(file)
            if found.dtype.kind not in "iu":
                raise typer.BadParameter(f"{path} holds {found.dtype}, not integers")
            return found.ravel().astype(np.int64)
        return numbered(_column(file, column, path))


def numbered(keys: Array) -> Array:
    """The same with keys numbered in the order of their first lookups."""
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    found: Array = rank[inverse]
    return found


def _column(file: IO[bytes], column: int, path: Path) -> Array:
    parts = bytes.maketrans(b",;\t", b"   ")
    found = []
    for number, line in enumerate(file):
        words = line.translate(parts).split()
        if words and (number or any(byte in b"0123456789" for byte in line)):
            if column >= len(words):
                raise typer.BadParameter(f"line {number + 1} of {path} has no column {column}")
            found.append(words[column])
    return np.array(found)
