"""Hugging Face Accelerate: `save_state` and `load_state` keep the loader's state with the rest.

`torchrun --nproc-per-node 4 --max-restarts 1 -m examples.resume.accelerate_loop --kill-at 7`, or `accelerate launch`.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from accelerate import Accelerator

from examples.resume import job
from examples.resume.checkpoints import Progress
from trainer_client.balancing.adapters.job_state import JobState


def main() -> None:
    """Trains, or goes on."""
    options = job.read_options(__doc__)
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    with job.make_balancer(options) as balancer:
        loader = job.make_loader(options, balancer, accelerator.device)  # not prepared: it shards and moves itself
        model = job.make_model()
        model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=1e-2))
        progress = Progress()
        accelerator.register_for_checkpointing(progress, JobState(loader))
        found = newest(options.folder)
        if found is not None:
            accelerator.load_state(str(found))
        ledger = job.Ledger(options, step=progress.step)

        while progress.epoch < options.epochs:
            loader.set_epoch(progress.epoch)
            for batch in loader:
                loss = job.loss_of(model, batch) * loader.loss_scale
                optimizer.zero_grad()
                accelerator.backward(loss)
                optimizer.step()
                progress.step += 1
                ledger.trained(epoch=progress.epoch, step=progress.step, users=batch["id"], loss=loss)
                if progress.step % options.save_every == 0:
                    save(accelerator, options.folder, progress.step)
            progress.epoch += 1

        ledger.close(accelerator.unwrap_model(model))
    accelerator.end_training()


def save(accelerator: Accelerator, folder: Path, step: int) -> None:
    """Saves to a folder that has its name when it is whole. Collective."""
    part, whole = folder / f"step-{step:06}.part", folder / f"step-{step:06}"
    if accelerator.is_main_process:
        shutil.rmtree(part, ignore_errors=True)  # of a run that was killed while it saved
        shutil.rmtree(whole, ignore_errors=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(part))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        part.rename(whole)


def newest(folder: Path) -> Path | None:
    """The newest folder that is whole."""
    return max((path for path in folder.glob("step-*") if path.suffix != ".part"), default=None)


if __name__ == "__main__":
    main()
