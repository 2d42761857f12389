"""The whole demo: a real balancer, real ranks, off and on."""

import json
from pathlib import Path

import pytest

from benchmarks.harness import zygote


@pytest.mark.timeout(300)
def test_the_demo_gains_learns_and_loses_nothing(
    tmp_path: Path, forked_python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHON_EXEC", str(forked_python))  # of the balancer
    options = ("--json", "--ranks", "2", "--steps", "12", "--out", str(tmp_path))
    run = zygote.run("examples.demo", *options, timeout=280)
    assert run.returncode == 0, run.stderr
    summary = json.loads(run.stdout.splitlines()[-1])
    off, on = summary["off"], summary["on"]
    assert off["served"] == 0 < on["served"]
    assert off["imbalance"] > 1.1 > on["imbalance"] >= 1
    assert all((each["lost"], each["doubled"], each["steps"]) == (0, 0, 12) for each in (off, on))
    assert summary["largest_loss_difference"] < 1e-5
    assert on["losses"][-1] < 0.8 * on["losses"][0]
