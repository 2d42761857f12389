"""Stopping after any batch and going on, on real ranks: what comes is what would have come."""

import json
import pickle
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import chain
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.harness.ranks import run_ranks
from tests.trainer_client.balancing.jobs import SPEC, Job, JobData, cost_of, run_in_turn
from trainer_client import BalancedLoader, BalanceOptions, Balancer, SplitOptions, TokenCost
from trainer_client.balancing.resume import ResumeError
from trainer_client.balancing.sampling import GlobalBatchSampler, TokenBudgetSampler


@dataclass(slots=True)
class Stateful(JobData):
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


class Numbers(Dataset[int]):
    """A map-style data set whose samples are their indexes."""

    def __len__(self) -> int:
        return 101

    def __getitem__(self, index: int) -> int:
        return index


def gather(indexes: list[int]) -> dict[str, torch.Tensor]:
    ids = torch.tensor(indexes)
    counts = ids * 37 % 19 + (ids % 10 == 0) * 200
    return {"id": ids, "count": counts, "values": ids.repeat_interleave(counts)}


def sampled(job: Job, rank: int) -> DataLoader[Any]:
    """A loader over a sampler of the whole job; its last global batch has nothing for the last rank."""
    del job, rank
    sampler = GlobalBatchSampler(Numbers(), global_batch_size=10, seed=1)
    return DataLoader(Numbers(), batch_sampler=sampler, collate_fn=gather)


LOADERS: dict[str, Any] = {"skip": JobData, "loader": Stateful, "sampler": sampled}


def trained(batch: dict[str, torch.Tensor], loader: BalancedLoader[Any]) -> tuple[Any, ...]:
    """What a model would see of a step, in the order in which it would see it."""
    return batch["id"].tolist(), batch["values"].tolist(), loader.loss_scale, loader.splits


def stop_everywhere(rank: int, job: Job, way: str) -> None:
    """Takes a state after every batch, goes on from each, and compares with the run that was not stopped."""
    with job.balancer() as balancer:
        splits = job.options.split is not None
        cost: Any = TokenCost(tokens="count") if splits else cost_of
        spec = replace(SPEC, sequence={"values"}) if splits else SPEC

        def make() -> BalancedLoader[Any]:
            return BalancedLoader(LOADERS[way](job, rank), balancer, cost=cost, spec=spec)

        loader = make()
        states, steps = [loader.state_dict()], []
        written = [json.dumps(states[0])]
        for batch in loader:
            steps.append(trained(batch, loader))
            states.append(loader.state_dict())
            written.append(json.dumps(states[-1]))
            for ahead in range(len(states) - 1):  # batches that a pipeline holds
                assert loader.state_dict(ahead=ahead) == states[-1 - ahead]
        assert not states[-1]["finished"]
        assert [json.dumps(state) for state in states] == written  # later steps have changed none
        states.append(loader.state_dict())
        assert states[-1]["finished"]
        assert loader.state_dict(ahead=1) == states[-3]
        with pytest.raises(ValueError, match="ahead is 65; use 0 to 64"):
            loader.state_dict(ahead=65)
        assert len(steps) >= (11 if way == "sampler" else max(job.steps))
        assert any(of_step[-1] for of_step in steps) == splits
        for number, state in enumerate(states):
            again = make()
            copied = json.loads(json.dumps(state)) if number % 2 else pickle.loads(pickle.dumps(state))
            again.load_state_dict(copied)
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


def options(**changes: Any) -> BalanceOptions:
    return BalanceOptions(**{"timeout": timedelta(seconds=20), **changes})


def test_what_comes_after_any_batch_is_what_would_have_come() -> None:
    jobs = [Job(steps=(5, 3, 7), options=options(window=window)) for window in (1, 3)]
    ways: list[tuple[Any, ...]] = [(stop_everywhere, job, way) for job in jobs for way in LOADERS]
    split = options(window=3, split=SplitOptions(above=0.02))
    ways.append((stop_everywhere, Job(steps=(5, 3, 7), batch_size=2, options=split), "skip"))
    run_in_turn(3, *ways)


