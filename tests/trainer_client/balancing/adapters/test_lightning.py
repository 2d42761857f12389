"""Lightning and Accelerate: states of jobs, the same training after every checkpoint, every sample evaluated."""

import logging
import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.harness.ranks import run_ranks
from tests.trainer_client.balancing.jobs import run_in_turn
from trainer_client import BalancedLoader, Balancer
from trainer_client.balancing.adapters.job_state import JobState
from trainer_client.balancing.adapters.lightning import LightningLoader
from trainer_client.balancing.resume import ResumeError
from trainer_client.balancing.sampling import GlobalBatchSampler, TokenBudgetSampler

SAMPLES, STEPS, EPOCHS = 20, 4, 3


def make_loader() -> BalancedLoader[torch.Tensor]:
    sampler = GlobalBatchSampler(SAMPLES, global_batch_size=6, seed=3)
    data_loader = DataLoader(range(SAMPLES), batch_sampler=sampler)
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


def module(seen: list[Any], evaluated: list[int], falls: Callable[[], bool] = lambda: False) -> Any:
    """A model that notes epoch, number and samples of each batch that it trains, and the samples that it evaluates."""
    from lightning import pytorch

    class Module(pytorch.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.dense = nn.Linear(1, 1)

        def training_step(self, balanced: Any, number: int) -> torch.Tensor:
            if falls():
                raise FallenError
            seen.append((self.trainer.current_epoch, number, balanced.batch.tolist()))
            return self.dense(balanced.batch.float()[:, None]).sum() * balanced.loss_scale

        def validation_step(self, batch: Any, _: int) -> None:
            evaluated.extend(batch.tolist())

        test_step = predict_step = validation_step

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 1e-3)

    return Module()


def make_trainer(callbacks: list[Any] | None = None, **options: Any) -> Any:
    from lightning import pytorch

    logging.getLogger("lightning").setLevel(logging.ERROR)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    return pytorch.Trainer(
        callbacks=callbacks, enable_checkpointing=bool(callbacks), accelerator="cpu", logger=False,
        enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip


def in_lightning(_: int, folder: str, length: int | None, when: str) -> list[tuple[str, bool, bool]]:
    """Each checkpoint of a run: whether training goes on from it with the same samples, and with the same counts."""
    from lightning import pytorch
    from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

    seen: list[tuple[int, int, list[int]]] = []
    evaluated: list[int] = []
    falls_at = 0

    class Data(pytorch.LightningDataModule):
        def train_dataloader(self) -> LightningLoader[torch.Tensor]:
            assert self.trainer is not None
            return LightningLoader(make_loader(), self.trainer, length=length)

        def val_dataloader(self) -> BalancedLoader[torch.Tensor]:
            data = DataLoader(range(4), batch_size=2)
            return BalancedLoader(data, Balancer.embedded(), cost=lambda batch: torch.ones(len(batch)), name="eval")

    def fit(callbacks: list[Any], checkpoint: str | None = None) -> None:
        model = module(seen, evaluated, lambda: len(seen) + 1 == falls_at)
        trainer = make_trainer(callbacks, max_epochs=EPOCHS)
        trainer.fit(model, datamodule=Data(), ckpt_path=checkpoint, weights_only=False)

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


@pytest.mark.parametrize(
    ("when", "length"), [("step", None), ("epoch", None), ("validation", STEPS), ("exception", None)]
)
def test_lightning_goes_on_from_each_of_its_checkpoints(tmp_path: Path, length: int | None, when: str) -> None:
    (found,) = run_ranks(1, in_lightning, str(tmp_path), length, when)
    number = {"step": EPOCHS * STEPS, "exception": 1}.get(when, EPOCHS)
    assert len(found) == number
    assert [name for name, samples, _ in found if not samples] == []
    # Lightning itself: without a length, batches are counted on after a checkpoint of an epoch's last step
    counted_on = ["step=04", "step=08"] if length is None and when == "step" else []
    assert [name for name, _, counts in found if not counts] == counted_on


def with_length(_: int, length: int) -> str:
    trainer = make_trainer(max_epochs=1)
    try:
        trainer.fit(module([], []), LightningLoader(make_loader(), trainer, length=length))
    except ValueError as error:
        return str(error)
    return ""


def test_a_wrong_length_is_refused() -> None:
    (few,), (many,) = run_in_turn(1, (with_length, 3), (with_length, 5))
    assert few.startswith("length is 3, but the epoch has more than 3 batches")
    assert many.startswith("length is 5, but the epoch has ended after 4 batches")


OTHER_SAMPLES = 21


def plain(size: int = 4) -> DataLoader[int]:
    sampler = GlobalBatchSampler(OTHER_SAMPLES, global_batch_size=size, shuffle=False)
    return DataLoader(range(OTHER_SAMPLES), batch_sampler=sampler)


def balanced(loader: Any, balancer: Balancer | None = None, **options: Any) -> BalancedLoader[torch.Tensor]:
    return BalancedLoader(loader, balancer or Balancer.embedded(), cost=lambda batch: torch.ones(len(batch)), **options)


def launched(rank: int, world_size: int) -> None:
    """What a launcher tells the frameworks; the process group is there already."""
    if world_size > 1:
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size),
            MASTER_ADDR="127.0.0.1", MASTER_PORT="1",
        )  # fmt: skip


