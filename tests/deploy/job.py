"""One rank of the job that the test of the whole stack watches; started by torchrun, ends when a file appears."""

import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from evenkeel.credentials import Credentials
from tests.trainer_client.balancing.jobs import SPEC, cost_of, make_batch
from trainer_client import BalancedLoader, BalanceOptions, Balancer
from trainer_client.observing.metrics import RankExporter

BATCH_SIZE = 64
STEP_SECONDS = 0.05


def batches(rank: int, stop: Path, counts: dict[str, int]) -> Iterator[dict[str, torch.Tensor]]:
    step = 0
    while not stop.exists():
        counts["loaded"] += BATCH_SIZE
        yield make_batch(rank, step, BATCH_SIZE)
        step += 1


def main(address: str, job: str, stop: str, targets: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    options = BalanceOptions(timeout=timedelta(seconds=5))
    counts = {"loaded": 0, "trained": 0}
    with (
        Balancer.connect(address, job=job, options=options, credentials=Credentials.from_env()) as balancer,
        RankExporter.start(job=job, rank=rank, targets=targets) as exporter,
    ):
        loader: BalancedLoader[Any] = BalancedLoader(
            batches(rank, Path(stop), counts), balancer, cost=cost_of, spec=SPEC
        )
        for batch in exporter.watch(loader):
            time.sleep(STEP_SECONDS)
            keys = torch.bincount(batch["values"] % 2, minlength=2).double()
            exporter.measures.key_skew("items", float(keys.max() / keys.mean()) if len(batch["values"]) else 1.0)
            mode = loader.report.mode.value
            counts[mode] = counts.get(mode, 0) + 1
            counts["trained"] += len(batch["id"])
    Path(f"{stop}.{rank}").write_text(repr(counts))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