@pytest.mark.parametrize("way", LOADERS)
def test_a_state_holds_for_its_epoch_once(way: str) -> None:
    """One rank: a state of each step, and each way in which a loop may go on from it."""
    states: list[tuple[int, int, Any]] = []

    def make(state: Any = None) -> BalancedLoader[Any]:
        loader = BalancedLoader(LOADERS[way](Job(steps=(4,)), 0), Balancer.embedded(), cost=cost_of, spec=SPEC)
        if state is not None:
            loader.load_state_dict(state)
        return loader

    def train(loader: BalancedLoader[Any], epoch: int | None) -> list[list[int]]:
        if epoch is not None:
            loader.set_epoch(epoch)
        steps = []
        for batch in loader:
            steps.append(batch["id"].tolist())
            if loader is first:
                states.append((epoch or 0, len(steps), loader.state_dict()))
        return steps

    first = make()
    epochs = [train(first, epoch) for epoch in range(3)]
    assert (epochs[0] == epochs[1]) == (way != "sampler")
    assert len({tuple(sorted(chain(*steps))) for steps in epochs}) == 1
    for epoch, step, state in list(states):
        for named in (epoch, None):  # the loop may name the state's epoch, or not
            again = make(state)
            assert train(again, named) == epochs[epoch][step:]
            assert train(again, (epoch + 1) % 3) == epochs[(epoch + 1) % 3]
        other = (epoch + 2) % 3
        assert train(make(state), other) == epochs[other]
    over = first.state_dict()  # behind the end of epoch 2, as a pipeline's last steps have it
    assert over["finished"]
    for epoch, expected in ((2, []), (1, epochs[1])):
        again = make(over)
        assert train(again, epoch) == expected, "an epoch that is over is not trained again under its name"
        assert len(train(make(over), None)) == len(epochs[0])
        assert train(again, 0) == epochs[0]


def refused(rank: int, job: Job, fault: str) -> str:
    """Stops after four batches, and goes on with states that do not fit; says what came of it on this rank."""
    with job.balancer() as balancer:

        def make(**changes: Any) -> BalancedLoader[Any]:
            return BalancedLoader(JobData(replace(job, **changes), rank), balancer, cost=cost_of, spec=SPEC)

        loader = make()
        states: dict[tuple[int, int], dict[str, Any]] = {}
        for epoch in range(2):
            loader.set_epoch(epoch)
            for number, _ in enumerate(loader, 1):
                states[epoch, number] = loader.state_dict()
            states[epoch, 0] = loader.state_dict()  # when it is over
        again = make(**({"batch_size": 7} if fault == "data" and rank == 1 else {}))
        first, other = {
            "older": ((0, 4), (0, 3)),
            "newer": ((0, 4), (0, 5)),
            "epoch": ((0, 4), (1, 4)),
            "over": ((1, 0), (0, 0)),
            "not over": ((0, 0), (0, 6)),
        }.get(fault, ((0, 4), (0, 4)))
        if not (rank == 1 and fault == "missing"):
            again.load_state_dict(states[other if rank else first])
        try:
            for _ in again:
                pass
        except ResumeError as error:
            return str(error)
    return "trained"


FAULTS = [
    ("older", 1, "rank 0: 4 batches trained in this epoch.*rank 1: 3 batches trained"),
    ("newer", 3, "rank 0: 4 batches trained in this epoch.*rank 1: 5 batches trained"),
    ("epoch", 1, "rank 0: epoch 0; rank 1: epoch 1; load the states of one checkpoint"),
    ("over", 1, "rank 0: epoch 1; rank 1: epoch 0; load the states of one checkpoint"),
    ("not over", 3, "rank 0: the epoch was over; rank 1: "),
    ("missing", 1, "rank 0: 4 batches trained in this epoch.*rank 1: no state was loaded"),
    ("data", 1, "rank 1 cannot go on.*batch 3 of the loader is not the one"),
    ("data", 3, r"rank 1 cannot go on.*"),
]


