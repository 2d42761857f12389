"""Each program, killed or preempted, trains what it trains undisturbed; on other ranks each user once an epoch."""

import shutil
import signal
import time
from pathlib import Path

import pytest

from benchmarks.harness import zygote
from benchmarks.harness.balancer_process import running_balancer, until_logged
from tests.examples.resume.launching import SECONDS, Job, ledger, users

PROGRAMS = ("ddp", "torchrec_pipeline", "lightning_loop", "accelerate_loop", "titan")
SMALL = ("--users", "96", "--save-every", "2")  # epochs of six steps


@pytest.mark.timeout(900)
@pytest.mark.parametrize("program", PROGRAMS)
def test_killed_it_goes_on(program: str, tmp_path: Path) -> None:
    whole, killed, other = (tmp_path / name for name in ("whole", "killed", "other"))
    printed = Job(program, 2, whole, *SMALL).ended()
    assert printed.count("96 of 96 users trained, 0 of them more than once") == 2
    first = Job(program, 2, killed, *SMALL, "--kill-at", "11")
    assert first.ranks[1].wait(SECONDS) == -signal.SIGKILL
    first.send(signal.SIGKILL)
    assert sorted(map(step_of, killed.glob("step*"))) == [2, 4, 6, 8, 10]
    shutil.copytree(killed, other)
    for path in other.glob("step*"):
        if step_of(path) > 6:  # the last of its epoch
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    assert Job(program, 2, killed, *SMALL).ended() == printed
    assert ledger(killed) == ledger(whole)  # losses and weights are the same, bit for bit
    if program in ("torchrec_pipeline", "accelerate_loop", "titan"):  # the others are preempted below
        Job(program, 3, other, *SMALL).ended()
        assert {line["step"] for line in ledger(other) if line["rank"] == 2} == set(range(7, 13))
        assert [users(other, epoch) for epoch in range(2)] == [list(range(96))] * 2


@pytest.mark.parametrize(
    ("program", "window", "code", "preempted"),
    [("ddp", 4, 128 + signal.SIGTERM, [0, 1]), ("lightning_loop", 1, 0, [1])],
)
def test_ranks_are_preempted_all_stop_after_the_same_step_and_others_go_on(
    program: str, window: int, code: int, preempted: list[int], tmp_path: Path
) -> None:
    arguments = ("--users", "96", "--save-every", "1000", "--window", str(window))
    stopped = Job(program, 2, tmp_path, *arguments, "--pause", "0.05")
    stopped.until(3)
    asked = time.monotonic()
    for rank in preempted:
        stopped.ranks[rank].send_signal(signal.SIGTERM)
    assert stopped.codes() == [code] * 2, stopped.output()
    assert time.monotonic() - asked < 25
    (saved,) = map(step_of, tmp_path.glob("step*"))
    assert saved >= 3
    assert [line["rank"] for line in ledger(tmp_path) if line["step"] >= saved] == [0, 1]
    Job(program, 3, tmp_path, *arguments).ended()
    assert min(line["step"] for line in ledger(tmp_path) if line["rank"] == 2) == saved + 1
    assert [users(tmp_path, epoch) for epoch in range(2)] == [list(range(96))] * 2


def step_of(path: Path) -> int:
    """Of a checkpoint."""
    return int(path.stem[5:])


def test_a_group_that_shrinks_goes_on_in_the_same_processes(tmp_path: Path) -> None:
    with running_balancer("--log-level", "debug") as balancer:
        job = Job("resizing", 3, tmp_path, *SMALL, "--kill-at", "5", EVENKEEL_BALANCER=balancer.address)
        assert job.codes() == [0, 0, -signal.SIGKILL], job.output()
        until_logged(balancer, "round planned")  # plans that come late are the lead's
    assert [users(tmp_path, epoch) for epoch in range(2)] == [list(range(96))] * 2
    assert {line["step"] for line in ledger(tmp_path) if line["rank"] == 2} == set(range(1, 5))
    assert job.output().count("after step 4") == 2


def test_a_rank_that_was_killed_comes_back_and_is_taken_in(
    tmp_path: Path, forked_python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHON_EXEC", str(forked_python))
    ended = zygote.run(
        "examples.resume.resizing", "--ranks", "2", "--restarts", "1", "--min-ranks", "2", "--folder", str(tmp_path),
        "--users", "48", "--epochs", "1", "--kill-at", "2", timeout=SECONDS,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "48 of 48 users trained, 0 of them more than once" in ended.stdout
    assert ended.stdout.count("one of 2 from step") == 4
    assert users(tmp_path, 0) == list(range(48))
    assert [(line["step"], line["rank"]) for line in ledger(tmp_path)] == [(s, r) for s in (1, 2, 3) for r in (0, 1)]


def test_a_rank_that_comes_is_taken_in_between_two_steps(tmp_path: Path) -> None:
    """The first two train on as they are, until the third is there."""
    job = Job("resizing", 2, tmp_path, *SMALL, "--pause", "0.2")
    job.start(2)
    assert job.codes() == [0, 0, 0], job.output()
    steps = {line["step"] for line in ledger(tmp_path) if line["rank"] == 2}
    assert steps == set(range(min(steps), 13))
    assert min(steps) > 1
    assert [users(tmp_path, epoch) for epoch in range(2)] == [list(range(96))] * 2
