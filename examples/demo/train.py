"""One rank of the demo: trains without balancing, then with it.

Model, data, gradients, balancer and moves are real. What is simulated is how long a GPU computes: the ranks share this
machine's cores, so each one sleeps in proportion to the cost of its samples, as long as a slow GPU of its own would
take for an HSTU. Who finishes early waits for the others in the exchange of gradients, as on GPUs.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from examples.demo.histories import NUM_ITEMS, Histories
from trainer_client import BalancedLoader, Balancer, BatchSpec, HSTUCost

COST = HSTUCost(num_layers=8, width=1024, num_heads=4, head_dim=256, history="num_items")
FLOPS_PER_SECOND = 12e12  # of the simulated GPUs


class Taste(nn.Module):
    """Which half of the catalogue a user likes, from the mean of what the history holds."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.EmbeddingBag(NUM_ITEMS, 8, mode="mean")
        self.score = nn.Linear(8, 1)

    def forward(self, items: torch.Tensor, num_items: torch.Tensor) -> torch.Tensor:
        """(total length,) items of (samples,) histories to (samples,) logits."""
        logits: torch.Tensor = self.score(self.items(items, num_items.cumsum(0) - num_items)).squeeze(-1)
        return logits


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What the ranks are started with.

    Attributes:
        balancer: Its `host:port`.
        ranks: How many there are.
        steps: Batches per rank.
        batch_size: Samples per rank and batch.
        max_length: Of the longest history.
        folder: For files of the run.
    """

    balancer: str
    ranks: int
    steps: int
    batch_size: int
    max_length: int
    folder: Path

    def histories(self, rank: int) -> Histories:
        """What a rank loads."""
        return Histories(rank=rank, steps=self.steps, batch_size=self.batch_size, max_length=self.max_length)


def run_rank(rank: int, job: Job, told: Any) -> None:
    """Trains on one rank without balancing ("off") and with it ("on"); rank 0 tells of each step, and writes all.

    Args:
        rank: Which one.
        job: Of all ranks.
        told: A queue for (name of the run, steps done).
    """
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{job.folder}/ranks", rank=rank, world_size=job.ranks)

    def tell(name: str, done: int) -> None:
        told.put((name, done))

    results = {}
    for name in ("off", "on"):
        with Balancer.off() if name == "off" else Balancer.connect(job.balancer, job="demo") as balancer:
            steps = train(job.histories(rank), balancer, partial(tell, name) if rank == 0 else int)
        everyone: list[Any] = [None] * job.ranks
        dist.all_gather_object(everyone, steps)
        results[name] = everyone
    if rank == 0:
        (job.folder / "steps.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def train(histories: Histories, balancer: Balancer, done: Callable[[int], object]) -> list[dict[str, Any]]:
    """Trains over all batches, telling how many are done; what happened in each step."""
    # ---- what a trainer author adds
    loader = BalancedLoader(histories, balancer, cost=COST, spec=BatchSpec(rows_per_sample={"items": "num_items"}))
    # ----
    torch.manual_seed(0)
    model = DistributedDataParallel(Taste())
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    steps: list[dict[str, Any]] = []
    began = time.perf_counter()
    for batch in loader:
        report = loader.report
        logits = model(batch["items"], batch["num_items"])
        loss = functional.binary_cross_entropy_with_logits(logits, batch["label"], reduction="sum")
        loss = loss * loader.loss_scale
        computing = report.own_load / FLOPS_PER_SECOND
        time.sleep(computing)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        began, ended = time.perf_counter(), began
        steps.append(
            {
                "ids": batch["id"].tolist(), "mode": report.mode.value, "imbalance": report.imbalance,
                "loss": float(loss.detach()) / dist.get_world_size(), "moved": report.moved_share,
                "computing": computing, "seconds": began - ended,
            }
        )  # fmt: skip
        done(len(steps))
    return steps


def count_wrong(job: Job, ranks: list[list[dict[str, Any]]]) -> tuple[int, int]:
    """Samples that were lost, and those trained twice, over all steps.

    Args:
        job: Which samples there are.
        ranks: What each rank did, by step.
    """
    lost = doubled = 0
    for step in range(job.steps):
        loaded = Counter(sample for rank in range(job.ranks) for sample in job.histories(rank).ids(step))
        trained = Counter(sample for steps in ranks for sample in steps[step]["ids"])
        lost += (loaded - trained).total()
        doubled += (trained - loaded).total()
    return lost, doubled
