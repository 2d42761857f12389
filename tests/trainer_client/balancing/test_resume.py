"""Stopping after any batch and going on, on real ranks: what comes is what would have come."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from benchmarks.harness.balancer_process import ServiceProcess, running_balancer
from benchmarks.harness.ranks import run_ranks
from tests.trainer_client.balancing.jobs import SPEC, Job, cost_of
from trainer_client import BalancedLoader, BalanceOptions, Balancer
from trainer_client.balancing.sampling import GlobalBatchSampler


@dataclass(slots=True)
class Counting:
    """A loader that can only be read from its beginning."""

    job: Job
    rank: int

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return self.job.batches(self.rank)


@dataclass(slots=True)
class Stateful(Counting):
    """A loader with a state of its own, which it goes on changing, as torchdata's."""

    read: int = 0
    held: dict[str, Any] = field(default_factory=lambda: {"read": 0, "finished": False})

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        if self.held["finished"]:
            self.held["read"] = 0
        self.held["finished"] = False
        batches = list(self.job.batches(self.rank))
        while self.held["read"] < len(batches):
            self.held["read"] += 1
            yield batches[self.held["read"] - 1]
        self.held["finished"] = True
        self.held["read"] = 0

    def state_dict(self) -> dict[str, Any]:
        return self.held

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.held = dict(state)


LOADERS = {"skip": Counting, "loader": Stateful}


def trained(batch: dict[str, torch.Tensor], loader: BalancedLoader[Any]) -> tuple[list[int], float, float]:
    """What a model would see of a step, in the order in which it would see it."""
    return batch["id"].tolist(), float(cost_of(batch).sum()), loader.loss_scale


def stop_everywhere(rank: int, job: Job, way: str, **options: Any) -> None:
    """Takes a state after every batch, goes on from each, and compares with the run that was not stopped."""
    with job.balancer() as balancer:

        def make() -> BalancedLoader[Any]:
            return BalancedLoader(LOADERS[way](job, rank), balancer, cost=cost_of, spec=SPEC, **options)

        loader = make()
        states, steps = [loader.state_dict()], []
        for batch in loader:
            steps.append(trained(batch, loader))
            states.append(loader.state_dict())
            assert loader.state_dict(ahead=1) == states[-2] or len(states) == 2
        assert not states[-1]["finished"]
        states.append(loader.state_dict())
        assert states[-1]["finished"]
        assert len(steps) >= max(job.steps)
        for number, state in enumerate(states):
            again = make()
            again.load_state_dict(pickle.loads(pickle.dumps(state)))
            assert again.state_dict() == state
            rest, its_states = [], []
            for batch in again:
                rest.append(trained(batch, again))
                its_states.append(again.state_dict())
            expected = steps if number == len(states) - 1 else steps[number:]
            assert rest == expected, (number, rest, expected)
            assert number == len(states) - 1 or its_states == states[number + 1 : -1]
            if number % 4 == 0:  # and the next epoch is a whole one
                assert [trained(batch, again) for batch in again] == steps


@pytest.fixture(scope="module")
def balancer() -> Iterator[ServiceProcess]:
    with running_balancer() as process:
        yield process


def options(**changes: Any) -> BalanceOptions:
    return BalanceOptions(**{"timeout": timedelta(seconds=20), **changes})


@pytest.mark.parametrize("way", LOADERS)
@pytest.mark.parametrize("window", [1, 3])
def test_what_comes_after_any_batch_is_what_would_have_come(way: str, window: int) -> None:
    run_ranks(3, stop_everywhere, Job(steps=(7, 5, 8), options=options(window=window)), way)


def test_it_is_the_same_with_a_service(balancer: ServiceProcess) -> None:
    job = Job(steps=(5, 7), batch_size=5, address=balancer.address, name="resume", options=options(window=2, depth=3))
    run_ranks(2, stop_everywhere, job, "loader")


def test_set_epoch_and_a_loaded_state() -> None:
    """One rank, with the project's sampler: a state of each step, each way in which a loop may go on from it."""
    states = []

    def make() -> BalancedLoader[Any]:
        sampler = GlobalBatchSampler(20, global_batch_size=6, seed=3)
        source = DataLoader(range(20), batch_sampler=sampler)  # type: ignore[arg-type]
        return BalancedLoader(source, Balancer.embedded(), cost=lambda batch: torch.ones(len(batch)))

    def train(loader: BalancedLoader[Any], epoch: int) -> list[list[int]]:
        loader.set_epoch(epoch)
        steps = []
        for batch in loader:
            steps.append(batch.tolist())
            states.append((epoch, len(steps), loader.state_dict()))
        return steps

    loader = make()
    epochs = [train(loader, epoch) for epoch in range(3)]
    assert sorted(sample for step in epochs[1] for sample in step) == list(range(20))
    assert epochs[1] != epochs[0]
    assert len(states) == 12
    for epoch, step, state in list(states):
        for named in (True, False):  # the loop may name the state's epoch, or not
            again = make()
            again.load_state_dict(state)
            rest = train(again, epoch) if named else [batch.tolist() for batch in again]
            assert rest == epochs[epoch][step:], (epoch, step, named)
            assert train(again, (epoch + 1) % 3) == epochs[(epoch + 1) % 3]
        other = make()
        other.load_state_dict(state)
        assert train(other, (epoch + 2) % 3) == epochs[(epoch + 2) % 3]
