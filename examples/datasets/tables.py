"""Lines of large text files, packed or not, and the numbers in them."""

from __future__ import annotations

import gzip
import io
import re
import warnings
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import GEN_CLOSED, getgeneratorstate
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

_LINES = 1 << 20  # read at once
_TOLD_EVERY = 1 << 15  # lines

Watch = Callable[[Path, int], None]
"""Is told a file and how many of its bytes have been read."""


@contextmanager
def open_lines(path: Path, watch: Watch | None = None) -> Iterator[Iterator[str]]:
    """The lines of a text file, also of one that gzip packed.

    Args:
        path: The file.
        watch: Is told now and then how far reading is.

    Raises:
        ValueError: If the file is an archive, damaged or no text; while it is read, or, where all lines were read and
            the last one was cut off, at the end.
    """
    with path.open("rb") as raw:
        packed = raw.peek(2)[:2] == b"\x1f\x8b"
        binary = gzip.GzipFile(fileobj=raw) if packed else raw
        with io.TextIOWrapper(binary, encoding="utf-8-sig") as text:
            lines = _tell(text, binary, raw, path, watch)
            yield lines
            if getgeneratorstate(lines) == GEN_CLOSED and not packed:  # all was read, and no check sum vouches for it
                _check_end(raw, path)


def _check_end(raw: io.BufferedReader, path: Path) -> None:
    # A number that was cut off is a number still; an object of JSON is not.
    raw.seek(max(raw.seek(0, io.SEEK_END) - 200, 0))
    if (end := raw.read()) and not end.endswith((b"\n", b"\r", b"}")):
        line = re.split(rb"[\r\n]", end)[-1].decode(errors="replace")
        raise ValueError(f"{path}, last line: {line!r} has no line break, as if the file had been cut off there; "
                         "download it anew, or add the line break if it is whole")  # fmt: skip


def _tell(
    text: Iterable[str],
    binary: io.BufferedReader | gzip.GzipFile,
    raw: io.BufferedReader,
    path: Path,
    watch: Watch | None,
) -> Generator[str, None, None]:
    lines = iter(text)
    try:
        start = binary.peek(512)
        if start[:4] == b"PK\x03\x04" or start[257:262] == b"ustar":
            raise ValueError(f"{path} is an archive; unpack it, and give the folder or file in it")
        for number, line in enumerate(lines, start=1):
            if watch is not None and number % _TOLD_EVERY == 0:
                watch(path, raw.tell())
            yield line
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} ends early or is no text ({error}); download it anew") from error
    if watch is not None:
        watch(path, path.stat().st_size)


def chunks(lines: Iterator[str], first: int) -> Iterator[tuple[int, list[str]]]:
    """Some hundred thousand lines at a time, each time with the number of the first in the file."""
    while chunk := list(islice(lines, _LINES)):
        yield first, chunk
        first += len(chunk)


def split_lines(
    chunk: list[str], path: Path, *, first: int, separator: str, columns: int, wanted: str
) -> list[list[str]]:
    """The fields of each line that is not blank.

    Raises:
        ValueError: If a line has another number of fields; the message has its number.
    """
    rows = [line.rstrip("\r\n").split(separator) for line in chunk]
    if any(len(row) != columns for row in rows):
        for number, (row, line) in enumerate(zip(rows, chunk, strict=True), start=first):
            if len(row) != columns and not line.isspace():
                raise ValueError(f"{path}, line {number}: {line.rstrip()[:200]!r} is not {wanted}")
        rows = [row for row in rows if len(row) == columns]
    return rows


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
    for start, chunk in chunks(iter(lines), first):
        if not all(map(str.isspace, chunk)):
            try:
                yield _parse(chunk, dtype, columns)
            except (ValueError, DeprecationWarning):
                _blame(chunk, path, dtype=dtype, first=start, wanted=wanted, columns=columns)
                raise


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
