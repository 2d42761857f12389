"""PyTorch Lightning: checkpoints in the middle of an epoch, `ckpt_path`, and SIGTERM on any rank.

`torchrun --nproc-per-node 4 --max-restarts 1 -m examples.resume.lightning_loop --kill-at 7`
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from examples.resume import job
from examples.resume.preemption import Preemption
from trainer_client import BalancedLoader
from trainer_client.balancing.adapters.lightning import LightningLoader

SECONDS = 25.0  # from SIGTERM to the end; Kubernetes gives 30


class Data(LightningDataModule):
    """Batches for training and for validation."""

    def __init__(self, options: job.Options) -> None:
        super().__init__()
        self.options = options

    def setup(self, stage: str) -> None:  # noqa: ARG002
        """Connects, where Lightning has made the process group."""
        self.balancer = job.make_balancer(self.options)

    def train_dataloader(self) -> LightningLoader[job.Batch]:
        """Lightning keeps the state of what this returns, and loads it."""
        loader = job.make_loader(self.options, self.balancer, job.make_device())
        return LightningLoader(loader, self.trainer, length=len(loader))

    def val_dataloader(self) -> BalancedLoader[job.Batch]:
        """Loaders that are used within the training loop have names of their own."""
        return job.make_loader(self.options, self.balancer, job.make_device(), name="validation")

    def teardown(self, stage: str) -> None:  # noqa: ARG002
        """Disconnects."""
        self.balancer.close()


class Model(LightningModule):
    """The model; batches come with their scale."""

    def __init__(self) -> None:
        super().__init__()
        self.ranker = job.make_model()

    def training_step(self, balanced: Any, _: int) -> torch.Tensor:
        """The loss, so weighed that averaged gradients are right."""
        loss: torch.Tensor = job.loss_of(self.ranker, balanced.batch) * balanced.loss_scale
        return loss

    def validation_step(self, batch: job.Batch, _: int) -> None:
        """A sum over samples and their number, so that all ranks' together make the mean."""
        loss = job.loss_of(self.ranker, batch)
        self.log("loss", loss, on_epoch=True, reduce_fx="sum", sync_dist=True, batch_size=len(batch["id"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Preempted(Callback):
    """Ends training after the same step on all ranks; ModelCheckpoint then saves.

    Left to itself, Lightning ends it on each rank when that has got the signal, and begins a collective in the handler.
    """

    def on_train_start(self, _: Trainer, module: LightningModule) -> None:
        """Takes the signal over from Lightning, which has its handler by now."""
        self._preemption = Preemption(SECONDS, module.device)

    def on_train_batch_start(self, *_: Any) -> None:
        """Tells the other ranks."""
        self._preemption.begin_step()

    def on_train_batch_end(self, *_: Any) -> None:
        """Ends, where a rank has been asked to."""
        if self._preemption.stops():
            raise SIGTERMException


class Noted(Callback):
    """Writes the ledger; ModelCheckpoint comes after other callbacks."""

    def __init__(self, options: job.Options) -> None:
        self._options = options

    def on_train_start(self, trainer: Trainer, _: LightningModule) -> None:
        """Begins."""
        self._ledger = job.Ledger(self._options, step=trainer.global_step)

    def on_train_batch_end(self, trainer: Trainer, _: LightningModule, outputs: Any, batch: Any, __: int) -> None:
        """Notes a step."""
        self._ledger.trained(
            epoch=trainer.current_epoch, step=trainer.global_step, users=batch.batch["id"], loss=outputs["loss"]
        )

    def on_train_end(self, _: Trainer, module: LightningModule) -> None:
        """Tells what was trained."""
        self._ledger.close(module)


def main() -> None:
    """Trains, or goes on."""
    options = job.read_options(__doc__)
    checkpoints = ModelCheckpoint(
        options.folder, filename="{step:06}", every_n_train_steps=options.save_every, save_top_k=-1,
        save_on_exception=True,
    )  # fmt: skip
    trainer = Trainer(
        max_epochs=options.epochs, callbacks=[Noted(options), Preempted(), checkpoints], logger=False,
        accelerator="auto", strategy="ddp", devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")), enable_model_summary=False,
        enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(Model(), Data(options), ckpt_path=newest(options.folder), weights_only=False)


def newest(folder: Path) -> str | None:
    """The newest checkpoint; Lightning writes each of them whole or not at all."""
    return max(map(str, folder.glob("step=*.ckpt")), default=None)


if __name__ == "__main__":
    main()
