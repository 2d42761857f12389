"""The kit of DLRMv4: real ranks train, and others go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.harness import zygote


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
