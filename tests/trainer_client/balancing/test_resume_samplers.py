"""Going on from the state of a sampler over the whole job, on the same and on other numbers of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.harness.ranks import run_ranks
from tests.trainer_client.balancing.jobs import SPEC, cost_of
from tests.trainer_client.balancing.test_resume import options, trained
from trainer_client import BalancedLoader, Balancer
from trainer_client.balancing.resume import ResumeError
from trainer_client.balancing.sampling import GlobalBatchSampler


class Numbers(torch.utils.data.Dataset[int]):
    """A map-style data set whose samples are their indexes."""

    def __len__(self) -> int:
        return 101

    def __getitem__(self, index: int) -> int:
        return index


def gather(indexes: list[int]) -> dict[str, torch.Tensor]:
    ids = torch.tensor(indexes)
    counts = ids * 37 % 19 + (ids % 10 == 0) * 200
    return {"id": ids, "count": counts, "values": ids.repeat_interleave(counts)}


def go_on(
    rank: int, window: int, stop: int, states: list[dict[str, Any]] | None, workers: int = 0
) -> tuple[list[list[int]], dict[str, Any]]:
    """Trains up to `stop` batches of an epoch, from a state if there is one; what was trained, and the state then."""
    with Balancer.embedded(options=options(window=window)) as balancer:
        sampler = GlobalBatchSampler(Numbers(), global_batch_size=11, seed=5)
        data = torch.utils.data.DataLoader(
            Numbers(), batch_sampler=sampler, collate_fn=gather, num_workers=workers,
            multiprocessing_context="fork" if workers else None,  # a rank of the tests has a slower default
        )  # fmt: skip
        loader = BalancedLoader(data, balancer, cost=cost_of, spec=SPEC)
        if states is not None:
            loader.load_state_dict(states if len(states) > 1 else states[0])
        loader.set_epoch(3)
        steps = []
        for _, batch in zip(range(stop), loader, strict=False):
            steps.append(batch["id"].tolist())
        if len(steps) < stop:
            assert loader.state_dict()["finished"]
        return steps, loader.state_dict()


@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("workers", [0, 2])
def test_another_number_of_ranks_trains_each_sample_once(window: int, workers: int) -> None:
    states: list[dict[str, Any]] | None = None
    trained: list[int] = []
    for world_size, stop in ((3, 2), (1, 3), (4, 1), (2, 100)) if window == 1 else ((3, 4), (1, 4), (2, 100)):
        results = run_ranks(world_size, go_on, window, stop, states, workers)
        trained += [sample for steps, _ in results for step in steps for sample in step]
        states = [results[-1][1]]  # between two windows that of any rank will do
    assert sorted(trained) == list(range(101))


@pytest.mark.parametrize("world_sizes", [(2, 1), (1, 2), (2, 3)])
def test_within_a_window_another_number_of_ranks_is_refused_or_trains_it_again(world_sizes: tuple[int, int]) -> None:
    before, after = world_sizes
    results = run_ranks(before, go_on, 4, 6, None)
    for refused, steps in run_ranks(after, repeat, results[0][1]):
        assert f"state['world_size'] is {before}, and this job has {after}; the state was taken within a" in refused
        assert "repeat_window=True" in refused
        whole = sorted(sample for rank_steps, _ in results for step in rank_steps[:4] for sample in step)
        assert len(whole) == 44
        assert not {sample for step in steps for sample in step} & set(whole)
    again = [sample for _, steps in run_ranks(after, repeat, results[0][1]) for step in steps for sample in step]
    assert sorted(whole + again) == list(range(101))


def repeat(rank: int, state: dict[str, Any]) -> tuple[str, list[list[int]]]:
    """What loading the state says, and what is trained when its window is repeated."""
    del rank
    with Balancer.embedded(options=options(window=4)) as balancer:
        sampler = GlobalBatchSampler(Numbers(), global_batch_size=11, seed=5)
        data = torch.utils.data.DataLoader(Numbers(), batch_sampler=sampler, collate_fn=gather)
        loader = BalancedLoader(data, balancer, cost=cost_of, spec=SPEC)
        with pytest.raises(ResumeError) as refused:
            loader.load_state_dict(state)
        loader.load_state_dict(state, repeat_window=True)
        loader.set_epoch(3)
        return str(refused.value), [batch["id"].tolist() for batch in loader]


def sampled_everywhere(rank: int, window: int) -> None:
    """As `stop_everywhere`, over a sampler of the whole job; the last global batch has nothing for the last rank."""
    with Balancer.embedded(options=options(window=window)) as balancer:

        def make() -> BalancedLoader[Any]:
            sampler = GlobalBatchSampler(Numbers(), global_batch_size=10, seed=1)
            data = torch.utils.data.DataLoader(Numbers(), batch_sampler=sampler, collate_fn=gather)
            return BalancedLoader(data, balancer, cost=cost_of, spec=SPEC)

        loader = make()
        states, steps = [loader.state_dict()], []
        for batch in loader:
            steps.append(trained(batch, loader))
            states.append(loader.state_dict())
        assert len(steps) == 11
        for number, state in enumerate(states):
            again = make()
            again.load_state_dict(state)
            rest = []
            for batch in again:
                rest.append(trained(batch, again))
                assert again.state_dict() == states[number + len(rest)]
            assert rest == steps[number:]


@pytest.mark.parametrize("window", [1, 3])
def test_the_place_in_a_sampler_is_one_for_all_ranks(window: int) -> None:
    run_ranks(3, sampled_everywhere, window)
