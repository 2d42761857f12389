"""The kit of DLRMv4: its stream has the published figures, its planner comparison runs, and real ranks train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.harness import zygote
from examples.dlrmv4.stream import LIKED, LONGEST, MEAN, MEDIAN, POOLS, Scale, Stream


def test_the_stream_has_the_published_figures() -> None:
    stream = Stream(Scale(rows=10))
    assert np.median(stream.lengths) == pytest.approx(MEDIAN, rel=0.02)
    assert stream.lengths.mean() == pytest.approx(MEAN, rel=0.02)
    assert stream.lengths.max() == LONGEST
    kinds = np.concatenate([stream.user(user)[1] for user in range(1500)])
    assert {pool: np.mean(kinds == pool) for pool in POOLS} == pytest.approx(POOLS, abs=0.02)
    batch = stream.batch(range(0, len(stream), len(stream) // 256))
    assert float(batch.num_history.float().mean()) == pytest.approx(2663, rel=0.05)
    assert float((batch.actions == LIKED).float().mean()) == pytest.approx(0.05, abs=0.01)


def _train(ranks: int, steps: int, folder: Path, tables: str) -> Any:
    run = zygote.run(
        "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m", "examples.dlrmv4.train",
        "--steps", str(steps), "--folder", str(folder), "--tables", tables, "--json", timeout=280,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("tables", ["planned", "routed"])
def test_ranks_train_and_others_go_on(
    tables: str, tmp_path: Path, forked_python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHON_EXEC", str(forked_python))  # of torchrun's ranks
    first, more = _train(1, 2, tmp_path, tables), _train(2, 4, tmp_path, tables)
    assert (first["from"], first["to"], more["from"], more["to"]) == (0, 2, 2, 4)
    assert np.mean(more["losses"]) < 0.72 < 1.1 * np.mean(first["losses"])
    assert max(first["loads"] + more["loads"]) < 1.1
