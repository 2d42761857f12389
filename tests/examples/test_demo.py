"""The whole demo: a real balancer, real ranks, off and on."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(300)
def test_the_demo_gains_learns_and_loses_nothing(tmp_path: Path) -> None:
    options = ("--json", "--ranks", "2", "--steps", "12", "--out", str(tmp_path))
    run = subprocess.run([sys.executable, "-m", "examples.demo", *options], capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr
    summary = json.loads(run.stdout.splitlines()[-1])
    off, on = summary["off"], summary["on"]
    assert off["served"] == 0 < on["served"]
    assert off["imbalance"] > 1.1 > on["imbalance"] >= 1
    assert all((each["lost"], each["doubled"], each["steps"]) == (0, 0, 12) for each in (off, on))
    assert summary["largest_loss_difference"] < 1e-5
    assert on["losses"][-1] < 0.8 * on["losses"][0]
