"""The convergence benchmark: its settings on real ranks, and its figures."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from benchmarks.convergence import add_workload
from benchmarks.convergence_rank import area, make_model, read, train_once
from benchmarks.convergence_report import draw, show, summarize
from benchmarks.harness.ranks import run_ranks

FLAGS = (
    "--users 60 --items 40 --mean-length 12 --sigma 1.6 --max-history 48 --per-user 4 --batch-size 4 --evaluations 2 "
    "--layers 1 --width 8 --heads 1 --head-dim 8 --embedding-dim 8 --window 4"
)  # fmt: skip


def _train(rank: int) -> dict[str, Any]:
    del rank
    parser = argparse.ArgumentParser()
    add_workload(parser)
    options = parser.parse_args(FLAGS.split())
    train, test, best = read(options)
    device = torch.device("cpu")
    model = make_model(options, train, device)
    settings = ("off", "balanced", "window", "token_budget", "hash_roundrobin")
    return {
        "best": best,
        "size": len(train),
        "runs": [train_once(setting, 0, options, model, device, train, test) for setting in settings],
    }


def test_balancing_trains_the_same_samples_and_learns_the_same() -> None:
    found = run_ranks(2, _train)[0]
    assert 0.7 < found["best"] < 1
    runs = {run["setting"]: run for run in found["runs"]}
    off = runs["off"]
    for run in runs.values():
        assert run["lost"] == 0
        assert len(run["loss"]) == len(run["step_samples"])
        # The same weights at the beginning, the item table too.
        assert run["auc"][0] == pytest.approx(off["auc"][0], abs=1e-6)
        assert run["test_loss"][0] == pytest.approx(off["test_loss"][0], rel=1e-5)
    assert off["imbalance_before"] == off["imbalance"] > 1.2
    for name in ("balanced", "hash_roundrobin"):
        assert runs[name]["imbalance"] < off["imbalance"]
        assert runs[name]["loss"] == pytest.approx(off["loss"], rel=1e-3)
        assert runs[name]["auc"] == pytest.approx(off["auc"], abs=0.01)
    assert runs["balanced"]["other_step_share"] == 0
    assert 0.01 < runs["window"]["other_step_share"] < 0.9
    assert len(set(runs["token_budget"]["step_samples"])) > 1
    assert len(set(off["step_samples"])) == 1
    # Budgets, too, train nearly all of an epoch; the last batch of each is left out.
    assert all(found["size"] - run["tested_after"][-1] < 40 for run in runs.values())


def test_area_is_how_often_a_liked_one_has_the_higher_score() -> None:
    rng = np.random.default_rng(0)
    scores, liked = rng.integers(0, 8, 60).astype(float), rng.random(60) < 0.4
    pairs = [(s > t) + (s == t) / 2 for s in scores[liked] for t in scores[~liked]]
    assert area(scores, liked) == pytest.approx(float(np.mean(pairs)))
    assert np.isnan(area(scores, np.ones(60, np.bool_)))


def _run(setting: str, seed: int, auc: float) -> dict[str, Any]:
    return {
        "setting": setting, "seed": seed, "seconds": 1.0, "tested_after": [0, 64, 128], "auc": [0.5, 0.6, auc],
        "test_loss": [0.7, 0.6, 0.5], "step_samples": [32] * 4, "loss": [0.7, 0.6, 0.55, 0.5], "imbalance_before": 1.5,
        "imbalance": 1.0, "moved_share": 0.1, "balanced_steps": 1.0, "lost": 0, "other_step_share": 0.0,
    }  # fmt: skip


def test_a_difference_beyond_the_noise_of_seeds_is_told(tmp_path: Path) -> None:
    ends = {"off": (0.80, 0.81, 0.82), "balanced": (0.805, 0.815, 0.82), "window": (0.75, 0.76, 0.77)}
    runs = [_run(setting, seed, auc) for setting, aucs in ends.items() for seed, auc in enumerate(aucs)]
    recorded = {"ranks": 2, "machine": "none", "samples": 128, "tests": 60, "best_auc": 0.9, "runs": runs}
    results = summarize(recorded)
    balanced, window = results["settings"]["balanced"], results["settings"]["window"]
    assert balanced["auc_difference"] == pytest.approx(0.01 / 3)
    # Variances over seeds of 1, 0.583 and 1, all times 1e-4; the mean of three seeds has a third of it.
    assert balanced["auc_noise"] == pytest.approx(2 * np.sqrt((1 + 0.5833333 + 1) / 3 * 1e-4 * 2 / 3), rel=1e-4)
    assert balanced["auc_within"]
    assert not window["auc_within"]
    assert window["auc_difference"] == pytest.approx(-0.05)
    console = Console(record=True, width=180)
    show(results, console)
    rows = {line.split("│")[1].strip(): line for line in console.export_text().splitlines() if "│" in line}
    assert "NO" in rows["window"]
    assert "NO" not in rows["balanced"]
    draw(results, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000
