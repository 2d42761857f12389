"""A balanced loader, its sampler and what it wraps in the hands of real frameworks."""

from __future__ import annotations

import logging
import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.utils.data import DataLoader

from benchmarks.harness.ranks import run_ranks
from trainer_client import BalancedLoader, Balancer
from trainer_client.balancing.adapters.job_state import JobState
from trainer_client.balancing.sampling import GlobalBatchSampler, TokenBudgetSampler

SAMPLES = 21


def plain(size: int = 4) -> DataLoader[int]:
    sampler = GlobalBatchSampler(SAMPLES, global_batch_size=size, shuffle=False)
    return DataLoader(range(SAMPLES), batch_sampler=sampler)  # type: ignore[arg-type]


def balanced(loader: Any, balancer: Balancer | None = None, **options: Any) -> BalancedLoader[torch.Tensor]:
    return BalancedLoader(loader, balancer or Balancer.embedded(), cost=lambda batch: torch.ones(len(batch)), **options)


def launched(rank: int, world_size: int) -> None:
    """What a launcher tells the frameworks; the process group is there already."""
    if world_size > 1:
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size),
            MASTER_ADDR="127.0.0.1", MASTER_PORT="1",
        )  # fmt: skip
    logging.getLogger("lightning").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")


def accelerator(rank: int, world_size: int, **options: Any) -> Any:
    from accelerate import Accelerator, DataLoaderConfiguration

    launched(rank, world_size)
    return Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))


def kept_by_accelerate(rank: int, world_size: int, folder: str) -> tuple[list[list[int]], list[list[int]]]:
    """What a loop would still train when it is saved, and what one trains that loads it."""
    own = accelerator(rank, world_size)
    loader = balanced(plain())
    assert own.prepare(loader) is loader
    assert len(loader) == 6  # also where this rank has five
    own.register_for_checkpointing(JobState(loader))
    rest = []
    for number, batch in enumerate(loader):
        if number == 2:
            own.save_state(folder)
        if number > 2:
            rest.append(batch.tolist())
    own.load_state(folder)
    return rest, [batch.tolist() for batch in loader]


@pytest.mark.parametrize("world_size", [1, 2])
def test_accelerate_keeps_and_loads_the_state_of_the_job(world_size: int, tmp_path: Path) -> None:
    for rest, again in run_ranks(world_size, kept_by_accelerate, world_size, str(tmp_path)):
        assert len(rest) == 3
        assert again == rest


def wrapping_prepared(rank: int, world_size: int, stateful: bool) -> list[int]:
    """Goes on from each state of a loop over a loader that Accelerate has prepared; returns what the loop trained."""
    own = accelerator(
        rank, world_size, even_batches=False, use_stateful_dataloader=stateful, use_seedable_sampler=True, data_seed=5
    )

    balancer = Balancer.embedded()

    def make() -> BalancedLoader[torch.Tensor]:
        data = DataLoader(range(SAMPLES), batch_size=2, shuffle=True)  # type: ignore[arg-type]
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


@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_loader_that_accelerate_has_prepared_can_be_wrapped(world_size: int, stateful: bool) -> None:
    trained = run_ranks(world_size, wrapping_prepared, world_size, stateful)
    assert sorted(one for rank in trained for one in rank) == list(range(SAMPLES))


def in_lightning(_: int) -> dict[str, Any]:
    from lightning import pytorch
    from lightning.fabric import Fabric

    launched(0, 1)
    seen: list[int] = []

    class Module(pytorch.LightningModule):
        def validation_step(self, batch: Any, _: int) -> None:
            seen.extend(batch.tolist())

        test_step = predict_step = validation_step

    trainer = pytorch.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False,
        enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    found: dict[str, Any] = {}
    for name in ("validate", "test", "predict"):
        getattr(trainer, name)(Module(), balanced(plain(), name=name))
        found[name] = sorted(seen)
        seen.clear()
    with pytest.raises(TypeError, match="Only PyTorch DataLoader are currently supported"):
        Fabric(accelerator="cpu").setup_dataloaders(balanced(plain()))
    return found


def test_lightning_evaluates_with_the_loader() -> None:
    (found,) = run_ranks(1, in_lightning)
    assert found == {name: list(range(SAMPLES)) for name in ("validate", "test", "predict")}


def evaluated(rank: int, world_size: int) -> list[int]:
    """Of a last batch that only some ranks have a sample of."""
    from lightning import pytorch

    launched(rank, world_size)
    seen: list[int] = []

    class Module(pytorch.LightningModule):
        def validation_step(self, batch: Any, _: int) -> None:
            seen.extend(batch.tolist())

    trainer = pytorch.Trainer(
        accelerator="cpu", strategy="ddp", devices=world_size, logger=False, enable_progress_bar=False
    )
    trainer.validate(Module(), balanced(plain()), verbose=False)
    return seen


def test_lightning_evaluates_each_sample_where_ranks_have_different_numbers_of_batches() -> None:
    seen = run_ranks(2, evaluated, 2)
    assert sorted(one for rank in seen for one in rank) == list(range(SAMPLES))


def test_distributed_checkpoint_keeps_and_loads_the_state_of_the_job(tmp_path: Path) -> None:
    loader = balanced(plain())
    for _, _ in zip(range(2), loader, strict=False):
        pass
    dcp.save({"loader": JobState(loader)}, checkpoint_id=tmp_path)
    again = balanced(plain())
    dcp.load({"loader": JobState(again)}, checkpoint_id=tmp_path)
    assert again.state_dict() == loader.state_dict()
    assert [batch.tolist() for batch in again] == [batch.tolist() for batch in plain()][2:]


@pytest.mark.parametrize("drop_last", [False, True])
def test_the_length_is_that_of_the_ranks_together(drop_last: bool) -> None:
    of_rank = {"rank": 1, "world_size": 2, "drop_last": drop_last, "shuffle": False}
    counted = GlobalBatchSampler(SAMPLES, global_batch_size=4, **of_rank)
    budgeted = TokenBudgetSampler(SAMPLES, budget=4, costs=torch.ones(SAMPLES, dtype=torch.int64), **of_rank)
    for sampler in (counted, budgeted):
        loader = balanced(DataLoader(range(SAMPLES), batch_sampler=sampler))  # type: ignore[arg-type]
        assert len(sampler) == 5
        assert len(loader) == 6 - drop_last
    assert len(balanced([torch.zeros(2)] * 3)) == 3
    many = TokenBudgetSampler(10**9, budget=4, costs=lambda _: 1, **of_rank)
    with pytest.raises(TypeError, match="`count_batches"):
        len(balanced(DataLoader(range(10**9), batch_sampler=many)))  # type: ignore[arg-type]
