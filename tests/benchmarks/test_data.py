"""Figures of a data set: against loads and owners that are counted one by one, and as a command."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import data
from benchmarks.data_figures import Keys, key_skews, load_figures
from trainer_client.embedding.routing import as_routing, block_size


def test_loads_before_balancing_are_those_of_the_batches() -> None:
    lengths = np.array([1, 1, 1, 97])
    tokens, _ = load_figures(lengths, ranks=[2], samples=[2], batches=6, max_length=50)
    # Each batch is all four users; the rank of the long one has it and another.
    assert tokens["before"] == pytest.approx(51 / 26.5)
    assert tokens["after"] == tokens["bound"] == pytest.approx(51 / 26.5)  # with equal counts it is the best
    assert tokens["saved"] == 0
    even, squares = load_figures(np.full(9, 30), ranks=[3], samples=[2], batches=4, max_length=50)
    assert (even["before"], squares["after"], even["moved_share"]) == (1, 1, 0)
    with pytest.raises(ValueError, match="9 users are less than a batch of 3 ranks × 4; use fewer"):
        load_figures(np.full(9, 30), ranks=[3], samples=[2, 4], batches=4, max_length=50)


def test_skews_are_those_of_owners_counted_one_by_one() -> None:
    rng = np.random.default_rng(1)
    counts = rng.integers(0, 9, 24)
    values = rng.zipf(1.5, counts.sum()) % 50
    features = rng.integers(0, 2, len(values))
    keys = Keys(
        offsets=np.concatenate([[0], np.cumsum(counts)]), values=values, features=features, num_features=2,
        num_embeddings=50,
    )  # fmt: skip
    world_size, each = 4, 3
    rows = {row["routing"]: row for row in key_skews(keys, ranks=[world_size], samples=[each], batches=2)}
    for name, row in rows.items():
        routing, block = as_routing(name), block_size(50, world_size)
        raw, single = [], []
        for batch in range(2):
            load, asked = np.zeros(world_size), set()
            for rank in range(world_size):
                first = (batch * world_size + rank) * each
                for at in range(keys.offsets[first], keys.offsets[first + each]):
                    owner = routing.owner(int(values[at]), world_size=world_size, block_size=block)
                    load[owner] += 1
                    asked.add((owner, rank, int(features[at]), int(values[at])))
            once = np.bincount([owner for owner, *_ in asked], minlength=world_size)
            raw.append(load.max() / load.mean())
            single.append(once.max() / once.mean())
        assert row["raw"] == pytest.approx(np.mean(raw))
        assert row["deduplicated"] == pytest.approx(np.mean(single))
        assert row["raw_best"] <= row["raw"]
        assert row["deduplicated_best"] <= row["deduplicated"]
    with pytest.raises(ValueError, match="24 samples are less than a batch of 8 ranks × 4; use fewer"):
        key_skews(keys, ranks=[8], samples=[4], batches=1)


def test_command_prints_and_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["data", *arguments])
        data.main()
        return capsys.readouterr().out

    assert "generated, not published" in run("generate", "MovieLens", str(tmp_path / "ml"))
    out = run("lengths", str(tmp_path / "ml"), "--ranks", "4,8", "--batches", "3", "--json", str(tmp_path / "l.json"))
    assert "3,000 users" in out
    result = json.loads((tmp_path / "l.json").read_text())
    assert [row["ranks"] for row in result["rows"]] == [4, 4, 8, 8]
    assert all(row["bound"] <= row["after"] < row["before"] for row in result["rows"])
    assert f"{result['rows'][0]['before']:.3f}" in out
    out = run("keys", str(tmp_path / "ml"), "--ranks", "4", "--batches", "2", "--json", str(tmp_path / "k.json"))
    assert [row["routing"] for row in json.loads((tmp_path / "k.json").read_text())["rows"]] == [
        "continuous", "roundrobin", "hash_roundrobin",
    ]  # fmt: skip
    assert "hash_roundrobin" in out
    with pytest.raises(SystemExit, match=r"data: .*does not exist"):
        run("lengths", str(tmp_path / "none"))
