"""TorchRec's pipelines on real Gloo ranks: what they hold, train and move, and how they end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from tests.trainer_client.balancing.jobs import failing, run_in_turn
from tests.trainer_client.balancing.pipelines.held_checks import STEPS as HELD_STEPS
from tests.trainer_client.balancing.pipelines.held_checks import check, make_loader, pipelines
from trainer_client.balancing import BalancedLoader, Balancer
from trainer_client.balancing.pipelines import BalancedBatch, PipelineSteps, balanced_batches, make_pipeline


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@dataclass(frozen=True, slots=True)
class Plain:
    """A dataclass without `to`."""

    pair: Pair


def test_a_batch_moves_with_all_it_holds() -> None:
    batch: Any = {
        "x": torch.arange(3),
        "y": [torch.ones(3)],
        "plain": Plain(Pair(torch.ones(3), torch.ones(3))),
        "default": defaultdict(list, x=torch.ones(3)),
    }
    loader = BalancedLoader([batch], Balancer.off(), cost=lambda _: torch.ones(3))
    (only,) = balanced_batches(loader)
    assert isinstance(only, BalancedBatch)
    assert only.mean_loss_scale == pytest.approx(1.0)
    moved = only.to("meta")
    assert moved.batch["x"].is_meta
    assert moved.batch["y"][0].is_meta
    assert moved.batch["plain"].pair.second.is_meta
    assert moved.batch["default"]["x"].is_meta
    assert moved.batch["default"]["new"] == []
    assert only.batch["x"].device.type == only.batch["plain"].pair.first.device.type == "cpu"
    assert moved.loss_scale == only.loss_scale


CPU = torch.device("cpu")


def all_of_them(_: int) -> list[str]:
    with Balancer.embedded() as balancer:
        for name, held in pipelines(CPU):
            check(name, held, CPU, balancer)
    return [name for name, _ in pipelines(CPU)]


@pytest.fixture(scope="module")
def by_job() -> list[list[Any]]:
    return run_in_turn(2, (all_of_them,), (fails_on_one, "base"), (fails_on_one, "sparse_dist"))


def test_what_torchrecs_pipelines_hold_is_counted(by_job: list[list[Any]]) -> None:
    assert [len(names) for names in by_job[0]] == [7] * 2


class Staged:
    """As TorchRec's `StagedTrainPipeline`, which needs a GPU: fills up once, and returns None at its end, for ever."""

    num_stages = 2

    def __init__(self) -> None:
        self._held: list[Any] = []

    def progress(self, batches: Iterator[Any]) -> Any:
        while len(self._held) < self.num_stages:
            self._held.append(next(batches, None))
        self._held.append(next(batches, None))
        return self._held.pop(0)


class Once:
    """Never begins with another iterator."""

    def __init__(self) -> None:
        self._ended = False

    def progress(self, batches: Iterator[Any]) -> Any:
        batch = None if self._ended else next(batches, None)
        self._ended = batch is None
        if self._ended:
            raise StopIteration
        return batch


def test_a_pipeline_that_returns_nothing_at_its_end() -> None:
    steps = PipelineSteps(Staged(), make_loader(CPU, Balancer.embedded()))
    held = []
    for _ in steps:
        held.append(steps.ahead())
        assert len(held) <= HELD_STEPS
    assert held == [2, 2, 2, 1, 0]
    for _ in steps:
        break  # what it holds is not trained in the next loop
    whole = [batch.batch.tolist() for batch in steps]  # having given None while it filled up again
    assert whole == [batch.tolist() for batch in make_loader(CPU, Balancer.embedded())]


def test_a_pipeline_that_takes_no_second_iterator_is_refused() -> None:
    steps = PipelineSteps(Once(), make_loader(CPU, Balancer.embedded()))
    assert len(list(steps)) == HELD_STEPS
    with pytest.raises(RuntimeError, match=r"Once has ended without asking for a batch.*make a pipeline for each loop"):
        list(steps)


class Meeting(torch.nn.Module):
    """Ranks meet in each step, as in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, _: Any) -> tuple[torch.Tensor, torch.Tensor]:
        met = torch.ones(1)
        dist.all_reduce(met)
        return self.weight.sum(), met


def fails_on_one(rank: int, name: str) -> tuple[list[float], str]:
    model, met = Meeting(), []
    batches: Any = [torch.arange(4) + 10 * step for step in range(8)]
    with Balancer.embedded() as balancer:
        data = failing(batches, 5) if rank else batches
        loader = BalancedLoader(data, balancer, cost=torch.ones_like)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            for output in PipelineSteps(make_pipeline(name, model, optimizer, CPU), loader):
                met.append(float(output))
        except OSError as error:
            return met, str(error)
    return met, ""


def test_pipelines_train_what_they_hold_before_an_error_of_the_data_is_raised(by_job: list[list[Any]]) -> None:
    assert by_job[1:] == [[([2.0] * 5, ""), ([2.0] * 5, "the disk is gone")]] * 2
