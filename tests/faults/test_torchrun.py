"""A rank dies under torchrun: the launcher restarts the job, and the balancer goes on with it at once."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest

from benchmarks.harness import zygote
from benchmarks.harness.balancer_process import ServiceProcess
from tests.faults.elastic import DIES, NUM_STEPS, size_of

WORLD_SIZE = 2
SECONDS = 270.0


@pytest.mark.timeout(300)
def test_a_rank_that_dies_is_restarted_by_torchrun_and_no_sample_is_lost(
    balancer: ServiceProcess, tmp_path: Path, forked_python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # torchrun hands one store to every incarnation otherwise, in which Gloo finds the addresses of the dead one.
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    monkeypatch.setenv("PYTHON_EXEC", str(forked_python))  # of its ranks
    done = zygote.run(
        "torch.distributed.run", "--standalone", f"--nproc-per-node={WORLD_SIZE}",
        "--max-restarts=1", "--monitor-interval=0.1", "-m", "tests.faults.elastic", balancer.address, str(tmp_path),
        timeout=SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    trained: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))  # restart, step: ids
    modes: dict[int, set[str]] = defaultdict(set)
    for log in tmp_path.glob("trained-*"):
        restart = int(log.name.split("-")[1])
        for line in log.read_text().splitlines():
            step, mode, ids = json.loads(line)
            trained[restart][step] += ids
            modes[restart].add(mode)
    assert max(trained[0]) < DIES[1]  # the injection: nobody got past the step at which the rank died
    assert len(list(tmp_path.glob("trained-1-*"))) == WORLD_SIZE
    assert sorted({*trained[0], *trained[1]}) == list(range(NUM_STEPS))
    assert max(trained[1]) == NUM_STEPS - 1
    for steps in trained.values():
        for step, ids in steps.items():
            loaded = [
                1000 * step + 1_000_000 * rank + at for rank in range(WORLD_SIZE) for at in range(size_of(rank, step))
            ]
            assert sorted(ids) == loaded, f"step {step}: samples lost or doubled"
    assert modes[0] == modes[1] == {"service"}  # the restart took over its predecessor's name without a wait
