"""What each rank of a job does: trains from the last checkpoint on, and writes down what it has trained."""

from __future__ import annotations

import faulthandler
import os
import pickle
import random
import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from benchmarks.kills.jobs import KilledJob, Stop
from trainer_client import BalancedLoader, BalanceOptions, Balancer, BatchSpec
from trainer_client.balancing.sampling import GlobalBatchSampler, TokenBudgetSampler

SPEC = BatchSpec(rows_per_sample={"values": "count"})
STEP_SECONDS = 0.004
FEATURES = 8


def length_of(sample: int) -> int:
    """Values of a sample: mostly few, sometimes many."""
    return sample * 37 % 23 + (sample % 17 == 0) * 300


class Histories(Dataset[int]):
    """Samples that are known by their index."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> int:
        return index


def collate(indexes: list[int]) -> dict[str, torch.Tensor]:
    """A jagged batch."""
    ids = torch.tensor(indexes, dtype=torch.int64)
    counts = torch.tensor([length_of(index) for index in indexes], dtype=torch.int64)
    return {"id": ids, "count": counts, "values": ids.repeat_interleave(counts)}


def cost(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Quadratic in the length."""
    return batch["count"] * (batch["count"] + 50)


class Resumable:
    """A rank's own stream with a state, as torchdata's `StatefulDataLoader`."""

    def __init__(self, job: KilledJob, rank: int, world_size: int) -> None:
        self._own = range(rank, job.samples, world_size)
        self._batch = job.global_batch // world_size
        self._state = {"read": 0}

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while (begin := self._state["read"] * self._batch) < len(self._own):
            self._state["read"] += 1
            yield collate(list(self._own[begin : begin + self._batch]))
        self._state["read"] = 0

    def state_dict(self) -> dict[str, Any]:
        """Of the iteration under way; 0 when it has ended."""
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iteration goes on from there."""
        self._state = dict(state)


def make_loader(job: KilledJob, rank: int, world_size: int) -> Any:
    """The loader that is wrapped."""
    data = Histories(job.samples)
    if job.data == "loader":
        return Resumable(job, rank, world_size)
    if job.data == "skip":
        sampler: DistributedSampler[int] = DistributedSampler(data, num_replicas=world_size, rank=rank, seed=job.seed)
        batch = job.global_batch // world_size
        return DataLoader(data, batch_size=batch, sampler=sampler, collate_fn=collate, num_workers=job.workers)
    own: Any
    if job.data == "sampler":
        own = GlobalBatchSampler(data, global_batch_size=job.global_batch, seed=job.seed)
    else:
        lengths = torch.tensor([length_of(sample) for sample in range(job.samples)])
        budget = int(lengths.sum()) * job.global_batch // job.samples + 400
        own = TokenBudgetSampler(data, budget=budget, costs=lengths, seed=job.seed)
    return DataLoader(data, batch_sampler=own, collate_fn=collate, num_workers=job.workers)


class Terminated:
    """Whether a rank was told to end, and all ranks' word on it."""

    def __init__(self) -> None:
        self._told = False
        signal.signal(signal.SIGTERM, self._tell)

    def _tell(self, *_: object) -> None:
        self._told = True

    def on_any_rank(self) -> bool:
        """Whether any rank was told; all ranks ask after the same step."""
        flag = torch.tensor([int(self._told)])
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag)


