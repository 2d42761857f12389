"""Predictions held against caches simulated over traces read from files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import typer
from typer.testing import CliRunner

from benchmarks.key_statistics import main
from benchmarks.key_traces import TRACES

_APP = typer.Typer()
_APP.command()(main)


def test_a_trace_of_ones_own_is_judged(tmp_path: Path) -> None:
    keys = np.concatenate(list(TRACES["zipf"](np.random.default_rng(2), 40, 512)))
    (tmp_path / "clicks.csv").write_text("user,item\n" + "".join(f"{at},i{key}\n" for at, key in enumerate(keys)))
    asked = ["--trace", str(tmp_path / "clicks.csv"), "--column", "1", "--lookups", "512"]
    found = CliRunner().invoke(_APP, [*asked, "--json", str(tmp_path / "found.json")])
    assert found.exit_code == 0, found.output
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [(row["trace"], row["policy"], row["steps"]) for row in rows] == [
        ("clicks", "lru", 40),
        ("clicks", "lfu", 40),
    ]
    for row in rows:
        assert row["keys"] == len(np.unique(keys))
        assert row["whole"]["off"] < 0.3
        assert row["whole"]["drift"] < 0.1
