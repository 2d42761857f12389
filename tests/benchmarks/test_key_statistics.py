"""Predictions held against caches simulated over traces read from files."""

from __future__ import annotations

import gzip
import json
import lzma
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from benchmarks.key_statistics import SHARES, main
from benchmarks.key_traces import TRACES, simulated
from benchmarks.key_traces_public import PUBLIC, integers, timed
from evenkeel.placement import Eviction

_APP = typer.Typer()
_APP.command()(main)


def test_a_trace_of_ones_own_is_judged(tmp_path: Path) -> None:
    steps = list(TRACES["zipf"](np.random.default_rng(2), 40, 512))
    keys = np.concatenate(steps)
    (tmp_path / "clicks.csv").write_text("user,item\n" + "".join(f"{at},i{key}\n" for at, key in enumerate(keys)))
    asked = ["--trace", "clicks.csv", "--column", "1", "--json", "found.json", "--png", "found.png"]
    found = CliRunner().invoke(_APP, [str(tmp_path / one) if "." in one else one for one in asked])
    assert found.exit_code == 0, found.output
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [(row["trace"], row["lookups_per_step"], row["policy"]) for row in rows] == [
        ("clicks", 512, "lru"),
        ("clicks", 512, "lfu"),
    ]
    sizes = np.array(SHARES) * len(np.unique(keys))
    for row, eviction in zip(rows, (Eviction.LRU, Eviction.LFU), strict=True):
        assert row["simulated"] == pytest.approx(simulated(steps, sizes, 20, eviction).tolist(), abs=0.01)
        off = np.abs(np.subtract(row["predicted"]["curve"], row["simulated"])).max()
        assert row["worst"]["curve"] == pytest.approx(off)
        assert off <= row["told"]["curve"]
    assert (tmp_path / "found.png").stat().st_size > 10_000


def test_public_traces_are_read_in_time() -> None:
    lines = b"u1 7 30\nu2 9 10\nu3 7 10\n"
    assert timed(1, 2)(lines.replace(b"u", b"")).tolist() == [9, 7, 7]
    assert timed(1, 2)(gzip.compress(lines.replace(b"u", b""))).tolist() == [9, 7, 7]
    packed = lzma.compress(np.array([3, 1], dtype=">i8").tobytes())
    assert integers(">i8")(packed).tolist() == [3, 1]
    assert PUBLIC["gowalla"].read(b"0 5 6\n1 5\n").tolist() == [5, 6, 5]