def test_all_ranks_hear_of_states_that_do_not_fit() -> None:
    jobs = [(refused, Job(steps=(6, 6), options=options(window=window)), fault) for fault, window, _ in FAULTS]
    for (fault, window, words), told in zip(FAULTS, run_in_turn(2, *jobs), strict=True):
        assert told[0] == told[1]
        assert re.search(words, told[0]), (fault, window, told[0])


def alone(window: int = 1, **changes: Any) -> BalancedLoader[Any]:
    job = Job(steps=(6,), options=options(window=window))
    return BalancedLoader(JobData(job, 0), Balancer.embedded(options=job.options), cost=cost_of, spec=SPEC, **changes)


def state_after(batches: int, *, window: int = 1) -> dict[str, Any]:
    loader = alone(window)
    for _, _ in zip(range(batches), loader, strict=False):
        pass
    return loader.state_dict()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 7}, r"state\['version'\] is 7, and this release reads 2"),
        ({"name": "eval"}, r"state\['name'\] is 'eval', and this loader is 'train'"),
        ({"world_size": 3}, r"state\['world_size'\] is 3, and this job has 1; load the states of all 3 ranks"),
        ({"rank": 2, "world_size": 1}, r"state\['rank'\] is 2, and this is rank 0"),
        ({"source": {"way": "guess", "at": 3}}, "state is damaged.*source"),
        ({"batches": None}, "state is damaged"),
    ],
)
def test_a_state_that_cannot_be_read_is_refused_by_field_and_value(change: dict[str, Any], words: str) -> None:
    state = state_after(4)
    with pytest.raises(ResumeError, match=words):
        alone().load_state_dict({**state, **change})
    for nothing in ([], None, "state"):
        with pytest.raises((ResumeError, TypeError)):
            alone().load_state_dict(nothing)


@pytest.mark.parametrize("change", [{"done": 0}, {"done": 3}, {"size": 1}, {"size": "?"}, {"speeds": None}])
def test_a_damaged_window_is_refused_before_anything_is_read(change: dict[str, Any]) -> None:
    state = state_after(4, window=3)
    assert (state["window"]["size"], state["window"]["done"]) == (3, 1)
    with pytest.raises(ResumeError, match="state is damaged"):
        alone(3).load_state_dict({**state, "window": {**state["window"], **change}})


def test_within_a_window_the_window_stays_as_it_was() -> None:
    state = state_after(4, window=3)
    loader = alone(2)
    loader.load_state_dict(state)
    with pytest.raises(ResumeError, match=r"within a window of 3 batches, and this job has window=2; go on with"):
        list(loader)
    loader = alone(3)
    loader.load_state_dict(state)
    assert len(list(loader)) == 2
    loader = alone(2)
    loader.load_state_dict(state_after(3, window=3))  # between two windows any will do
    assert len(list(loader)) == 3


class Shuffled(DataLoader[Any]):
    """Draws its order from torch's own generator."""

    def __init__(self, job: Job, rank: int) -> None:
        del job, rank
        super().__init__(Numbers(), batch_size=4, shuffle=True, collate_fn=gather)


OTHER_DATA = [
    (JobData, 6, Stateful, 6, r"is 'skip', and this loader's position is found by 'loader'"),
    (JobData, 6, JobData, 3, "the loader ended after 3 batches, and the state was taken after 5"),
    (Shuffled, 0, Shuffled, 0, "batches come in another order"),
]


