"""One rank of the demo; started by torchrun."""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from examples.demo.histories import Histories
from examples.demo.model import Ranker
from trainer_client import BalancedLoader, Balancer, BatchSpec, HSTUCost

WIDTH, NUM_LAYERS, NUM_HEADS = 32, 2, 2


def main() -> None:
    options = parse_arguments()
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    histories = Histories(rank=rank, steps=options.steps, batch_size=options.batch_size, max_length=options.max_length)
    balancer = Balancer.off() if options.balancer == "off" else Balancer.connect(options.balancer, job="demo")
    # ---- what a trainer author adds
    loader = BalancedLoader(
        histories,
        balancer,
        cost=HSTUCost(num_layers=NUM_LAYERS, width=WIDTH, num_heads=NUM_HEADS, head_dim=WIDTH // NUM_HEADS,
                      history="num_items"),
        spec=BatchSpec(rows_per_sample={"items": "num_items"}),
    )  # fmt: skip
    # ----
    torch.manual_seed(0)
    model = DistributedDataParallel(Ranker(width=WIDTH, num_layers=NUM_LAYERS, num_heads=NUM_HEADS))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    steps: list[dict[str, Any]] = []
    begun = time.process_time(), time.perf_counter()
    for batch in loader:
        logits = model(batch["items"], batch["num_items"])
        loss = functional.binary_cross_entropy_with_logits(logits, batch["label"], reduction="sum")
        scaled = loss * loader.loss_scale
        optimizer.zero_grad()
        scaled.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        report = loader.report
        begun, (cpu, wall) = (time.process_time(), time.perf_counter()), begun
        steps.append(
            {
                "ids": batch["id"].tolist(), "load": report.own_load, "home_load": float(report.home_loads[rank]),
                "before": report.imbalance_before, "after": report.imbalance, "lower_bound": report.lower_bound,
                "mean_load": float(report.home_loads.mean()), "moved": report.moved_size, "size": report.size,
                "mode": report.mode.value, "reason": report.reason.value, "loss": float(scaled.detach()),
                "cpu_seconds": begun[0] - cpu, "wall_seconds": begun[1] - wall, "wait_seconds": report.wait_seconds,
                "partition_seconds": report.partition_seconds,
            }
        )  # fmt: skip
        if rank == 0:
            print(json.dumps({"step": len(steps)}), flush=True)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, steps)
    if rank == 0:
        result = {"steps": options.steps, "ranks": everyone, **check_samples(everyone, options)}
        options.result.write_text(json.dumps(result))
    balancer.close()
    dist.destroy_process_group()


def check_samples(everyone: list[list[dict[str, Any]]], options: argparse.Namespace) -> dict[str, int]:
    """Counts samples that were lost or trained twice, step by step, over all ranks."""
    lost = doubled = 0
    for step in range(max(options.steps, len(everyone[0]))):
        loaded = Counter(
            sample
            for rank in range(len(everyone))
            for sample in Histories(
                rank=rank, steps=options.steps, batch_size=options.batch_size, max_length=options.max_length
            ).ids(step)
            if step < options.steps
        )
        trained = Counter(sample for steps in everyone if step < len(steps) for sample in steps[step]["ids"])
        lost += (loaded - trained).total()
        doubled += (trained - loaded).total()
    return {"lost": lost, "doubled": doubled}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--balancer", default="off", help="host:port of the balancer, or off")
    parser.add_argument("--steps", type=int, default=50, help="batches per rank")
    parser.add_argument("--batch-size", type=int, default=32, help="samples per rank and batch")
    parser.add_argument("--max-length", type=int, default=512, help="longest history")
    parser.add_argument("--result", type=Path, required=True, help="where rank 0 writes what happened")
    return parser.parse_args()


if __name__ == "__main__":
    main()
