"""torchtitan's conventions: a loader that is `Stateful`, a checkpointer that gives all states to DCP, a count of steps.

`torchrun --nproc-per-node 4 --max-restarts 1 -m examples.resume.titan --kill-at 7`
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.stateful import Stateful
from torch.nn.parallel import DistributedDataParallel

from examples.resume import job
from examples.resume.checkpoints import load, newest, save
from examples.resume.ddp import Training
from trainer_client import BalancedLoader
from trainer_client.balancing.adapters.job_state import JobState

TitanBatch = tuple[dict[str, torch.Tensor], torch.Tensor]


class BalancedDataLoader(Stateful):
    """What torchtitan asks of a `BaseDataLoader`, over balanced batches: inputs and labels, epoch after epoch.

    There derive it from `BaseDataLoader`, and build it in its `Config`. torchtitan's own loader refuses a checkpoint of
    another data-parallel degree; this one goes on with any.
    """

    def __init__(self, loader: BalancedLoader[job.Batch]) -> None:
        self._loader = loader
        self._state = JobState(loader)
        self.epoch = 0

    def __iter__(self) -> Iterator[TitanBatch]:
        while True:
            self._loader.set_epoch(self.epoch)
            for batch in self._loader:
                yield {name: value for name, value in batch.items() if name != "label"}, batch["label"]
            self.epoch += 1

    def state_dict(self) -> dict[str, Any]:
        """For torchtitan's checkpointer."""
        return {"epoch": self.epoch, **self._state.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From it; nothing changes where a checkpoint has none."""
        if state:
            self.epoch = state["epoch"]
            self._state.load_state_dict(state)

    def close(self) -> None:
        """Nothing is open between two steps."""


class Trainer(Stateful):
    """A loop as torchtitan's: it counts steps, not epochs, and weighs losses by what all ranks have together."""

    def __init__(self, options: job.Options, dataloader: BalancedDataLoader, device: torch.device) -> None:
        self.options, self.dataloader, self.device = options, dataloader, device
        self.model = DistributedDataParallel(job.make_model().to(device))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.step = 0
        self.states = {
            "training": Training(self.model, self.optimizer), "dataloader": dataloader, "train_state": self,
        }  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """How far it is."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From it."""
        self.step = state["step"]

    def train(self, steps: int) -> None:
        """Trains until so many steps have been."""
        if found := newest(self.options.folder):
            load(found, self.states)
        ledger = job.Ledger(self.options, step=self.step)
        batches = iter(self.dataloader)
        while self.step < steps:
            self.step += 1
            inputs, labels = next(batches)
            loss = self.train_step(inputs, labels)
            ledger.trained(epoch=self.dataloader.epoch, step=self.step, users=inputs["id"], loss=loss)
            if self.step % self.options.save_every == 0:
                save(self.options.folder, self.states, self.step)
        ledger.close(self.model.module)

    def train_step(self, inputs: dict[str, torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
        """A step; the loss is a sum, over the labels of all ranks."""
        count = torch.tensor(float(len(labels)))
        dist.all_reduce(count)
        loss = job.loss_of(self.model, {**inputs, "label": labels}) * (dist.get_world_size() / count.to(self.device))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss


def main() -> None:
    """Trains, or goes on."""
    options = job.read_options(__doc__)
    device = job.make_device()
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    with job.make_balancer(options) as balancer:
        loader = job.make_loader(options, balancer, device)
        Trainer(options, BalancedDataLoader(loader), device).train(options.epochs * len(loader))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
