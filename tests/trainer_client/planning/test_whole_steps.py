"""Whole steps of tables are trained and timed by Gloo ranks here as by GPUs elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.harness.ranks import run_ranks
from evenkeel.placement import Mode, Optimizer, Sharding
from evenkeel.placement.calibration import measured_samples
from evenkeel.placement.step_samples import StepSample, TablePart
from trainer_client.planning.whole_steps import SAMPLES, measure_on_ranks, measure_samples, scaled

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
    rounds: list[int] = []
    records = measure_samples(
        [MIXED], torch.device("cpu"), warmup=2, repeats=2, blocks=2, told=lambda r: rounds.append(len(r))
    )
    assert rounds == [1, 1]
    return records


def test_ranks_measure_a_step_and_agree_on_it() -> None:
    first, second = run_ranks(2, _measure)
    (sample,), (other,) = measured_samples(first), measured_samples(second)
    assert (sample, sample.ranks) == (other, 2)
    assert sample.parts == MIXED.parts
    assert len(first[0]["blocks_s"]) == 2
    assert 0 < first[0]["launched_s"] <= first[0]["alone_s"]


def test_ranks_that_fail_say_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no GPU is free\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    with pytest.raises(RuntimeError, match=r"whole steps on 2 ranks were not measured \(exit 3\): no GPU is free"):
        measure_on_ranks(2, "cuda", seconds=5)


def test_what_is_measured_tells_the_parts_of_a_step_apart() -> None:
    tables = [sum(part.count for part in sample.parts) for sample in SAMPLES]
    assert min(tables) < 4
    assert max(tables) > 50
    assert {part.mode for sample in SAMPLES for part in sample.parts} == {Mode.HBM_ONLY, Mode.CACHING, Mode.HOST_ONLY}
    assert {len({(p.pooled, p.sharding) for p in sample.parts}) for sample in SAMPLES} == {1, 2, 3}


def test_samples_are_made_smaller_to_try_the_way() -> None:
    small = scaled(SAMPLES, 0.001)
    assert [sample.name for sample in small] == [sample.name for sample in SAMPLES]
    assert all(part.rows <= 4096 for sample in small for part in sample.parts)
    assert scaled(SAMPLES, 1.0) == list(SAMPLES)
