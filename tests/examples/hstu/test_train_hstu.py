"""The command from end to end: a data set's files and a plan of `evenkeel plan`, two ranks, TorchRec's tables."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.harness.ranks import run_ranks
from examples import train_hstu
from trainer_client.cli import app

USERS, ITEMS = 24, 60


def _write_movielens(folder: Path) -> None:
    """`ratings.dat` and `users.dat` as GroupLens publishes them."""
    rng = np.random.default_rng(0)
    lines, people = [], []
    for user in range(1, USERS + 1):
        people.append(f"{user}::{'FM'[user % 2]}::25::{user % 21}::55117")
        for time, item in enumerate(rng.permutation(ITEMS)[: rng.integers(2, 25)]):
            lines.append(f"{user}::{item + 1}::{rng.integers(1, 6)}::{978300000 + time}")
    lines.append(f"1::{ITEMS + 1}::3::978400000")
    folder.joinpath("ratings.dat").write_text("\n".join(lines) + "\n")
    folder.joinpath("users.dat").write_text("\n".join(people) + "\n", encoding="latin-1")


def _write_plan(folder: Path, rows: int) -> Path:
    tables, output = folder / "tables.yaml", folder / "plan.json"
    tables.write_text(f"- {{name: item, rows: {rows}, dim: 8, ids_per_sample: 10, optimizer: rowwise_adagrad}}\n")
    flags = ["plan", str(tables), "--topology", "h200x2", "--runtime", "torchrec", "--output", str(output)]
    planned = CliRunner().invoke(app, flags)
    assert planned.exit_code == 0, planned.output
    return output


def _train(rank: int, folder: str, plan: str) -> dict[str, Any]:
    """The summaries of some runs, on rank 0."""
    found = {}
    runs = {"off": ["off"], "embedded": ["embedded"], "strategy": ["embedded", "--strategy", "karmarkar_karp"]}
    runs |= {"local": ["off", "--embeddings", "local"]}
    runs |= {way: ["off", "--embeddings", "routed", "--dist-type", way] for way in ("continuous", "hash_roundrobin")}
    for attention in ("softmax", "silu"):  # one sample a rank, which whole samples cannot balance
        flags = ["--batch-size", "1", "--attention", attention]
        runs |= {attention: ["off", *flags], f"{attention} split": ["embedded", *flags, "--split"]}
    for name, (balancer, *more) in runs.items():
        result = Path(folder) / f"{name}.json"
        sys.argv = [
            "train_hstu", "--data", folder, "--balancer", balancer,
            "--layers", "1", "--width", "16", "--heads", "2", "--head-dim", "8", "--embedding-dim", "8",
            "--max-length", "48", "--batch-size", "4", "--device", "cpu", "--skip", "0", "--json", str(result),
            *(() if "--embeddings" in more else ("--embeddings", "torchrec", "--plan", plan)), *more,
        ]  # fmt: skip
        train_hstu.main()
        found[name] = json.loads(result.read_text()) if rank == 0 else {}
    return found


def test_a_data_set_is_trained_under_a_plan(tmp_path: Path) -> None:
    _write_movielens(tmp_path)
    plan = _write_plan(tmp_path, len(train_hstu.read_histories(tmp_path).item_ids))
    found = run_ranks(2, _train, str(tmp_path), str(plan))[0]
    off, balanced = found["off"], found["embedded"]
    assert off["steps"] == balanced["steps"] == USERS // 8  # every user once
    for name in ("embedded", "strategy"):
        assert found[name]["imbalance"] < found[name]["imbalance_before"] == pytest.approx(off["imbalance"])
    same = [("off", "embedded"), ("off", "strategy"), ("softmax", "softmax split"), ("silu", "silu split")]
    same += [("local", "continuous"), ("local", "hash_roundrobin")]  # routed tables begin with the values of whole ones
    for one, other in same:
        assert found[other]["first_loss"] == pytest.approx(found[one]["first_loss"], rel=1e-4)
        assert found[other]["last_loss"] == pytest.approx(found[one]["last_loss"], rel=1e-3)
    for whole, split in (("softmax", "softmax split"), ("silu", "silu split")):
        assert found[split]["imbalance"] < 0.9 * found[whole]["imbalance"]
        flops = [found[name]["tflops_per_rank"] * found[name]["step_ms_mean"] for name in (whole, split)]
        assert flops[1] == pytest.approx(flops[0])
