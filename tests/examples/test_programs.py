"""Programs of the examples from end to end, on real ranks: the demo, DLRMv4, routed tables, shards."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.harness import zygote
from benchmarks.harness.ranks import run_ranks
from examples.shards import train, write_shards


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
    assert [(each["to"], len(each["steps"])) for each in (first, more)] == [(2, 2), (4, 2)]
    before, after = (np.mean([step["loss"] for step in each["steps"]]) for each in (first, more))
    assert after < 0.72 < 1.1 * before
    steps = first["steps"] + more["steps"]
    assert max(step["load"] for step in steps) < 1.1
    samples = [sample for step in steps for sample in step["samples"]]
    assert len(samples) == len(set(samples)) == 4 * 32


def test_routed_tables_are_trained_saved_and_resumed_under_another_mode_and_number_of_ranks() -> None:
    small = ("--cpu", "--ranks", "2", "--resume-ranks", "3", "--steps", "10", "--batch", "32", "--dim", "4")
    routing = ("--dist-type", "roundrobin", "--resume-as", "hash_roundrobin", "--seed", "3")
    done = zygote.run("examples.train_routed", *small, *routing, timeout=900)
    assert done.returncode == 0, done.stderr
    shown = done.stdout
    balances = re.findall(r"^(\S+) over (\d) ranks: keys asked of each rank \[(.*)\], max/mean (\S+)$", shown, re.M)
    assert [found[:2] for found in balances] == [("roundrobin", "2"), ("hash_roundrobin(seed=3)", "3")]
    asked = [[int(count) for count in found[2].split(", ")] for found in balances]
    assert asked[0][1] == 0
    assert float(balances[0][3]) == 2
    assert len(asked[1]) == 3
    assert float(balances[1][3]) < 1.5
    loaded = re.search(r"^loaded ([\d,]+) rows into hash_roundrobin\(seed=3\) over 3 ranks$", shown, re.M)
    # Both ranks looked some of the same keys up, so the table has fewer rows than were asked for, but no row was lost.
    rows = int(loaded[1].replace(",", ""))
    assert asked[0][0] / 2 <= rows <= asked[0][0]
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss (\S+)$", shown, re.M)]
    assert [int(step) for step in re.findall(r"^step (\d+):", shown, re.M)] == [10, 20]
    assert losses[1] < losses[0]


def _read_shards(_: int, folder: str, max_steps: int | None) -> Counter[int]:
    return train(Path(folder), batch_size=16, max_steps=max_steps)


def test_a_balanced_job_goes_on_with_other_ranks(tmp_path: Path) -> None:
    records = write_shards(tmp_path, 8)
    trained: Counter[int] = Counter()
    for world_size, steps in ((3, 4), (2, 5), (2, None)):
        for found in run_ranks(world_size, _read_shards, str(tmp_path), steps):
            trained.update(found)
    assert trained == Counter(range(records))
