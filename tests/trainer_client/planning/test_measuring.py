"""Steps of tables are trained and timed by Gloo ranks here as by GPUs elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.harness.ranks import run_ranks
from evenkeel.placement import Mode, Optimizer, Sharding
from evenkeel.placement.calibration import measured_samples
from evenkeel.placement.whole_step import StepSample, TablePart
from trainer_client.planning.measuring import measure_on_ranks, measure_steps

MIXED = StepSample(
    name="mixed",
    samples=16,
    optimizer=Optimizer.SGD,
    parts=(
        TablePart(count=2, rows=600, dim=8),
        TablePart(count=2, rows=600, dim=8, mode=Mode.CACHING, ratio=0.5, ids=3),
        TablePart(count=1, rows=600, dim=8, mode=Mode.HOST_ONLY, sharding=Sharding.TABLE_WISE),
        TablePart(count=1, rows=600, dim=8, ids=5, pooled=False),
    ),
)


def _measure(_: int) -> list[dict[str, Any]]:
    return measure_steps([MIXED], torch.device("cpu"), seconds=0.1)


def test_ranks_measure_a_step_and_its_host_part_and_agree_on_them() -> None:
    first, second = run_ranks(2, _measure)
    assert first == second
    (sample,) = measured_samples(first)
    assert (sample.ranks, sample.parts) == (2, MIXED.parts)
    assert sample.seconds > 0
    assert first[0]["host_s"] > 0
    assert first[0]["kernels_s"] is None, "a CPU has no kernels of its own time"


def test_ranks_that_fail_say_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no GPU is free\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    with pytest.raises(RuntimeError, match=r"failed on 2 ranks \(exit 3\): no GPU is free"):
        measure_on_ranks(2, "cuda", limit_s=60)