@pytest.mark.parametrize(("kind", "steps", "other", "others", "words"), OTHER_DATA)
def test_data_that_have_changed_are_refused(
    kind: Any, steps: int, other: Any, others: int, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    first, again = (
        BalancedLoader(data(Job(steps=(count,)), 0), Balancer.embedded(), cost=cost_of, spec=SPEC)
        for data, count in ((kind, steps), (other, others))
    )
    for _ in zip(range(5), first, strict=False):
        pass
    again.load_state_dict(first.state_dict())
    with pytest.raises(ResumeError, match=words):
        list(again)
    assert ("draws its order from torch's own generator" in caplog.text) == (kind is Shuffled)


class Way(NamedTuple):
    """How a job goes on."""

    window: int = 4
    budget: bool = False  # whether global batches have a budget, not a size
    workers: int = 0  # which read ahead

    def data(self) -> DataLoader[Any]:
        sampler: Any = GlobalBatchSampler(Numbers(), global_batch_size=11, seed=5)
        if self.budget:
            sampler = TokenBudgetSampler(Numbers(), budget=400, costs=COUNTS, min_samples=4, max_samples=12, seed=5)
        ahead = {"persistent_workers": True, "prefetch_factor": 3, "multiprocessing_context": "fork"}
        return DataLoader(
            Numbers(), batch_sampler=sampler, collate_fn=gather, num_workers=self.workers,
            **(ahead if self.workers else {}),
        )  # fmt: skip


COUNTS = gather(list(range(101)))["count"].numpy()


def go_on(
    rank: int, way: Way, stop: int, states: list[dict[str, Any]] | None
) -> tuple[list[list[int]], dict[str, Any]]:
    """Trains up to `stop` batches of an epoch, from a state if there is one; what was trained, and the state then."""
    with Balancer.embedded(options=options(window=way.window)) as balancer:
        loader = BalancedLoader(way.data(), balancer, cost=cost_of, spec=SPEC)
        if states is not None:
            loader.load_state_dict(states if len(states) > 1 else states[0])
        loader.set_epoch(3)
        steps = []
        for _, batch in zip(range(stop), loader, strict=False):
            steps.append(batch["id"].tolist())
        if len(steps) < stop:
            assert loader.state_dict()["finished"]
        return steps, loader.state_dict()


def test_another_number_of_ranks_trains_each_sample_once() -> None:
    """Also between two windows, and with workers, whose DataLoader reads ahead."""
    ways = [Way(1), Way(1, budget=True, workers=2), Way(4, budget=True), Way(4, workers=2)]
    states: dict[Any, list[dict[str, Any]] | None] = dict.fromkeys(ways)
    trained: dict[Any, list[int]] = {way: [] for way in ways}
    for world_size, batches in ((3, (2, 4)), (1, (3, 4)), (4, (100, 100))):
        stops = dict(zip((1, 4), batches, strict=True))
        jobs = [(go_on, way, stops[way.window], states[way]) for way in ways]
        for way, results in zip(ways, run_in_turn(world_size, *jobs), strict=True):
            trained[way] += [sample for steps, _ in results for step in steps for sample in step]
            states[way] = [results[-1][1]]  # between two windows that of any rank will do
    assert all(sorted(samples) == list(range(101)) for samples in trained.values())


def repeat(_: int, state: dict[str, Any]) -> list[list[int]]:
    """What is trained when the window of a state is repeated, which must be asked for."""
    with Balancer.embedded(options=options(window=4)) as balancer:
        loader = BalancedLoader(Way().data(), balancer, cost=cost_of, spec=SPEC)
        with pytest.raises(ResumeError, match=r"this job has \d; the state was taken within a .*repeat_window=True"):
            loader.load_state_dict(state)
        loader.load_state_dict(state, repeat_window=True)
        loader.set_epoch(3)
        return [batch["id"].tolist() for batch in loader]


def test_within_a_window_another_number_of_ranks_is_refused_or_trains_it_again() -> None:
    results = run_ranks(2, go_on, Way(), 6, None)
    whole = sorted(sample for rank_steps, _ in results for step in rank_steps[:4] for sample in step)
    assert len(whole) == 44
    for world_size in (1, 3):
        again = [s for steps in run_ranks(world_size, repeat, results[0][1]) for step in steps for s in step]
        assert sorted(whole + again) == list(range(101))
