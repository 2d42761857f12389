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
from trainer_client.planning.measuring import KERNELS, STEPS, measure_on_ranks, measure_steps, scaled

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


def test_what_is_measured_tells_the_parts_of_a_step_apart() -> None:
    tables = [sum(part.count for part in sample.parts) for sample in STEPS]
    assert min(tables) <= 4
    assert max(tables) > 50
    assert {len({(p.pooled, p.sharding) for p in sample.parts}) for sample in STEPS} == {1, 2, 3}
    assert {part.mode for sample in KERNELS for part in sample.parts} == {Mode.HBM_ONLY, Mode.CACHING, Mode.HOST_ONLY}
    assert all(len(sample.parts) == 1 for sample in KERNELS), "their time is that of one mode"


def test_samples_are_made_smaller_to_try_the_way() -> None:
    small = scaled(STEPS, 0.001)
    assert [sample.name for sample in small] == [sample.name for sample in STEPS]
    assert all(part.rows <= 4096 for sample in small for part in sample.parts)
    assert scaled(STEPS, 1.0) == list(STEPS)
