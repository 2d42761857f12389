"""Numbers from the lines of large text files."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

_LINES = 1 << 20  # read at once


def read_numbers(
    lines: Iterable[str], path: Path, *, dtype: DTypeLike, first: int, wanted: str, columns: Sequence[int] | None = None
) -> Iterator[NDArray[Any]]:
    """The numbers of comma-separated lines, some hundred thousand lines at a time.

    Args:
        lines: The lines; blank ones are skipped.
        path: Of their file, for errors.
        dtype: Of a line (structured), or of each of its numbers.
        first: Number of the first line in the file.
        wanted: What a line should be, for errors.
        columns: Which columns; default: all.

    Raises:
        ValueError: If a line is something else; the message has its number.
    """
    lines = iter(lines)
    while chunk := list(islice(lines, _LINES)):
        if not all(map(str.isspace, chunk)):
            try:
                yield _parse(chunk, dtype, columns)
            except (ValueError, DeprecationWarning):
                _blame(chunk, path, dtype=dtype, first=first, wanted=wanted, columns=columns)
                raise
        first += len(chunk)


def _parse(lines: list[str], dtype: DTypeLike, columns: Sequence[int] | None) -> NDArray[Any]:
    plain = np.dtype(dtype).names is None
    read = partial(
        np.loadtxt, lines, delimiter=",", usecols=columns, ndmin=2 if plain else 1, comments=None, quotechar='"'
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", DeprecationWarning)  # numpy still reads 1.5 as a whole number
            return read(dtype=dtype)
    except (ValueError, DeprecationWarning):
        if not plain:
            raise
    values: NDArray[Any] = read(dtype=np.float64)  # several times as slow; some write whole numbers as 1.0
    if not np.equal(values, np.rint(values)).all():
        raise ValueError("not all numbers are whole")
    return values.astype(dtype)


def _blame(
    lines: list[str], path: Path, *, dtype: DTypeLike, first: int, wanted: str, columns: Sequence[int] | None
) -> None:
    for number, line in enumerate(lines, start=first):
        if not line.isspace():
            try:
                _parse([line], dtype, columns)
            except (ValueError, DeprecationWarning) as error:
                raise ValueError(f"{path}, line {number}: {line.rstrip()!r} is not {wanted}") from error
