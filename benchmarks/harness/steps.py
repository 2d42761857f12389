"""What each rank of the fault suite does: steps of a loop over endless data, until it is told to stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from evenkeel.credentials import Credentials
from trainer_client import BalancedLoader, BalanceOptions, Balancer, BatchSpec

SPEC = BatchSpec(rows_per_sample={"values": "count"})


def make_batch(rank: int, step: int, size: int) -> dict[str, torch.Tensor]:
    """A batch of which each value tells the sample that it belongs to."""
    rng = np.random.default_rng([rank, step])
    ids = torch.arange(size) + 1000 * step + 1_000_000 * rank
    counts = torch.from_numpy(np.minimum(rng.zipf(1.3, size) - 1, 500))
    return {"id": ids, "count": counts, "values": ids.repeat_interleave(counts)}


def cost_of(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Quadratic in the length."""
    return batch["count"] * (batch["count"] + 100)


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """One job of the suite.

    Attributes:
        address: Of the service.
        name: Of the job.
        timeout: Seconds that a round may wait for the service.
        pace: Seconds of a step's own work.
        batch_size: Samples of each rank.
        max_steps: After which it ends by itself.
        credentials: What the service asks for.
        slow: (rank, step) to the seconds that the rank's data takes there.
        bad_costs: (rank, step) at which a cost is NaN.
        big: (rank, step) at which the batch has 30 times the samples.
    """

    address: str
    name: str
    timeout: float = 0.5
    pace: float = 0.02
    batch_size: int = 6
    max_steps: int = 100_000
    credentials: Credentials | None = None
    slow: dict[tuple[int, int], float] = field(default_factory=dict)
    bad_costs: frozenset[tuple[int, int]] = frozenset()
    big: frozenset[tuple[int, int]] = frozenset()

    def size(self, rank: int, step: int) -> int:
        """Samples of a rank's batch: some are empty, all sizes occur."""
        if (rank, step) in self.big:
            return 30 * self.batch_size
        return (5 * rank + 3 * step) % (self.batch_size + 1)

    def slowness(self, step: int) -> float:
        """Seconds for which data alone may hold up the batch of a step: of it and of those in flight behind it."""
        return sum(seconds for (_, at), seconds in self.slow.items() if step <= at <= step + 4)

    def batches(self, rank: int) -> Iterator[dict[str, torch.Tensor]]:
        for step in range(self.max_steps):
            time.sleep(self.slow.get((rank, step), 0.0))
            yield make_batch(rank, step, self.size(rank, step))

    def expected(self, world_size: int, step: int) -> list[int]:
        """Ids that all ranks load at a step, sorted."""
        return sorted(
            1000 * step + 1_000_000 * rank + at for rank in range(world_size) for at in range(self.size(rank, step))
        )


def take_steps(rank: int, steps: Steps, stopped: Callable[[], bool], tell: Callable[[Any], None]) -> dict[str, Any]:
    """Runs the job on one rank; rank 0 tells about every step and says when all stop."""
    records: list[dict[str, Any]] = []
    options = BalanceOptions(timeout=timedelta(seconds=steps.timeout))
    bad = {step for at, step in steps.bad_costs if at == rank}
    calls = iter(range(steps.max_steps))

    def cost(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        costs = cost_of(batch)
        return torch.full_like(costs, torch.nan, dtype=torch.float64) if next(calls) in bad else costs

    with Balancer.connect(steps.address, job=steps.name, options=options, credentials=steps.credentials) as balancer:
        loader = BalancedLoader(_Source(steps, rank), balancer, cost=cost, spec=SPEC)
        came = time.monotonic()
        for step, batch in enumerate(loader):
            blocked = time.monotonic() - came
            assert batch["values"].tolist() == batch["id"].repeat_interleave(batch["count"]).tolist()
            report = loader.report
            records.append(
                {
                    "ids": batch["id"].tolist(), "mode": report.mode.value, "reason": report.reason.value,
                    "wait": report.wait_seconds, "round": report.round, "at": time.monotonic(),
                    "blocked": blocked,
                }
            )  # fmt: skip
            time.sleep(steps.pace)
            # As in training, ranks meet in every step; here they also hear whether to go on.
            stop = torch.tensor([rank == 0 and stopped()], dtype=torch.int32)
            dist.all_reduce(stop)
            if rank == 0:
                tell((step, report.mode.value, report.reason.value))
            if stop.item():
                break
            came = time.monotonic()
        changes, started = loader.counters.breaker_changes, time.monotonic()
    return {"records": records, "breaker_changes": changes, "close_seconds": time.monotonic() - started}


@dataclass(slots=True)
class _Source:
    steps: Steps
    rank: int

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return self.steps.batches(self.rank)
