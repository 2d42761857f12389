"""Global batches of a fixed number of samples, and the state from which any number of ranks goes on."""

from __future__ import annotations

from itertools import chain, zip_longest
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer_client.balancing.sampling import GlobalBatchSampler, SampleOrder

Steps = list[list[list[int]]]  # by step and rank


def _ranks(length: int, world_size: int, size: int, **options: Any) -> list[GlobalBatchSampler]:
    return [
        GlobalBatchSampler(length, global_batch_size=size, rank=rank, world_size=world_size, **options)
        for rank in range(world_size)
    ]


def _steps(ranks: list[GlobalBatchSampler], at_most: int | None = None) -> Steps:
    iterators = [iter(rank) for rank in ranks]
    steps: Steps = []
    while at_most is None or len(steps) < at_most:
        step = [next(iterator, []) for iterator in iterators]
        if not any(step):
            break
        steps.append(step)
    return steps


def _flat(steps: Steps) -> list[int]:
    return [index for step in steps for batch in step for index in batch]


@pytest.mark.parametrize(
    ("length", "world_size", "size"), [(96, 4, 8), (100, 3, 16), (7, 4, 5), (5, 2, 100), (0, 2, 4)]
)
@pytest.mark.parametrize("shuffle", [True, False])
def test_ranks_share_each_global_batch_along_the_order(length: int, world_size: int, size: int, shuffle: bool) -> None:
    ranks = _ranks(length, world_size, size, seed=3, shuffle=shuffle)
    steps = _steps(ranks)
    assert _flat(steps) == SampleOrder(length, seed=3, shuffle=shuffle).samples(np.arange(length)).tolist()
    for step in steps[:-1]:
        assert sum(map(len, step)) == size
    for step in steps:
        assert max(map(len, step)) - min(map(len, step)) <= 1
    assert [len(rank) for rank in ranks] == [sum(bool(step[k]) for step in steps) for k in range(world_size)]


def test_the_last_global_batch_can_be_left_out() -> None:
    ranks = _ranks(30, 2, 8, drop_last=True)
    assert [[len(batch) for batch in step] for step in _steps(ranks)] == [[4, 4]] * 3
    assert [len(rank) for rank in ranks] == [3, 3]


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_any_number_of_ranks_goes_on_with_the_same_global_batches(data: Any) -> None:
    length, size = data.draw(st.integers(0, 200)), data.draw(st.integers(8, 40))
    expected = [sorted(chain(*step)) for step in _steps(_ranks(length, 1, size, seed=1))]
    ranks = _ranks(length, data.draw(st.integers(1, 8)), size, seed=1)
    found: list[list[int]] = []
    for _ in range(3):  # stopped and resumed
        ahead = data.draw(st.integers(0, 5))  # batches that were read and not trained
        steps = _steps(ranks, data.draw(st.integers(0, 6)))
        trained = max(0, len(steps) - ahead)
        found += [sorted(chain(*step)) for step in steps[:trained]]
        states = [rank.state_after(trained) for rank in ranks]
        assert states == [states[0]] * len(ranks)
        ranks = _ranks(length, data.draw(st.integers(1, 8)), size, seed=1)
        for rank in ranks:
            rank.load_state_dict(states[0])
            rank.set_epoch(0)
    assert found + [sorted(chain(*step)) for step in _steps(ranks)] == expected


def test_epochs_have_orders_of_their_own_and_iterations_begin_anew() -> None:
    sampler = GlobalBatchSampler(50, global_batch_size=10, seed=5)
    first = list(sampler)
    assert list(sampler) == first
    sampler.set_epoch(0)
    assert list(sampler) == first
    sampler.set_epoch(1)
    assert sampler.state_dict() == {**sampler.state_after(0), "epoch": 1, "position": 0}
    second = list(sampler)
    assert second != first
    assert sorted(chain(*second)) == sorted(chain(*first))
    iterator = iter(sampler)
    next(iterator)
    assert sampler.state_dict()["position"] == 10
    assert list(sampler) == second  # a loop that was left begins again
    assert sampler.state_dict() == {
        "version": 1, "samples": 50, "seed": 5, "shuffle": True, "epoch": 1, "position": 50,
    }  # fmt: skip


