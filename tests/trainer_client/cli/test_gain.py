"""`evenkeel gain`: figures that agree with planning itself, from every kind of file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from evenkeel.gain import estimate_gain
from evenkeel.partitioning.splits import SpanCosts
from trainer_client.cli import app

LENGTHS = np.clip(np.exp(np.random.default_rng(3).normal(5, 1.3, 4096)), 1, 30_000).astype(np.int64)


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["gain", *map(str, arguments)])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    np.save(tmp_path / "lengths.npy", LENGTHS.astype(np.uint32))
    return tmp_path / "lengths.npy"


@given(
    lengths=st.lists(st.integers(0, 10_000), min_size=12, max_size=200),
    ranks=st.integers(1, 4),
    batch=st.integers(1, 3),
    cost=st.sampled_from([(1.0, 0.0), (0.0, 1.0), (512.0, 1.0)]),
)
@settings(max_examples=40, deadline=None)
def test_balancing_makes_nothing_worse(lengths: list[int], ranks: int, batch: int, cost: tuple[float, float]) -> None:
    found = estimate_gain(np.array(lengths), ranks=ranks, batch=batch, linear=cost[0], pairs=cost[1])
    assert [one.way for one in found] == ["as loaded", "balanced", "windows of 8", "split samples"]
    for one in found:
        assert one.speed_up >= 1 - 1e-9
        assert 0 <= one.moved_share <= 1
        assert one.loads.shape == (ranks,)
        assert (np.diff(one.loads) <= 1e-9).all()
    assert found[0].moved_share == 0


def test_as_loaded_is_what_the_lengths_say() -> None:
    found = estimate_gain(LENGTHS, ranks=8, batch=64, linear=2.0, pairs=1.0)
    costs = SpanCosts.of(LENGTHS, per_position=2.0, per_pair=1.0).whole.reshape(8, 8, 64)  # step, rank, sample
    loads = costs.sum(axis=2)
    assert found[0].imbalance == pytest.approx(loads.max(axis=1).sum() / loads.mean(axis=1).sum())
    assert found[1].speed_up == pytest.approx(found[0].imbalance / found[1].imbalance)
    least = np.maximum(costs.max(axis=(1, 2)), loads.mean(axis=1))  # that whole samples allow
    assert found[1].speed_up > 0.99 * loads.max(axis=1).sum() / least.sum()


def test_one_giant_needs_to_be_split() -> None:
    lengths = np.full(64, 10)
    lengths[5] = 10_000
    _, plain, _, split = estimate_gain(lengths, ranks=8, batch=8, pairs=1.0, linear=0.0)
    assert plain.speed_up < 1.01
    assert split.speed_up > 3


def test_columns_of_csv_and_parquet_give_the_same(file: Path) -> None:
    import pyarrow as pa  # starts threads, which no process that others are forked from may have
    import pyarrow.csv
    import pyarrow.parquet

    wanted = json.loads(run(file, "--ranks", 4, "--batch", 64, "--json").stdout)
    assert [row["way"] for row in wanted["ways"]] == list(wanted["loads"])
    table = pa.table({"user": np.arange(len(LENGTHS)), "length": LENGTHS})
    pyarrow.csv.write_csv(table, file.with_suffix(".csv"))
    pyarrow.parquet.write_table(table, file.with_suffix(".parquet"))
    lists = pa.table({"history": [[0] * min(int(one), 50) for one in LENGTHS]})
    pyarrow.parquet.write_table(lists, file.with_name("lists.parquet"))
    for path in (file.with_suffix(".csv"), file.with_suffix(".parquet")):
        done = run(path, "--column", "length", "--ranks", 4, "--batch", 64, "--json")
        assert json.loads(done.stdout) == wanted
    assert run(file.with_name("lists.parquet"), "--ranks", 4, "--batch", 64).exit_code == 0
    pyarrow.parquet.write_table(table.slice(0, 0), file.with_suffix(".parquet"))
    assert "there are 0 lengths" in run(file.with_suffix(".parquet"), "--column", "length").stderr


def test_it_says_what_to_do_next_and_draws(file: Path) -> None:
    done = run(file, "--ranks", 8, "--batch", 64, "--png", file.with_suffix(".png"))
    assert done.exit_code == 0, done.output
    assert "Next: wrap the loader" in done.stdout
    assert "█" in done.stdout
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    np.save(file, np.full(4096, 100))
    assert "Next: nothing" in run(file, "--ranks", 8, "--batch", 64).stdout


def test_mistakes_name_the_remedy(file: Path) -> None:
    np.save(file.with_name("two.npy"), np.ones((4, 4)))
    np.save(file.with_name("less.npy"), np.array([1, -1]))
    np.save(file.with_name("parts.npy"), np.array([1.0, 0.5]))
    file.with_name("a.csv").write_text("a,b\n1,2\n")
    file.with_name("words.csv").write_text("a\n5\n6\nx\n")
    file.with_name("headless.csv").write_text("5\n6\n")
    file.with_name("latin.csv").write_bytes(b"l\xe4nge\n5\n")
    file.with_name("a.txt").write_text("1\n")
    file.with_name("a.parquet").write_text("nothing")
    for arguments, text in (
        ((file, "--ranks", 4096), "give 524288 at least, or a smaller batch or fewer ranks"),
        ((file, "--cost", "cubic"), "use linear, attention, or two numbers"),
        ((file.with_name("two.npy"),), "give one number for each sample"),
        ((file.with_name("less.npy"),), "give lengths of 0 to 2^32"),
        ((file.with_name("parts.npy"),), "holds 0.5; give whole numbers"),
        ((file.with_name("a.csv"),), "name one of a, b"),
        ((file.with_name("words.csv"),), "Failed to parse string: 'x'"),
        ((file.with_name("headless.csv"),), "begins with 5 where the name of its column should be"),
        ((file.with_name("latin.csv"),), "latin.csv cannot be read"),
        ((file.with_name("a.txt"),), "must end in .npy, .csv or .parquet"),
        ((file.with_name("a.parquet"),), "cannot be read"),
    ):
        done = run(*arguments)
        assert (done.exit_code, text in done.stderr) == (2, True), done.output
