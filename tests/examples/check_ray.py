"""Workers of a real Ray Train beside a real balancer: scripts/test_ray.sh runs it, in an environment with Ray."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from examples.launchers import ray_train
from services.operations.launch import ServiceProcess, running_service
from trainer_client import BalancedLoader, Balancer, TokenCost

STEPS, DIES = 8, 3


@pytest.fixture(scope="module")
def balancer() -> Iterator[ServiceProcess]:
    with running_service("services.balancer") as running:
        yield running


@pytest.fixture(autouse=True)
def no_ray_is_left() -> Iterator[None]:
    yield
    ray.shutdown()


@pytest.mark.timeout(300)
def test_the_example_trains_two_workers(
    balancer: ServiceProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EVENKEEL_BALANCER", balancer.address)
    flags = ["--workers", "2", "--steps", "4", "--name", "a-ray", "--storage", str(tmp_path)]
    assert ray_train.main(flags) == 0
    assert "step 3 by service" in capfd.readouterr().out


def train(config: dict[str, Any]) -> None:
    """Trains; in the first attempt a worker dies without a word."""
    folder, rank = Path(config["folder"]), dist.get_rank()
    data = [{"n": torch.tensor([1, 2, 30 + 70 * rank])} for _ in range(STEPS)]
    with Balancer.from_env() as balancer:
        for step, _ in enumerate(loader := BalancedLoader(data, balancer, cost=TokenCost(tokens="n"))):
            if step == DIES and rank == 1 and not (folder / "died").exists():
                (folder / "died").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            with (folder / f"modes-{rank}").open("a") as file:
                file.write(f"{loader.report.mode.value}\n")


@pytest.mark.timeout(300)
def test_an_attempt_after_a_worker_died_trains_to_its_end(balancer: ServiceProcess, tmp_path: Path) -> None:
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
    for rank in range(2):
        assert set((tmp_path / f"modes-{rank}").read_text().split()[-STEPS:]) <= {"service", "embedded"}