def test_a_loaded_state_holds_for_its_epoch_once() -> None:
    def resumed(batches: int) -> GlobalBatchSampler:
        sampler = GlobalBatchSampler(50, global_batch_size=10)
        sampler.set_epoch(3)
        iterator = iter(sampler)
        for _ in range(batches):
            next(iterator)
        again = GlobalBatchSampler(50, global_batch_size=10)
        again.load_state_dict(sampler.state_dict())
        assert again.epoch == 3
        return again

    sampler = resumed(3)
    sampler.set_epoch(3)
    assert (len(list(sampler)), len(list(sampler))) == (2, 5)
    sampler = resumed(3)
    sampler.set_epoch(4)
    assert len(list(sampler)) == 5
    sampler = resumed(5)  # the epoch has ended
    sampler.set_epoch(3)
    assert (len(list(sampler)), len(list(sampler))) == (0, 5)
    assert len(list(resumed(5))) == 5  # no epoch is named: the next loop over the same order


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 2}, r"state\['version'\] is 2 and should be 1; .*finish the epoch with the release"),
        ({"samples": 51}, r"state\['samples'\] is 51 and should be 50; load the data set"),
        ({"seed": 9}, r"state\['seed'\] is 9 and should be 0; make the sampler with the seed"),
        ({"shuffle": False}, r"state\['shuffle'\] is False and should be True"),
        ({"position": 51}, r"state\['position'\] is 51, and the data set has 50 samples"),
        ({"position": -1}, r"state\['position'\] is -1"),
        ({"position": None}, r"state\['position'\] is None"),
        ({"epoch": "1"}, r"state\['epoch'\] is '1'"),
    ],
)
def test_a_state_of_something_else_is_refused(change: dict[str, Any], words: str) -> None:
    sampler = GlobalBatchSampler(50, global_batch_size=10)
    with pytest.raises(ValueError, match=words):
        sampler.load_state_dict({**sampler.state_dict(), **change})
    assert len(list(sampler)) == 5


@pytest.mark.parametrize("state", [None, {}, [{"version": 1}]])
def test_what_is_no_state_is_refused(state: Any) -> None:
    with pytest.raises(ValueError, match="state"):
        GlobalBatchSampler(50, global_batch_size=10).load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"data": iter([])}, "has no length; pass a map-style data set"),
        ({"data": -1}, "the data set has -1 samples"),
        ({"global_batch_size": 0}, "global_batch_size is 0"),
        ({"global_batch_size": 3, "rank": 0, "world_size": 4}, "global_batch_size is 3 for 4 ranks"),
        ({"seed": -1}, "seed is -1"),
        ({"shuffle": 1}, "shuffle is 1"),
        ({"drop_last": None}, "drop_last is None"),
        ({"rank": 1}, "rank is 1 and world_size is None; pass both"),
        ({"rank": 4, "world_size": 4}, "rank is 4; use 0 to 3"),
        ({"rank": 0, "world_size": 0}, "world_size is 0"),
        ({"rank": 0, "world_size": 2, "process_group": "dp"}, "process_group is given beside rank"),
        ({"process_group": "dp"}, "torch.distributed is not initialised"),
    ],
)
def test_a_wrong_argument_is_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        GlobalBatchSampler(**{"data": [0] * 10, "global_batch_size": 5, **options})


def test_a_wrong_epoch_is_named() -> None:
    with pytest.raises(ValueError, match=r"epoch is 1.5; use a whole number"):
        GlobalBatchSampler(10, global_batch_size=5).set_epoch(1.5)  # type: ignore[arg-type]


def test_a_rank_without_samples_at_the_end_knows_the_state_of_all() -> None:
    ranks = _ranks(17, 4, 8)
    steps = _steps(ranks)
    assert [list(map(len, step)) for step in steps] == [[2, 2, 2, 2], [2, 2, 2, 2], [1, 0, 0, 0]]
    assert [rank.state_after(3)["position"] for rank in ranks] == [17] * 4
    assert [rank.state_after(2)["position"] for rank in ranks] == [16] * 4


def test_a_huge_data_set_is_sampled_at_once() -> None:
    ranks = _ranks(10**12, 3, 10, seed=1)
    state = ranks[0].state_dict()
    for rank in ranks:
        rank.load_state_dict({**state, "position": 10**12 - 15})
    assert [[len(batch) for batch in step] for step in _steps(ranks)] == [[4, 3, 3], [2, 2, 1]]
    assert len(ranks[0]) == 10**11


def test_batches_of_all_ranks_come_in_the_same_order_whatever_reads_first() -> None:
    first, second = (_ranks(40, 2, 8) for _ in range(2))
    one, other = iter(second[1]), iter(second[0])
    assert list(zip_longest(*first)) == [(next(other), mine) for mine in one]
