"""A balanced loader, its sampler and what it wraps in the hands of real frameworks: it works, or says what does."""

from __future__ import annotations

import logging
import os
import pickle
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.utils.data import DataLoader
from trainer_client.balancing.frameworks import FrameworkError

from benchmarks.harness.ranks import run_ranks
from trainer_client import BalancedLoader, Balancer
from trainer_client.balancing.sampling import GlobalBatchSampler, TokenBudgetSampler
from trainer_client.balancing.trainers import JobState

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


def said(what: Callable[[], Any]) -> str:
    try:
        what()
    except FrameworkError as error:
        return str(error)
    return "nothing"


def in_accelerate(rank: int, world_size: int, folder: str) -> dict[str, str]:
    """What comes of each thing that Accelerate can do to a loader."""
    own = accelerator(rank, world_size, even_batches=False)
    found = {"inner": said(lambda: list(own.prepare(plain())))}
    loader = balanced(plain())
    assert own.prepare(loader) is loader
    found["prepare_data_loader"] = said(lambda: own.prepare_data_loader(loader))
    found["skip_first_batches"] = said(lambda: own.skip_first_batches(loader, 2))
    found["skip_first_batches of the wrapped"] = said(lambda: own.skip_first_batches(loader.loader, 2))
    assert len(loader) == len(list(loader)) == 6  # also where this rank has five
    own.register_for_checkpointing(loader)
    found["save_state"] = said(lambda: own.save_state(f"{folder}/bare"))
    own._custom_objects.clear()
    own.register_for_checkpointing(JobState(loader))
    own.save_state(f"{folder}/job")
    own.load_state(f"{folder}/job")
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_accelerate_hands_the_loader_back_and_is_told_what_it_would_do_wrong(world_size: int, tmp_path: Path) -> None:
    found, *others = run_ranks(world_size, in_accelerate, world_size, str(tmp_path))
    assert others == [found] * (world_size - 1)
    several = world_size > 1
    assert found == {
        "inner": re_said("what GlobalBatchSampler has divided already.*do not `prepare` the DataLoader", several),
        "prepare_data_loader": re_said("a plain DataLoader of a BalancedLoader's data.*`prepare`", True),
        "skip_first_batches": re_said("instead of `skip_first_batches` load a state with JobState", True),
        "skip_first_batches of the wrapped": "nothing",
        "save_state": re_said(r"accelerate keeps the state of one rank for all.*JobState\(loader\)", several),
    }


class re_said(str):  # noqa: N801 - compares as what is said
    """Equal to what matches; or to nothing where nothing is to be said."""

    def __new__(cls, words: str, is_said: bool) -> re_said:
        return super().__new__(cls, words if is_said else "nothing")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and re.search(str(self), other) is not None

    __hash__ = str.__hash__


def wrapping_prepared(rank: int, world_size: int, stateful: bool) -> list[int]:
    """Goes on from each state of a loop over a loader that Accelerate has prepared; returns what the loop trained."""
    own = accelerator(
        rank, world_size, even_batches=False, use_stateful_dataloader=stateful, use_seedable_sampler=True, data_seed=5
    )

    def make() -> BalancedLoader[torch.Tensor]:
        data = DataLoader(range(SAMPLES), batch_size=2, shuffle=True)  # type: ignore[arg-type]
        loader = balanced(own.prepare(data))
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
        def __init__(self) -> None:
            super().__init__()
            self.dense = torch.nn.Linear(1, 1)

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return self.dense(batch.float()[:, None]).sum()

        def validation_step(self, batch: Any, _: int) -> None:
            seen.extend(batch.tolist())

        test_step = predict_step = validation_step

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 1e-3)

    trainer = pytorch.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False,
        enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    found: dict[str, Any] = {"fit": said(lambda: trainer.fit(Module(), balanced(plain())))}
    for name in ("validate", "test", "predict"):
        getattr(trainer, name)(Module(), balanced(plain(), name=name))
        found[name] = sorted(seen)
        seen.clear()
    with pytest.raises(TypeError, match="Only PyTorch DataLoader are currently supported"):
        Fabric(accelerator="cpu").setup_dataloaders(balanced(plain()))
    return found


def test_lightning_trains_with_its_own_wrapping_only_and_evaluates_with_the_loader() -> None:
    (found,) = run_ranks(1, in_lightning)
    assert re.search(r"every epoch the same order.*give it .*LightningLoader\(loader, trainer\)", found.pop("fit"))
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


def test_distributed_checkpoint_is_told_of_the_state_of_the_job(tmp_path: Path) -> None:
    loader = balanced(plain())
    for where in ("save", "load"):
        with pytest.raises(FrameworkError, match=r"keeps one value for all ranks.*JobState\(loader\)"):
            getattr(dcp, where)({"loader": loader}, checkpoint_id=tmp_path)
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
