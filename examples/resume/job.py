"""What the programs here share: data, a small model, options, and a ledger of every sample that was trained."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, Dataset

from examples.demo.histories import NUM_ITEMS
from examples.tutorial.ranker import Ranker
from trainer_client import BalancedLoader, BalanceOptions, Balancer, BatchSpec, TokenCost
from trainer_client.balancing.sampling import GlobalBatchSampler

Batch = dict[str, torch.Tensor]


@dataclass(slots=True)
class Options:
    """What is asked for on the command line.

    Attributes:
        folder: Of checkpoints and of the ledger.
        epochs: To train in all.
        users: Samples of the data set.
        global_batch: Samples of a step, over all ranks.
        save_every: Steps from one checkpoint to the next.
        window: Batches that are balanced together.
        workers: Of each rank's DataLoader.
        kill_at: Step in which the last rank kills itself, unless the launcher has restarted it; 0: never.
        pause: Seconds that a step takes beside its computation.
    """

    folder: Path
    epochs: int
    users: int
    global_batch: int
    save_every: int
    window: int
    workers: int
    kill_at: int
    pause: float


def read_options(description: str | None) -> Options:
    """The options of this process's command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("out/resume"), help="of checkpoints and of the ledger")
    parser.add_argument("--epochs", type=int, default=2, help="to train in all")
    parser.add_argument("--users", type=int, default=200, help="samples of the data set")
    parser.add_argument("--global-batch", type=int, default=16, help="samples of a step, over all ranks")
    parser.add_argument("--save-every", type=int, default=5, help="steps from one checkpoint to the next")
    parser.add_argument("--window", type=int, default=1, help="batches that are balanced together")
    parser.add_argument("--workers", type=int, default=0, help="of each rank's DataLoader")
    parser.add_argument("--kill-at", type=int, default=0, help="step in which the last rank kills itself, 0: never")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds that a step takes beside its computation")
    return Options(**vars(parser.parse_args()))


class Users(Dataset[Batch]):
    """Users with histories of very different lengths; each is a function of its number."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, user: int) -> Batch:
        rng = np.random.default_rng(user)
        length = min(int(rng.zipf(1.3)), 200)
        taste = user % 2  # which end of the catalogue
        items = rng.integers(0, NUM_ITEMS // 2, length) + taste * (NUM_ITEMS // 2)
        return {"id": torch.tensor(user), "items": torch.from_numpy(items), "label": torch.tensor(float(taste))}


def collate(users: list[Batch]) -> Batch:
    """A batch: `items` has as many rows a sample as `num_items` says."""
    return {
        "id": torch.tensor([int(user["id"]) for user in users]),
        "num_items": torch.tensor([len(user["items"]) for user in users]),
        "items": torch.cat([user["items"] for user in users] or [torch.empty(0, dtype=torch.int64)]),
        "label": torch.tensor([float(user["label"]) for user in users]),
    }


SPEC = BatchSpec(rows_per_sample={"items": "num_items"})
COST = TokenCost(tokens="num_items")


def make_loader(
    options: Options, balancer: Balancer, device: torch.device | str | None = None, *, name: str = "train"
) -> BalancedLoader[Batch]:
    """This rank's part of each global batch, balanced."""
    users = Users(options.users)
    sampler = GlobalBatchSampler(users, global_batch_size=options.global_batch, seed=7)
    data_loader = DataLoader(users, batch_sampler=sampler, collate_fn=collate, num_workers=options.workers)
    return BalancedLoader(data_loader, balancer, cost=COST, spec=SPEC, device=device, name=name)


def make_balancer(options: Options) -> Balancer:
    """The service that EVENKEEL_BALANCER names; without one, ranks plan by themselves."""
    return Balancer.from_env(options=BalanceOptions(window=options.window))


def make_device() -> torch.device:
    """This rank's GPU, where there are any."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def make_model() -> Ranker:
    """The model, the same on all ranks."""
    torch.manual_seed(0)
    return Ranker(width=8, num_layers=1, num_heads=2)


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Sum of the losses of a batch's samples; multiplied by the loader's scale, its gradients can be averaged."""
    logits = model(batch["items"], batch["num_items"])
    return binary_cross_entropy_with_logits(logits, batch["label"], reduction="sum")


class Ledger:
    """Which users each rank has trained, on disk after every step, and the loss of its part of the batch."""

    def __init__(self, options: Options, *, step: int) -> None:
        """Begins the part of a run that goes on after `step` steps. Collective."""
        self._folder = options.folder / "ledger"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._options = options
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._last_rank = dist.get_world_size() - 1 if dist.is_initialized() else 0
        run = [time.time_ns()]
        if dist.is_initialized():
            dist.broadcast_object_list(run)
        self._file = (self._folder / f"{run[0]}-{self._rank}.jsonl").open("a")
        self._write({"after": step})

    def trained(self, *, epoch: int, step: int, users: torch.Tensor, loss: torch.Tensor) -> None:
        """Notes a step: call it after the optimizer's.

        Args:
            epoch: Its epoch.
            step: Steps trained with this one.
            users: (samples,) this rank's.
            loss: Of this rank.
        """
        if step == self._options.kill_at and self._rank == self._last_rank and not _restarted():
            os.kill(os.getpid(), signal.SIGKILL)
        self._write({"epoch": epoch, "step": step, "users": users.tolist(), "loss": float(loss.detach())})
        time.sleep(self._options.pause)

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self, model: nn.Module) -> None:
        """Tells on rank 0 how often each user was trained in each epoch, and a digest of the weights. Collective."""
        self._file.close()
        weights = digest(model)  # all ranks have written their last lines when they meet in it
        if self._rank:
            return
        kept = read_ledger(self._folder)
        for epoch in range(self._options.epochs):
            times = Counter(user for line in kept if line["epoch"] == epoch for user in line["users"])
            often = sum(count > 1 for count in times.values())
            print(f"epoch {epoch}: {len(times)} of {self._options.users} users trained, {often} of them more than once")
        print(f"weights {weights} after {max(line['step'] for line in kept)} steps", flush=True)


def read_ledger(folder: Path) -> list[dict[str, Any]]:
    """The lines of all runs, but for steps that a later run began before, having gone on from an earlier checkpoint."""
    runs: dict[int, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        run, rank = map(int, path.stem.split("-"))
        whole = path.read_text().rpartition("\n")[0]  # a rank may be before its first line, or inside its last one
        runs.setdefault(run, []).extend({**json.loads(line), "rank": rank} for line in whole.splitlines())
    kept: list[dict[str, Any]] = []
    for _, lines in sorted((run, lines) for run, lines in runs.items() if lines):
        after = min(line["after"] for line in lines if "after" in line)
        kept = [line for line in kept if line["step"] <= after] + [line for line in lines if "step" in line]
    return kept


def digest(model: nn.Module) -> str:
    """Twelve digits that differ if one bit of the weights does. Collective."""
    own: list[list[bytes]] = []
    for _, value in sorted(model.state_dict().items()):
        shards = [shard.tensor for shard in value.local_shards()] if hasattr(value, "local_shards") else [value]
        own.append([shard.detach().cpu().numpy().tobytes() for shard in shards])
    ranks = [own]
    if dist.is_initialized():
        ranks = [own] * dist.get_world_size()
        dist.all_gather_object(ranks, own)
    return hashlib.sha256(repr(ranks).encode()).hexdigest()[:12]


def _restarted() -> bool:
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
