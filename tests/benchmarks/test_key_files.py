"""Keys read from files, and tables that look them up in their order."""

from __future__ import annotations

import gzip
import lzma
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
import typer

from benchmarks.key_files import numbered, read_keys
from benchmarks.placement_gpu_keys import batches, traced_job


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


def test_tables_look_up_traces_in_their_order() -> None:
    draw = np.random.default_rng(3)
    traces = [draw.integers(0, 50, 4_000) * 1_000_003, draw.integers(0, 9, 600)]
    job = traced_job(5, 8, 10, traces)
    assert [job.rows[0], job.rows[1]] == [50, 9]
    pool = list(islice(batches(job, torch.device("cpu")), 10))
    for index, ids in enumerate(job.ids):
        assert 1 <= ids <= max(1, len(traces[index % 2]) // 80)
        found = np.concatenate([batch[f"f_t{index}"].values().numpy() for batch in pool])
        own = np.resize(traces[index % 2], len(traces[index % 2]) * 2)
        begin = len(traces[index % 2]) * (index // 2) // (3 if index % 2 == 0 else 2)
        np.testing.assert_array_equal(numbered(found), numbered(own[begin : begin + 80 * ids]))
        assert found.max() < job.rows[index]
