"""The whole demo: a real balancer, real ranks, off and on."""

import json
from pathlib import Path

import pytest

from benchmarks.harness import zygote

RANKS, STEPS = 2, 5


@pytest.mark.timeout(300)
def test_the_demo_balances_and_loses_nothing(
    tmp_path: Path, forked_python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHON_EXEC", str(forked_python))  # of the balancer, torchrun and its ranks
    run = zygote.run(
        "examples.demo", "--json", "--ranks", str(RANKS), "--steps", str(STEPS), "--max-length", "128",
        "--out", str(tmp_path), timeout=280,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    summary = json.loads(run.stdout.splitlines()[-1])
    for name in ("off", "on"):
        assert (summary[name]["lost"], summary[name]["doubled"], summary[name]["steps"]) == (0, 0, STEPS)
    assert summary["off"]["imbalance_after"] == summary["off"]["imbalance_before"] > 1.05
    assert summary["on"]["imbalance_before"] == summary["off"]["imbalance_before"]
    assert summary["on"]["balanced_by_service"] == STEPS
    assert summary["on"]["lower_bound"] <= summary["on"]["imbalance_after"] < summary["off"]["imbalance_after"]
    assert summary["on"]["final_loss"] == pytest.approx(summary["off"]["final_loss"], rel=1e-4)
    for name in ("off", "on"):
        ranks = json.loads((tmp_path / f"{name}.json").read_text())["ranks"]
        slowest = [max(rank[step]["cpu_seconds"] for rank in ranks) for step in range(1, STEPS)]
        told = summary[name]["step_seconds_with_a_core_per_rank"]
        assert told == pytest.approx(sum(slowest) / len(slowest))
        assert all(step["cpu_seconds"] > 0 for rank in ranks for step in rank)
        assert summary[name]["seconds"] > summary[name]["step_seconds"] > 0
    assert (tmp_path / "loads.png").read_bytes().startswith(b"\x89PNG")
