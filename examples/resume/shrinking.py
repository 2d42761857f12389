"""Groups that shrink, as torchft's: ranks that survive make a new process group, in the same processes, and go on.

`python -m examples.resume.shrinking --ranks 4 --kill-at 7`: nothing is written to disk but the ledger, and no process
is started anew. It starts the ranks itself: torchrun ends all of its ranks when one of them dies. Two things are needed
beside a plain loop: after each step all ranks hold the loader's state of all ranks, since who dies takes his own with
him; and in a new group all go on from what the most advanced one holds.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

from examples.resume import job
from examples.resume.checkpoints import Progress
from trainer_client.balancing.trainers import JobState

GRACE = 2.0  # seconds in which survivors must have noticed that somebody has died
TIMEOUT = timedelta(seconds=20)


class Training:
    """What each rank holds in memory; of the loader, the state of all ranks after the latest step."""

    def __init__(self, options: job.Options, me: int) -> None:
        self.options, self.me = options, me
        self._dies_at, options.kill_at = options.kill_at, 0  # in the middle of a step, not after it
        self.model = job.make_model()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.progress = Progress()
        self.loader: dict[str, Any] = {}

    def catch_up(self) -> None:
        """Takes over what the most advanced rank holds. Collective."""
        steps: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(steps, self.progress.step)
        held = [{
            "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
            "progress": self.progress.state_dict(), "loader": self.loader,
        }]  # fmt: skip
        dist.broadcast_object_list(held, src=steps.index(max(steps)))
        self.model.load_state_dict(held[0]["model"])
        self.optimizer.load_state_dict(held[0]["optimizer"])
        self.progress.load_state_dict(held[0]["progress"])
        self.loader = held[0]["loader"]

    def train(self) -> None:
        """Trains with the ranks of this group until all is trained, or one of them has died."""
        self.catch_up()
        with job.make_balancer(self.options) as balancer:  # a session of its own
            loader = job.make_loader(self.options, balancer)
            state = JobState(loader)
            state.load_state_dict(self.loader)
            ledger = job.Ledger(self.options, step=self.progress.step)
            model = DistributedDataParallel(self.model)
            while self.progress.epoch < self.options.epochs:
                loader.set_epoch(self.progress.epoch)
                for batch in loader:
                    self._fall(self.progress.step + 1)
                    loss = job.loss_of(model, batch) * loader.loss_scale
                    self.optimizer.zero_grad()
                    loss.backward()
                    trained = state.state_dict()  # the step counts if all ranks have come so far
                    self.optimizer.step()
                    self.progress.step, self.loader = self.progress.step + 1, trained
                    ledger.trained(epoch=self.progress.epoch, step=self.progress.step, users=batch["id"], loss=loss)
                self.progress.epoch += 1
            ledger.close(self.model)

    def _fall(self, step: int) -> None:
        if step == self._dies_at and self.me == int(os.environ["WORLD_SIZE"]) - 1:
            os.kill(os.getpid(), signal.SIGKILL)


def survivors(store: c10d.Store, generation: int, me: int) -> list[int]:
    """The ranks that take part in the next group; rank 0, which has the store, decides. torchft asks its lighthouse."""
    store.set(f"alive/{generation}/{me}", "")
    if me == 0:
        time.sleep(GRACE)
        everyone = range(int(os.environ["WORLD_SIZE"]))
        alive = [rank for rank in everyone if store.check([f"alive/{generation}/{rank}"])]
        store.set(f"members/{generation}", ",".join(map(str, alive)))
    return [int(rank) for rank in store.get(f"members/{generation}").decode().split(",")]


def start_ranks() -> int:
    """Starts `--ranks` processes of this program on this machine; returns 0 if one of them trained to the end."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--ranks", type=int, default=4, help="processes to start")
    given, others = parser.parse_known_args()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    command = [sys.executable, "-m", "examples.resume.shrinking", *others]
    ranks = [
        subprocess.Popen(command, env=os.environ | address | {"RANK": str(rank), "WORLD_SIZE": str(given.ranks)})
        for rank in range(given.ranks)
    ]
    return min(abs(rank.wait()) for rank in ranks)


def main() -> None:
    """Trains, with fewer ranks each time that one dies."""
    if "RANK" not in os.environ:
        sys.exit(start_ranks())
    if "TORCHELASTIC_MAX_RESTARTS" in os.environ and int(os.environ["LOCAL_WORLD_SIZE"]) > 1:
        sys.exit("torchrun ends all of its ranks when one dies; start: python -m examples.resume.shrinking --ranks 4")
    options = job.read_options(__doc__)
    me, members = int(os.environ["RANK"]), list(range(int(os.environ["WORLD_SIZE"])))
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # by torchrun
    store = dist.TCPStore(  # type: ignore[attr-defined]
        address, port, is_master=me == 0 and not hosted, timeout=TIMEOUT, wait_for_workers=False
    )
    training, generation, done = Training(options, me), 0, False
    while not done:
        dist.init_process_group(
            "gloo", store=c10d.PrefixStore(f"group/{generation}", store), rank=members.index(me),
            world_size=len(members), timeout=TIMEOUT,
        )  # fmt: skip
        try:
            training.train()
            done = True
        except RuntimeError as error:  # of a collective, whose other end has gone
            print(f"rank {me}: after step {training.progress.step}: {type(error).__name__}", flush=True)
        dist.destroy_process_group()
        if not done:
            generation += 1
            members = survivors(store, generation, me)


if __name__ == "__main__":
    main()
