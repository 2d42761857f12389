"""Workers of a real Ray Train beside a real balancer: scripts/test_ray.sh runs it, in an environment with Ray."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from examples.launchers import ray_train
from services.operations.launch import ServiceProcess, running_service
from tests.trainer_client.balancing.jobs import SPEC, cost_of, make_batch
from trainer_client import BalancedLoader, Balancer

STEPS, DIES = 8, 3


@pytest.fixture(scope="module")
def balancer() -> Iterator[ServiceProcess]:
    with running_service("services.balancer", "--abandoned-expiry-seconds", "300") as running:
        yield running


@pytest.fixture(autouse=True)
def no_ray_is_left() -> Iterator[None]:
    yield
    ray.shutdown()


def opened(balancer: ServiceProcess, job: str) -> list[dict[str, Any]]:
    """The sessions of a job that the balancer's log tells of."""
    lines = [json.loads(line) for line in balancer.log.splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"] == "session opened" and line["job"] == job]


@pytest.mark.timeout(300)
def test_the_example_trains_two_workers_under_the_name_of_the_run(
    balancer: ServiceProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EVENKEEL_BALANCER", balancer.address)
    flags = ["--workers", "2", "--steps", "4", "--name", "a-ray", "--storage", str(tmp_path)]
    assert ray_train.main(flags) == 0
    (session,) = opened(balancer, "a-ray")
    assert session["run"].startswith("ray-")
    assert session["run"].endswith("-a-ray")
    assert session["world_size"] == 2
    assert "step 3 by service" in capfd.readouterr().out


def train(config: dict[str, Any]) -> None:
    """Trains; in the first attempt a worker dies without a word, and the other's stream goes with its process."""
    folder, rank = Path(config["folder"]), dist.get_rank()
    with Balancer.from_env() as balancer:
        loader = BalancedLoader([make_batch(rank, step, 4) for step in range(STEPS)], balancer, cost=cost_of, spec=SPEC)
        for step, _ in enumerate(loader):
            if step == DIES and rank == 1 and not (folder / "died").exists():
                (folder / "died").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            with (folder / f"modes-{rank}").open("a") as file:
                file.write(f"{loader.report.mode.value}\n")


@pytest.mark.timeout(300)
def test_an_attempt_after_a_worker_died_takes_the_name_over(balancer: ServiceProcess, tmp_path: Path) -> None:
    ray.init(runtime_env={"env_vars": {"EVENKEEL_BALANCER": balancer.address}})
    result = TorchTrainer(
        train,
        train_loop_config={"folder": str(tmp_path)},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="a-dying-ray", storage_path=str(tmp_path), failure_config=FailureConfig(max_failures=2)
        ),
    ).fit()
    assert result.error is None
    first, second = opened(balancer, "a-dying-ray")
    assert first["run"] == second["run"]
    assert second["restart"] > first["restart"]
    assert "join refused" not in balancer.log
    for rank in range(2):
        assert (tmp_path / f"modes-{rank}").read_text().split()[-STEPS:] == ["service"] * STEPS
