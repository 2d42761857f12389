"""Workers of Ray Train with balanced batches: `python -m examples.launchers.ray_train --workers 2`.

The job's name at the balancer is that of the run; `EVENKEEL_BALANCER` in the environment of the driver says where it
is, and reaches the workers by `runtime_env`. Without it the workers balance by themselves.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

import ray
import ray.train
import torch
import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from torch.nn.functional import binary_cross_entropy_with_logits

from examples.demo.histories import Histories
from examples.tutorial.ranker import Ranker
from trainer_client import BalancedLoader, Balancer, BatchSpec, TokenCost


def train(config: dict[str, Any]) -> None:
    """What each worker runs; Ray has initialised torch.distributed."""
    torch.manual_seed(0)
    batches = Histories(rank=dist.get_rank(), steps=config["steps"], batch_size=8, max_length=256)
    model = prepare_model(Ranker(width=16, num_layers=1, num_heads=2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Balancer.from_env() as balancer:
        loader = BalancedLoader(
            batches,
            balancer,
            cost=TokenCost(tokens="num_items"),
            spec=BatchSpec(rows_per_sample={"items": "num_items"}),
        )
        for step, batch in enumerate(loader):
            logits = model(batch["items"], batch["num_items"])
            loss = binary_cross_entropy_with_logits(logits, batch["label"], reduction="sum") * loader.loss_scale
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            report = loader.report
            if dist.get_rank() == 0:
                print(f"step {step} by {report.mode.value}: max/mean load {report.imbalance_before:.3f}, balanced "
                      f"{report.imbalance:.3f}", flush=True)  # fmt: skip
            ray.train.report({"step": step, "imbalance": report.imbalance})


def main(arguments: list[str]) -> int:
    """Starts the workers, and waits until they have trained."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpus", action="store_true", help="one for each worker")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--name", default="a-ray-train", help="of the run, and of the job at the balancer")
    parser.add_argument("--storage", help="where Ray keeps what it knows of the run")
    options = parser.parse_args(arguments)
    forwarded = {name: value for name, value in os.environ.items() if name.startswith("EVENKEEL_")}
    ray.init(runtime_env={"env_vars": forwarded})
    trainer = TorchTrainer(
        train,
        train_loop_config={"steps": options.steps},
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=options.gpus),
        run_config=RunConfig(
            name=options.name, storage_path=options.storage, failure_config=FailureConfig(max_failures=2)
        ),
    )
    trainer.fit()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