def accelerator(rank: int, world_size: int, **options: Any) -> Any:
    from accelerate import Accelerator, DataLoaderConfiguration

    launched(rank, world_size)
    return Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))


def wrapping_prepared(rank: int, world_size: int, stateful: bool) -> list[int]:
    """Goes on from each state of a loop over a loader that Accelerate has prepared; returns what the loop trained."""
    own = accelerator(
        rank, world_size, even_batches=False, use_stateful_dataloader=stateful, use_seedable_sampler=True, data_seed=5
    )

    balancer = Balancer.embedded()

    def make() -> BalancedLoader[torch.Tensor]:
        data = DataLoader(range(OTHER_SAMPLES), batch_size=2, shuffle=True)
        loader = balanced(own.prepare(data), balancer)
        loader.set_epoch(3)
        return loader

    whole, states = [], []
    for batch in (loader := make()):
        whole.append(batch.tolist())
        states.append(pickle.dumps(loader.state_dict()))
    for number, state in enumerate(states, 1):
        again = make()
        again.load_state_dict(pickle.loads(state))
        assert [batch.tolist() for batch in again] == whole[number:]
        if number % 3 == 0:
            again.set_epoch(3)
            assert [batch.tolist() for batch in again] == whole
    return [one for batch in whole for one in batch]


@pytest.mark.parametrize(("world_size", "stateful"), [(2, False), (2, True)])
def test_a_loader_that_accelerate_has_prepared_can_be_wrapped(world_size: int, stateful: bool) -> None:
    trained = run_ranks(world_size, wrapping_prepared, world_size, stateful)
    assert sorted(one for rank in trained for one in rank) == list(range(OTHER_SAMPLES))


def evaluate(rank: int, world_size: int) -> dict[str, list[int]]:
    """Of a last batch that only some ranks have a sample of."""
    launched(rank, world_size)
    trainer, found = make_trainer(strategy="ddp", devices=world_size), {}
    for name in ("validate", "test", "predict"):
        seen: list[int] = []
        getattr(trainer, name)(module([], seen), balanced(plain(), name=name))
        found[name] = seen
    return found


def test_lightning_evaluates_each_sample_where_ranks_have_different_numbers_of_batches() -> None:
    seen = run_ranks(2, evaluate, 2)
    for name in seen[0]:
        assert sorted(one for rank in seen for one in rank[name]) == list(range(OTHER_SAMPLES)), name


@pytest.mark.parametrize("drop_last", [False, True])
def test_the_length_is_that_of_the_ranks_together(drop_last: bool) -> None:
    of_rank = {"rank": 1, "world_size": 2, "drop_last": drop_last, "shuffle": False}
    counted = GlobalBatchSampler(OTHER_SAMPLES, global_batch_size=4, **of_rank)
    budgeted = TokenBudgetSampler(
        OTHER_SAMPLES, budget=4, costs=torch.ones(OTHER_SAMPLES, dtype=torch.int64), **of_rank
    )
    for sampler in (counted, budgeted):
        loader = balanced(DataLoader(range(OTHER_SAMPLES), batch_sampler=sampler))
        assert len(sampler) == 5
        assert len(loader) == 6 - drop_last
    assert len(balanced([torch.zeros(2)] * 3)) == 3
    many = TokenBudgetSampler(10**9, budget=4, costs=lambda _: 1, **of_rank)
    with pytest.raises(TypeError, match="`count_batches"):
        len(balanced(DataLoader(range(10**9), batch_sampler=many)))
