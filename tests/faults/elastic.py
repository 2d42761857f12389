"""A job under torchrun that loses a rank in mid-training and goes on from its checkpoint after the restart."""

from __future__ import annotations

import argparse
import json
import os
import signal
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests.trainer_client.balancing.jobs import SPEC, connect, cost_of, make_batch
from trainer_client import BalancedLoader, BalanceOptions

NUM_STEPS = 8
DIES = (1, 4)  # (rank, step), in the first incarnation


def size_of(rank: int, step: int) -> int:
    """Samples of a rank's batch."""
    return 3 + (rank + step) % 4


class Steps:
    """The batches from a step on."""

    def __init__(self, rank: int, first: int) -> None:
        self._rank, self._first = rank, first

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return (make_batch(self._rank, step, size_of(self._rank, step)) for step in range(self._first, NUM_STEPS))


def train(address: str, folder: Path) -> None:
    """Trains the steps that no incarnation has finished yet, and notes what it trained."""
    dist.init_process_group("gloo")
    rank, restart = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    checkpoint = folder / "finished"
    first = int(checkpoint.read_text()) if checkpoint.exists() else 0
    options = BalanceOptions(timeout=timedelta(seconds=30))
    with connect(address, job="under-torchrun", options=options) as balancer:
        loader = BalancedLoader(Steps(rank, first), balancer, cost=cost_of, spec=SPEC)
        for step, batch in enumerate(loader, first):
            if restart == 0 and (rank, step) == DIES:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(torch.ones(1))  # the step's gradients
            with (folder / f"trained-{restart}-{rank}").open("a") as log:
                log.write(json.dumps([step, loader.report.mode.value, batch["id"].tolist()]) + "\n")
            dist.barrier()
            if rank == 0:
                checkpoint.with_suffix(".new").write_text(str(step + 1))
                checkpoint.with_suffix(".new").rename(checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address", help="of the balancer")
    parser.add_argument("folder", type=Path, help="of the checkpoint and of what each rank trained")
    arguments = parser.parse_args()
    train(arguments.address, arguments.folder)
