"""Keys read from files."""

from __future__ import annotations

import gzip
import lzma
from pathlib import Path

import numpy as np
import pytest
import typer

from benchmarks.key_files import read_keys


def test_arrays_are_read_packed_or_not(tmp_path: Path) -> None:
    keys = np.array([7, 5, 7, 1 << 40])
    np.save(tmp_path / "keys.npy", keys)
    content = (tmp_path / "keys.npy").read_bytes()
    (tmp_path / "keys.npy.xz").write_bytes(lzma.compress(content))
    (tmp_path / "keys.npy.gz").write_bytes(gzip.compress(content))
    for name in ("keys.npy", "keys.npy.xz", "keys.npy.gz"):
        np.testing.assert_array_equal(read_keys(tmp_path / name), keys)


@pytest.mark.parametrize(
    "text", ["user,item\n1,red\n2,blue\n1,red\n", "1\tred\n2\tblue\n3 red\n", "1;red\n1;blue\n1;red\n"]
)
def test_a_column_of_words_becomes_numbers(tmp_path: Path, text: str) -> None:
    (tmp_path / "keys.csv").write_text(text)
    assert read_keys(tmp_path / "keys.csv", 1).tolist() == [0, 1, 0]


def test_what_holds_no_keys_is_told(tmp_path: Path) -> None:
    np.save(tmp_path / "rates.npy", np.array([0.5]))
    with pytest.raises(typer.BadParameter, match="float64"):
        read_keys(tmp_path / "rates.npy")
    (tmp_path / "keys.txt").write_text("1 2\n3\n")
    with pytest.raises(typer.BadParameter, match=r"line 2 .* no column 1"):
        read_keys(tmp_path / "keys.txt", 1)
