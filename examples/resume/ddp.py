"""DistributedDataParallel and `torch.distributed.checkpoint`: killed, preempted or resized, the job goes on.

`torchrun --nproc-per-node 4 --max-restarts 1 -m examples.resume.ddp --kill-at 7`
"""

from __future__ import annotations

import signal
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

from examples.resume import job
from examples.resume.checkpoints import Progress, load, newest, save
from examples.resume.preemption import Preemption
from trainer_client.balancing.adapters.job_state import JobState

SECONDS = 25.0  # from SIGTERM to the end; Kubernetes gives 30


class Training:
    """Model and optimizer, as `torch.distributed.checkpoint` wants them."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        """Weights and moments, under names that no wrapper changes."""
        model, optimizer = get_state_dict(self._model, self._optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From them."""
        set_state_dict(
            self._model, self._optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )


def main() -> None:
    """Trains, or goes on."""
    options = job.read_options(__doc__)
    preemption = Preemption(SECONDS)
    device = job.make_device()
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    with job.make_balancer(options) as balancer:
        loader = job.make_loader(options, balancer, device)
        model = DistributedDataParallel(job.make_model().to(device))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        progress = Progress()
        state = {"training": Training(model, optimizer), "loader": JobState(loader), "progress": progress}
        if found := newest(options.folder):
            load(found, state)
        ledger = job.Ledger(options, step=progress.step)

        while progress.epoch < options.epochs:
            loader.set_epoch(progress.epoch)
            for batch in loader:
                preemption.begin_step()
                loss = job.loss_of(model, batch) * loader.loss_scale
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                progress.step += 1
                ledger.trained(epoch=progress.epoch, step=progress.step, users=batch["id"], loss=loss)
                stops = preemption.stops()
                if stops or progress.step % options.save_every == 0:
                    save(options.folder, state, progress.step)
                if stops:
                    print(f"stopped after step {progress.step}", flush=True)
                    sys.exit(128 + signal.SIGTERM)
            progress.epoch += 1

        ledger.close(model.module)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
