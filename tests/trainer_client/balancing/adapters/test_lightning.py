"""States of whole jobs, and the same training after every checkpoint that Lightning can write."""

from __future__ import annotations

import logging
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.harness.ranks import run_ranks
from trainer_client import BalancedLoader, Balancer
from trainer_client.balancing.adapters.job_state import JobState
from trainer_client.balancing.adapters.lightning import LightningLoader
from trainer_client.balancing.resume import ResumeError
from trainer_client.balancing.sampling import GlobalBatchSampler

SAMPLES, STEPS, EPOCHS = 20, 4, 3


def make_loader() -> BalancedLoader[torch.Tensor]:
    sampler = GlobalBatchSampler(SAMPLES, global_batch_size=6, seed=3)
    data_loader = DataLoader(range(SAMPLES), batch_sampler=sampler)  # type: ignore[arg-type]
    return BalancedLoader(data_loader, Balancer.embedded(), cost=lambda batch: torch.ones(len(batch)))


def one_cannot(rank: int) -> tuple[str, bool]:
    loader = make_loader()
    state = JobState(loader, ahead=lambda: 1000 * rank)
    try:
        state.state_dict()
    except RuntimeError as error:
        return str(error), JobState(loader).state_dict() == JobState(loader).state_dict()
    return "", False


def test_a_rank_that_cannot_tell_its_state_is_heard_by_all() -> None:
    (first, equal), (second, _) = run_ranks(2, one_cannot)
    assert first == second
    assert first.startswith("the loader's state cannot be saved; rank 1: ValueError: ahead is 1000")
    assert equal


def with_a_helper(rank: int) -> tuple[list[Any], Any]:
    """Ranks 0 and 1 balance; rank 2 only takes part in a collective of the job's own."""
    group = dist.new_group([0, 1])
    state: Any = None
    if rank < 2:
        batches = [{"id": torch.arange(4) + 10 * rank}] * 3
        loader = BalancedLoader(batches, Balancer.embedded(process_group=group), cost=lambda batch: batch["id"] + 1)
        for _ in loader:
            state = JobState(loader).state_dict()
    told: list[Any] = [None] * 3
    dist.all_gather_object(told, f"rank {rank}")
    return told, state


def test_ranks_that_do_not_balance_need_not_save_its_state() -> None:
    (first, state), (second, same), (third, nothing) = run_ranks(3, with_a_helper)
    assert first == second == third == ["rank 0", "rank 1", "rank 2"]
    assert state == same
    assert [one["rank"] for one in pickle.loads(state["ranks"])] == [0, 1]
    assert nothing is None


def test_what_is_no_state_of_a_job_is_refused() -> None:
    loader = make_loader()
    JobState(loader).load_state_dict({})  # as a checkpoint without one
    with pytest.raises(ResumeError, match=r"has the fields \['batches'.* and not 'ranks'; load what JobState"):
        JobState(loader).load_state_dict(loader.state_dict())


class FallenError(RuntimeError):
    """Raised in a training step."""


def in_lightning(_: int, folder: str, length: int | None, when: str) -> list[tuple[str, bool, bool]]:
    """Each checkpoint of a run: whether training goes on from it with the same samples, and with the same counts."""
    from lightning import pytorch
    from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    seen: list[tuple[int, int, list[int]]] = []
    falls_at = 0

    class Module(pytorch.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.dense = nn.Linear(1, 1)

        def training_step(self, balanced: Any, number: int) -> torch.Tensor:
            if len(seen) + 1 == falls_at:
                raise FallenError
            seen.append((self.trainer.current_epoch, number, balanced.batch.tolist()))
            return self.dense(balanced.batch.float()[:, None]).sum() * balanced.loss_scale

        def validation_step(self, batch: Any, _: int) -> None:
            assert len(batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 1e-3)

    class Data(pytorch.LightningDataModule):
        def train_dataloader(self) -> LightningLoader[torch.Tensor]:
            assert self.trainer is not None
            return LightningLoader(make_loader(), self.trainer, length=length)

        def val_dataloader(self) -> BalancedLoader[torch.Tensor]:
            data = DataLoader(range(4), batch_size=2)  # type: ignore[arg-type]
            return BalancedLoader(data, Balancer.embedded(), cost=lambda batch: torch.ones(len(batch)), name="eval")

    def fit(callbacks: list[Any], checkpoint: str | None = None) -> None:
        pytorch.Trainer(
            max_epochs=EPOCHS, callbacks=callbacks, accelerator="cpu", logger=False, enable_progress_bar=False,
            enable_model_summary=False, enable_checkpointing=bool(callbacks),
        ).fit(Module(), datamodule=Data(), ckpt_path=checkpoint, weights_only=False)  # fmt: skip

    fit([])
    whole = list(seen)
    assert len(whole) == EPOCHS * STEPS
    assert all(sorted(sample for _, _, ids in whole[at : at + STEPS] for sample in ids) == list(range(SAMPLES))
               for at in range(0, len(whole), STEPS))  # fmt: skip
    seen.clear()
    name = {"dirpath": folder, "filename": "{step:02}"}
    every = {"save_top_k": -1, **name}
    falls_at = 7 if when == "exception" else 0
    saving = {
        "step": lambda: ModelCheckpoint(every_n_train_steps=1, **every),
        "epoch": lambda: ModelCheckpoint(save_on_train_epoch_end=True, **every),
        "validation": lambda: ModelCheckpoint(save_on_train_epoch_end=False, **every),
        "exception": lambda: OnExceptionCheckpoint(folder, "step=06"),
    }[when]
    try:
        fit([saving()])
    except FallenError:
        assert falls_at
    falls_at = 0
    found = []
    for path in sorted(Path(folder).glob("*.ckpt")):
        step = int(path.stem[5:])
        seen.clear()
        fit([], str(path))
        same = [ids for _, _, ids in seen] == [ids for _, _, ids in whole[step:]]
        found.append((path.stem, same, seen == whole[step:]))
    return found


@pytest.mark.parametrize("length", [STEPS, None])
@pytest.mark.parametrize("when", ["step", "epoch", "validation", "exception"])
def test_lightning_goes_on_from_each_of_its_checkpoints(tmp_path: Path, length: int | None, when: str) -> None:
    (found,) = run_ranks(1, in_lightning, str(tmp_path), length, when)
    number = {"step": EPOCHS * STEPS, "exception": 1}.get(when, EPOCHS)
    assert len(found) == number
    assert [name for name, samples, _ in found if not samples] == []
    # Lightning itself: without a length, batches are counted on after a checkpoint of an epoch's last step
    counted_on = ["step=04", "step=08"] if length is None and when == "step" else []
    assert [name for name, _, counts in found if not counts] == counted_on


def with_length(_: int, length: int) -> str:
    from lightning import pytorch

    class Module(pytorch.LightningModule):
        def training_step(self, balanced: Any, _: int) -> torch.Tensor:
            return torch.ones(1, requires_grad=True).sum() * balanced.loss_scale

        def configure_optimizers(self) -> None:
            return None

    trainer = pytorch.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    try:
        trainer.fit(Module(), LightningLoader(make_loader(), trainer, length=length))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("length", "found"), [(3, "has more than 3"), (5, "has ended after 4"), (4, "")])
def test_a_wrong_length_is_refused(length: int, found: str) -> None:
    (said,) = run_ranks(1, with_length, length)
    assert said == (found and f"length is {length}, but the epoch {found} batches; give LightningLoader the number of "
                    "batches that all ranks have, or no length")  # fmt: skip
