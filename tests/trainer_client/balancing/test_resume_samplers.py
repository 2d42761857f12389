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
    for world_size, stop in ((3, 2), (1, 3), (4, 1), (2, 100)):
        results = run_ranks(world_size, go_on, window, stop, states, workers)
        trained += [sample for steps, _ in results for step in steps for sample in step]
        states = [state for _, state in results]
        if window == 1:
            states = states[-1:]  # that of any rank will do
    assert sorted(trained) == list(range(101))


def test_states_of_some_ranks_are_refused_within_a_window_by_another_number_of_ranks() -> None:
    (_, state), _ = run_ranks(2, go_on, 4, 2, None)
    loader = BalancedLoader(
        torch.utils.data.DataLoader(
            Numbers(), batch_sampler=GlobalBatchSampler(Numbers(), global_batch_size=11, seed=5)
        ),
        Balancer.embedded(options=options(window=4)),
        cost=cost_of,
    )
    with pytest.raises(ResumeError, match=r"is 2, and this job has 1; load the states of all 2 ranks as a list"):
        loader.load_state_dict(state)
    with pytest.raises(ResumeError, match=r"states\[1\] is of rank 0 of 2; give the states of all 2 ranks"):
        loader.load_state_dict([state, state])


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
