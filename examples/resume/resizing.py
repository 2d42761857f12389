"""Groups that shrink and grow, as torchft's: the ranks that are there make a new process group, and go on.

`python -m examples.resume.resizing --ranks 4 --kill-at 7 --restarts 1 --pause 0.5`: nothing is written to disk but the
ledger, and those that live stay in their processes. It starts the ranks itself: torchrun ends all of its ranks when one
of them dies. Three things are needed beside a plain loop: after each step all ranks hold the loader's state of all
ranks, since who dies takes his own with him; all ask together whether somebody waits to be taken in; and in a new group
all go on from what the most advanced one holds, which those who come have not got at all.
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
from trainer_client.balancing.adapters.job_state import JobState

GRACE = 2.0  # seconds in which survivors must have noticed that somebody has died
PATIENCE = timedelta(minutes=10)  # for enough ranks to come, or to be taken in
TIMEOUT = timedelta(seconds=20)


class Training:
    """What each rank holds in memory; of the loader, the state of all ranks after the latest step."""

    def __init__(self, options: job.Options, *, falls: bool) -> None:
        self.options = options
        self._dies_at = options.kill_at if falls else 0
        options.kill_at = 0  # in the middle of a step, not after it
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

    def train(self, others: Others) -> bool:
        """Trains with the ranks of this group until all is trained, one of them has died, or somebody waits.

        Returns:
            Whether all is trained.
        """
        with job.make_balancer(self.options) as balancer:  # a session of its own
            loader = job.make_loader(self.options, balancer)
            state = JobState(loader)
            state.load_state_dict(self.loader)
            ledger = job.Ledger(self.options, step=self.progress.step)
            model = DistributedDataParallel(self.model)
            while self.progress.epoch < self.options.epochs:
                loader.set_epoch(self.progress.epoch)
                for batch in loader:
                    if self.progress.step + 1 == self._dies_at:
                        os.kill(os.getpid(), signal.SIGKILL)
                    loss = job.loss_of(model, batch) * loader.loss_scale
                    self.optimizer.zero_grad()
                    loss.backward()
                    trained = state.state_dict()  # the step counts if all ranks have come so far
                    self.optimizer.step()
                    self.progress.step, self.loader = self.progress.step + 1, trained
                    ledger.trained(epoch=self.progress.epoch, step=self.progress.step, users=batch["id"], loss=loss)
                    if others.wait():
                        return False
                self.progress.epoch += 1
            ledger.close(self.model)
            return True


class Others:
    """Who takes part in which group, by a store; rank 0, which has it, decides. torchft asks its lighthouse."""

    def __init__(self, store: c10d.Store, me: int, ranks: int, least: int) -> None:
        self._store, self._me, self._least = store, me, least
        self.generation, self.members = 0, list(range(ranks))
        self.come_late = me not in self.members or store.add(f"started/{me}", 1) > 1
        if self.come_late:
            self.generation = store.add("generation", 0)

    def wait(self) -> bool:
        """Whether somebody waits to be taken in. Collective: all leave their loop after the same step."""
        asked = torch.tensor([int(self._store.check([f"wanted/{self.generation + 1}"]))])
        dist.all_reduce(asked, op=dist.ReduceOp.MAX)
        return bool(asked)

    def meet(self) -> bool:
        """Waits for the next group; False if there is none any more, as all is trained."""
        if self._store.check(["done"]):
            return False
        self.generation += 1
        number = self._store.add(f"alive/{self.generation}", 1)
        self._store.set(f"alive/{self.generation}/{number}", str(self._me))
        if self.come_late:
            self._store.set(f"wanted/{self.generation}", "")
        if self._me == 0:
            self._choose()
        until = time.monotonic() + PATIENCE.total_seconds()
        while not self._store.check([f"members/{self.generation}"]):
            if self._store.check(["done"]):
                return False
            if time.monotonic() > until:
                raise TimeoutError(f"rank {self._me} was not taken into group {self.generation}")
            time.sleep(0.05)
        self.members = list(map(int, self._store.get(f"members/{self.generation}").decode().split(",")))
        return True

    def _choose(self) -> None:
        time.sleep(GRACE)
        until = time.monotonic() + PATIENCE.total_seconds()
        while (alive := self._store.add(f"alive/{self.generation}", 0)) < self._least:
            if time.monotonic() > until:
                raise TimeoutError(f"{alive} ranks are there, of at least {self._least}")
            time.sleep(0.05)
        come = (self._store.get(f"alive/{self.generation}/{number}") for number in range(1, alive + 1))
        self._store.add("generation", 1)
        self._store.set(f"members/{self.generation}", ",".join(map(str, sorted({int(rank) for rank in come}))))

    def end(self) -> None:
        """Tells those who wait that nothing is left to train."""
        self._store.set("done", "")


def start_ranks(ranks: int, restarts: int, others: list[str]) -> int:
    """Starts processes of this program on this machine, and those anew that are killed.

    Returns:
        0 if one of them trained to the end.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    command = [sys.executable, "-m", "examples.resume.resizing", *others]

    def start(rank: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, env=os.environ | address | {"RANK": str(rank), "WORLD_SIZE": str(ranks)})

    running = {rank: start(rank) for rank in range(ranks)}
    codes = []
    while running:
        time.sleep(0.05)
        for rank in [rank for rank, process in running.items() if process.poll() is not None]:
            code = running.pop(rank).wait()
            if code < 0 and restarts:
                restarts -= 1
                running[rank] = start(rank)
            else:
                codes.append(abs(code))
    return min(codes)


def main() -> None:
    """Trains, with fewer ranks each time that one dies, and with more when some come."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--ranks", type=int, default=4, help="processes to start")
    parser.add_argument("--restarts", type=int, default=0, help="of ranks that were killed")
    parser.add_argument("--min-ranks", type=int, default=1, help="with fewer, those that are left wait for others")
    given, rest = parser.parse_known_args()
    if "RANK" not in os.environ:
        sys.exit(start_ranks(given.ranks, given.restarts, ["--min-ranks", str(given.min_ranks), *rest]))
    if "TORCHELASTIC_MAX_RESTARTS" in os.environ and int(os.environ["LOCAL_WORLD_SIZE"]) > 1:
        sys.exit("torchrun ends all of its ranks when one dies; start: python -m examples.resume.resizing --ranks 4")
    sys.argv[1:] = rest
    options = job.read_options(__doc__)
    me, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # by torchrun
    store = dist.TCPStore(  # type: ignore[attr-defined]
        address, port, is_master=me == 0 and not hosted, timeout=TIMEOUT, wait_for_workers=False
    )
    others = Others(store, me, ranks, given.min_ranks)
    training = Training(options, falls=me == ranks - 1 and not others.come_late)
    there, done = not others.come_late or others.meet(), False
    while there and not done:
        if me in others.members:
            others.come_late = False
            try:
                dist.init_process_group(
                    "gloo", store=c10d.PrefixStore(f"group/{others.generation}", store), rank=others.members.index(me),
                    world_size=len(others.members), timeout=TIMEOUT,
                )  # fmt: skip
                training.catch_up()
                print(f"rank {me}: one of {len(others.members)} from step {training.progress.step} on", flush=True)
                done = training.train(others)
            except RuntimeError as error:  # of a collective, whose other end has gone
                print(f"rank {me}: after step {training.progress.step}: {type(error).__name__}", flush=True)
            if dist.is_initialized():
                dist.destroy_process_group()
        there = done or others.meet()
    if done and me == others.members[0]:
        others.end()


if __name__ == "__main__":
    main()