def train(rank: int, job: KilledJob, folder: str, run: int, stop: Stop | None) -> dict[str, Any]:
    """Trains the job to its end, or until it is stopped.

    Args:
        rank: This one.
        job: The job.
        folder: Of its checkpoints and ledgers.
        run: How often it was begun before.
        stop: What befalls this run; None: nothing.
    """
    os.setsid()  # what it starts ends with it
    faulthandler.register(signal.SIGUSR1)  # where it hangs, if it does
    world_size, place = dist.get_world_size(), Path(folder)
    chance = random.Random(job.seed * 1000 + run)
    victim, moment = chance.randrange(world_size), chance.uniform(0.0, 1.2) * job.steps * STEP_SECONDS * 2
    failing = chance.randrange(job.steps) if stop == "raise" and rank == victim else -1
    told = Terminated()
    if (stop in ("kill_one", "terminate") and rank == victim) or stop == "kill_all":
        what = signal.SIGTERM if stop == "terminate" else signal.SIGKILL
        timer = threading.Timer(moment, os.kill, (os.getpid(), what))
        timer.daemon = True
        timer.start()
    balance = Balancer.off if job.balancer == "off" else Balancer.embedded
    options = BalanceOptions(window=job.window, depth=job.depth, group_timeout=timedelta(seconds=60))
    weights = torch.zeros(FEATURES, dtype=torch.float32)
    first_epoch, step = 0, 0
    with balance(options=options) as balancer:
        loader: BalancedLoader[Any] = BalancedLoader(make_loader(job, rank, world_size), balancer, cost=cost, spec=SPEC)
        evaluation: BalancedLoader[Any] = BalancedLoader(
            [collate(list(range(rank + 1)))] * 3, balancer, cost=cost, spec=SPEC, name="eval"
        )
        saved = latest(place)
        if saved is not None:
            ranks = [pickle.loads((saved / f"rank{each}").read_bytes()) for each in range(len(list(saved.iterdir())))]
            states = [each["loader"] for each in ranks]
            loader.load_state_dict(states if len(states) > 1 else states[0])
            first_epoch, step, weights = ranks[0]["epoch"], ranks[0]["step"], ranks[0]["weights"]
        with (place / f"ledger-{run}-{rank}").open("w", buffering=1) as ledger:
            ledger.write(f"begins {step}\n")
            for epoch in range(first_epoch, job.epochs):
                loader.set_epoch(epoch)
                for batch in loader:
                    weights = update(weights, batch, loader.loss_scale)
                    ledger.write(f"{step} {epoch} {' '.join(map(str, batch['id'].tolist()))}\n")
                    time.sleep(STEP_SECONDS)
                    step += 1
                    if step == failing:
                        raise RuntimeError("this rank fails, as it was told")
                    if job.evaluate_every and step % job.evaluate_every == 0:
                        assert sum(len(each["id"]) for each in evaluation) >= 0
                    ends = told.on_any_rank()
                    if ends or step % job.save_every == 0:
                        state = {"loader": loader.state_dict(), "epoch": epoch, "step": step, "weights": weights}
                        save(place, run, rank, state)
                    if ends:
                        return {"ended": False}
    return {"ended": True, "weights": weights, "steps": step}


def update(weights: torch.Tensor, batch: dict[str, torch.Tensor], scale: float) -> torch.Tensor:
    """A step of a model whose gradient depends on the weights and on the order of all sums."""
    features = torch.sin(batch["id"][:, None] * 0.37 + torch.arange(FEATURES) * 1.7).float()
    error = features @ weights - torch.cos(batch["count"].float())
    gradient = (features * error[:, None]).sum(0) * scale
    dist.all_reduce(gradient)
    return weights - 0.05 * gradient / dist.get_world_size()


def save(place: Path, run: int, rank: int, state: dict[str, Any]) -> None:
    """A checkpoint of all ranks, which is there when all have written theirs."""
    step = state["step"]
    partial = place / f"saving-{run}-{step}"  # of this run alone: one before may have left files of other ranks
    partial.mkdir(exist_ok=True)
    (partial / f"rank{rank}").write_bytes(pickle.dumps(state))
    dist.barrier()
    if rank == 0:
        final = place / f"step-{step}"
        if not final.exists():
            partial.rename(final)
    dist.barrier()


def latest(place: Path) -> Path | None:
    """The newest whole checkpoint."""
    found = sorted(place.glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))
    return found[-1] if found else None
