"""Global batches of a size or a budget: where they end, how ranks share them, and that any ranks go on with them."""

import math
from collections import Counter
from itertools import chain, permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import chisquare, kstest
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.harness.ranks import run_ranks
from trainer_client.balancing.sampling import GlobalBatchSampler, OrderedBatchSampler, SampleOrder, TokenBudgetSampler

Steps = list[list[list[int]]]  # by step and rank


def _counted(length: Any, world_size: int = 1, size: int = 10, **options: Any) -> list[GlobalBatchSampler]:
    return [
        GlobalBatchSampler(length, global_batch_size=size, rank=rank, world_size=world_size, **options)
        for rank in range(world_size)
    ]


def _budgeted(costs: Any, world_size: int = 1, **options: Any) -> list[TokenBudgetSampler]:
    options = {"data": len(costs) if hasattr(costs, "__len__") else 0, "budget": 1000, **options}
    return [TokenBudgetSampler(costs=costs, rank=rank, world_size=world_size, **options) for rank in range(world_size)]


def _steps(ranks: Any, at_most: int | None = None) -> Steps:
    iterators = [iter(rank) for rank in ranks]
    steps: Steps = []
    while at_most is None or len(steps) < at_most:
        step = [next(iterator, []) for iterator in iterators]
        if not any(step):
            break
        steps.append(step)
    return steps


def _global(steps: Steps) -> list[list[int]]:
    return [sorted(chain(*step)) for step in steps]


def _lengths(count: int, seed: int = 0) -> NDArray[np.int64]:
    return np.clip(np.random.default_rng(seed).lognormal(4, 1, count), 1, 900).astype(np.int64)


def _expected(costs: NDArray[Any], budget: float, least: int, most: int, order: NDArray[np.int64]) -> list[list[int]]:
    """A sample at a time."""
    batches: list[list[int]] = [[]]
    spent = 0.0
    for index in order.tolist():
        full = spent + costs[index] > budget and len(batches[-1]) >= least
        if batches[-1] and (full or len(batches[-1]) == most):
            batches.append([])
            spent = 0.0
        batches[-1].append(index)
        spent += costs[index]
    return [sorted(batch) for batch in batches if batch]


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(0, 120), world_size=st.integers(1, 5), size=st.integers(5, 30), shuffle=st.booleans(),
    drop_last=st.booleans(),
)  # fmt: skip
def test_ranks_share_each_global_batch_along_the_order(
    length: int, world_size: int, size: int, shuffle: bool, drop_last: bool
) -> None:
    ranks = _counted(length, world_size, size, seed=3, shuffle=shuffle, drop_last=drop_last)
    steps = _steps(ranks)
    order = SampleOrder(length, seed=3, shuffle=shuffle).samples(np.arange(length)).tolist()
    trained = length - length % size if drop_last else length
    assert list(chain.from_iterable(chain.from_iterable(steps))) == order[:trained]
    assert [sum(map(len, step)) for step in steps[:-1]] == [size] * (len(steps) - 1)
    assert all(max(map(len, step)) - min(map(len, step)) <= 1 for step in steps)
    assert [len(rank) for rank in ranks] == [sum(bool(step[k]) for step in steps) for k in range(world_size)]
    for count in range(len(steps)):
        assert {rank.state_after(count)["position"] for rank in ranks} == {count * size}


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_global_batches_are_the_next_samples_that_fit_the_budget(data: Any) -> None:
    count = data.draw(st.integers(0, 120))
    costs = np.array(data.draw(st.lists(st.integers(0, 60), min_size=count, max_size=count)), np.int64)
    if data.draw(st.booleans()):
        costs = costs / 4
    world_size, budget = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 150))
    least = data.draw(st.integers(world_size, 6))
    most = data.draw(st.integers(least, 40))
    ranks = _budgeted(costs, world_size, budget=budget, min_samples=least, max_samples=most, seed=4)
    steps = _steps(ranks)
    assert _global(steps) == _expected(costs, budget, least, most, SampleOrder(count, seed=4).samples(np.arange(count)))
    assert [len(rank) for rank in ranks] == [sum(bool(step[k]) for step in steps) for k in range(world_size)]
    without = _budgeted(costs, world_size, budget=budget, min_samples=least, max_samples=most, seed=4, drop_last=True)
    assert _steps(without) == steps[:-1]


@settings(max_examples=40, deadline=None)
@given(data=st.data(), budget=st.booleans())
def test_any_number_of_ranks_goes_on_with_the_same_global_batches(data: Any, budget: bool) -> None:
    length, size = data.draw(st.integers(0, 200)), data.draw(st.integers(8, 40))

    def make(world_size: int) -> list[OrderedBatchSampler]:
        if budget:
            return list(_budgeted(_lengths(150), world_size, budget=1000, min_samples=6, seed=1))
        return list(_counted(length, world_size, size, seed=1))

    most = 6 if budget else 8
    expected = _global(_steps(make(1)))
    ranks = make(data.draw(st.integers(1, most)))
    trained: list[list[int]] = []
    for _ in range(3):  # stopped and resumed
        steps = _steps(ranks, data.draw(st.integers(0, 6)))
        count = max(0, len(steps) - data.draw(st.integers(0, 5)))  # less what was read and not trained
        trained += _global(steps[:count])
        states = [rank.state_after(count) for rank in ranks]
        assert states == [states[0]] * len(ranks)
        ranks = make(data.draw(st.integers(1, most)))
        for rank in ranks:
            rank.load_state_dict(states[0])
            rank.set_epoch(0)
    assert trained + _global(_steps(ranks)) == expected


def test_epochs_have_orders_of_their_own_and_iterations_begin_anew() -> None:
    sampler = GlobalBatchSampler(50, global_batch_size=10, seed=5)
    first = list(sampler)
    sampler.set_epoch(0)
    assert list(sampler) == first
    sampler.set_epoch(1)
    assert sampler.state_dict() == {**sampler.state_after(0), "epoch": 1, "position": 0}
    second = list(sampler)
    assert second != first
    assert sorted(chain(*second)) == sorted(chain(*first))
    next(iter(sampler))
    assert sampler.state_dict()["position"] == 10
    assert list(sampler) == second  # a loop that was left begins again
    assert sampler.state_dict() == {
        "version": 1, "samples": 50, "seed": 5, "shuffle": True, "epoch": 1, "position": 50,
    }  # fmt: skip
    for named, expected in ((False, second), (True, [])):  # of an epoch that was over, named again or not
        again = GlobalBatchSampler(50, global_batch_size=10, seed=5)
        again.load_state_dict(sampler.state_dict())
        if named:
            again.set_epoch(1)
        assert [list(again), list(again)] == [expected, second]
    with pytest.raises(ValueError, match=r"epoch is 1.5; use a whole number"):
        sampler.set_epoch(1.5)


def test_a_huge_data_set_is_sampled_at_once() -> None:
    ranks = _counted(10**12, 3, 10, seed=1)
    for rank in ranks:
        rank.load_state_dict({**ranks[0].state_dict(), "position": 10**12 - 15})
    assert [[len(batch) for batch in step] for step in _steps(ranks)] == [[4, 3, 3], [2, 2, 1]]
    assert len(ranks[0]) == 10**11
    sampler = TokenBudgetSampler(10**9, budget=1e4, costs=np.lib.stride_tricks.as_strided(np.ones(1), (10**9,), (0,)))
    with pytest.raises(TypeError, match="not known without a walk through all 1000000000 samples"):
        len(sampler)
    sampler.load_state_dict({**sampler.state_dict(), "position": 10**9 - 10**4 - 5})
    assert [len(batch) for batch in sampler] == [10**4, 5]


@pytest.mark.parametrize("counts", ["equal", "free"])
def test_ranks_get_loads_that_differ_little(counts: str) -> None:
    costs = _lengths(20_000) ** 2
    steps = _steps(_budgeted(costs, 4, budget=200 * float(costs.mean()), counts=counts, seed=1))
    loads = np.array([[costs[batch].sum() for batch in step] for step in steps[:-1]])
    assert (loads.max(1) / loads.mean(1)).mean() < 1.005
    if counts == "equal":
        assert all(max(map(len, step)) - min(map(len, step)) <= 1 for step in steps)


def test_no_rank_gets_more_than_it_can_hold() -> None:
    memory = np.random.default_rng(2).integers(1, 100, 3000)
    steps = _steps(_budgeted(memory**2, 3, budget=3e5, memory=memory, memory_cap=800))
    most = max(memory[batch].sum() for step in steps for batch in step)
    assert 700 < most <= 800  # the cap binds
    assert sorted(chain(*_global(steps))) == list(range(3000))
    with pytest.raises(ValueError, match=r"sample 7 takes 99 of memory and memory_cap is 90; raise it"):
        _steps(_budgeted(np.array([5] * 7 + [99] + [5] * 9), 2, budget=500, memory_cap=90, shuffle=False))
    # Two ranks hold 100 each, and the first three samples take 180 together, but no two of them fit on one rank.
    steps = _steps(_budgeted(np.array([60, 60, 60, 40, 40]), 2, budget=200, memory_cap=100, shuffle=False))
    assert _global(steps) == [[0, 1], [2, 3, 4]]


@pytest.mark.parametrize("kind", ["list", "tensor", "memmap", "function", "attribute", "method", "float32"])
def test_costs_come_in_many_ways(kind: str, tmp_path: Path) -> None:
    costs = _lengths(300)

    class Data:
        lengths = costs

        def __len__(self) -> int:
            return 300

        def length(self, index: int) -> int:
            return int(costs[index])

    costs.tofile(tmp_path / "costs.bin")
    given_as: dict[str, Any] = {
        "list": costs.tolist(),
        "tensor": torch.from_numpy(costs),
        "memmap": np.memmap(tmp_path / "costs.bin", np.int64, "r"),
        "function": Data().length,
        "attribute": "lengths",
        "method": "length",
        "float32": costs.astype(np.float32),
    }
    assert _steps(_budgeted(given_as[kind], 2, data=Data())) == _steps(_budgeted(costs, 2))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 2}, r"state\['version'\] is 2 and should be 1; .*finish the epoch with the release"),
        ({"samples": 51}, r"state\['samples'\] is 51 and should be 50; load the data set"),
        ({"seed": 9}, r"state\['seed'\] is 9 and should be 0; make the sampler with the seed"),
        ({"shuffle": False}, r"state\['shuffle'\] is False and should be True"),
        ({"position": 51}, r"state\['position'\] is 51, and the data set has 50 samples"),
        ({"epoch": "1"}, r"state\['epoch'\] is '1'"),
        (None, "state is None"),
    ],
)
def test_a_state_of_something_else_is_refused(change: dict[str, Any] | None, words: str) -> None:
    (sampler,) = _counted(50)
    with pytest.raises(ValueError, match=words):
        sampler.load_state_dict(change and {**sampler.state_dict(), **change})
    assert len(list(sampler)) == 5


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
        ({"max_samples": 0}, "max_samples is 0"),
        ({"process_group": "dp"}, "torch.distributed is not initialised"),
        ({"rank": 1}, "rank is 1 and world_size is None; pass both"),
        ({"rank": 4, "world_size": 4}, "rank is 4; use 0 to 3"),
        ({"rank": 0, "world_size": 0}, "world_size is 0"),
        ({"rank": 0, "world_size": 2, "process_group": "dp"}, "process_group is given beside rank"),
        ({"budget": 0}, "budget is 0; use a finite number above 0"),
        ({"costs": [1.0] * 9}, r"costs is float64 of shape \(9,\); give one number for each of the 10 samples"),
        ({"costs": "length"}, "costs is 'length', which list lacks"),
        ({"costs": ["a"] * 10}, "costs is <U1 of shape"),
        ({"counts": "same"}, "counts is 'same'"),
        ({"min_samples": 1, "rank": 0, "world_size": 2}, "min_samples is 1; use a whole number of at least 2"),
        ({"min_samples": 5, "max_samples": 4}, "max_samples is 4; use a whole number of at least 5"),
        ({"memory": [1.0] * 10}, "memory is given without memory_cap"),
        ({"memory_cap": -1}, "memory_cap is -1"),
    ],
)
def test_a_wrong_argument_is_named(options: dict[str, Any], words: str) -> None:
    kind, usual = GlobalBatchSampler, {"data": [0] * 10, "global_batch_size": 5}
    if options.keys() & {"budget", "costs", "counts", "min_samples", "max_samples", "memory", "memory_cap"}:
        kind, usual = TokenBudgetSampler, {"data": [0] * 10, "budget": 5, "costs": np.ones(10)}
    with pytest.raises(ValueError, match=words):
        kind(**{**usual, **options})


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_a_wrong_cost_is_named_when_its_batch_comes(bad: float) -> None:
    costs = np.ones(10)
    costs[6] = bad
    with pytest.raises(ValueError, match=rf"costs\[6\] is {bad}; use finite numbers, 0 or more"):
        list(TokenBudgetSampler(10, budget=5, costs=costs))


# With fixed seeds a test's outcome is fixed as well; a fair order has a smaller p-value in one of 10,000.
LEAST_P = 1e-4


def _all(length: int, seed: int = 0, epoch: int = 0) -> NDArray[np.int64]:
    return SampleOrder(length, seed=seed, epoch=epoch).samples(np.arange(length))


@settings(max_examples=60, deadline=None)
@given(length=st.integers(0, 3000), seed=st.integers(0, 2**64), epoch=st.integers(0, 2**40))
@example(length=3_000_017, seed=1, epoch=1)
def test_every_sample_comes_once(length: int, seed: int, epoch: int) -> None:
    assert np.array_equal(np.sort(_all(length, seed, epoch)), np.arange(length))
    plain = SampleOrder(length, seed=seed, epoch=epoch, shuffle=False)
    assert np.array_equal(plain.samples(np.arange(length)), np.arange(length))


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 2**62), st.integers(0, 2**62), st.integers(1, 300), st.integers(0, 9))
def test_a_part_is_the_same_from_wherever_it_is_asked(length: int, begin: int, count: int, seed: int) -> None:
    order = SampleOrder(length, seed=seed)
    places = (begin + np.arange(min(count, length))) % length
    found = order.samples(places)
    assert ((found >= 0) & (found < length)).all()
    assert len(set(found.tolist())) == len(found)
    assert np.array_equal(found[::-1], order.samples(places[::-1].copy()))


def test_the_order_does_not_change_between_releases() -> None:
    # A saved position means these very samples: if this fails, VERSION must be raised too.
    assert _all(10).tolist() == [5, 6, 9, 7, 2, 4, 0, 8, 3, 1]
    assert SampleOrder(10**12, seed=7, epoch=3).samples(np.arange(4)).tolist() == [
        719073682341, 351817646503, 767930689427, 30877024514,
    ]  # fmt: skip
    assert SampleOrder(2**62, seed=7, epoch=3).samples(np.array([0, 2**62 - 1])).tolist() == [
        4208744882747580688, 1097136280178955908,
    ]  # fmt: skip


@pytest.mark.parametrize("length", [2, 3, 4])
def test_all_orders_of_few_samples_are_equally_likely(length: int) -> None:
    counts = Counter(tuple(_all(length, seed).tolist()) for seed in range(20 * math.factorial(length)))
    assert chisquare([counts[order] for order in permutations(range(length))]).pvalue > LEAST_P


@pytest.mark.parametrize("length", [50, 10_000, 1 << 16, 10**9])
def test_neighbours_are_as_far_apart_as_in_a_permutation_that_is_drawn(length: int) -> None:
    """Steps from one sample to the next, and from an epoch's order to the next one's, beside numpy's."""
    count = min(length, 20_000)
    ours, others = [], []
    rng = np.random.default_rng(1)
    for epoch in range(40 if length < 1000 else 2):
        now, later = (SampleOrder(length, seed=9, epoch=epoch + k).samples(np.arange(count)) for k in (0, 1))
        if length <= 1 << 16:
            drawn, drawn_later = (rng.permutation(length)[:count] for _ in range(2))
        else:
            drawn, drawn_later = (rng.integers(0, length, count) for _ in range(2))
        ours.append(np.concatenate((np.diff(now), later - now)) % length)
        others.append(np.concatenate((np.diff(drawn), drawn_later - drawn)) % length)
    for found in (np.concatenate(ours), np.concatenate(others)):
        steps = found[found > 0]  # a sample does not follow itself
        assert kstest((steps - rng.random(steps.size)) / (length - 1), "uniform").pvalue > LEAST_P
        counts = np.bincount(steps * 25 // length, minlength=25)
        sizes = np.bincount(np.arange(1, length) * 25 // length, minlength=25) if length < 10**6 else np.ones(25)
        assert chisquare(counts, sizes / sizes.sum() * counts.sum()).pvalue > LEAST_P


def _in_a_group(rank: int) -> list[Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    samplers = [
        GlobalBatchSampler(16, global_batch_size=8, shuffle=False, **options)
        for options in ({}, {"process_group": mesh["dp"]}, {"process_group": mesh["dp"].get_group()})
    ]
    found: list[Any] = [next(iter(sampler)) for sampler in samplers]
    early = GlobalBatchSampler(16, global_batch_size=8)
    early.rank, early.world_size = 0, 1  # as if it had been made before the group
    try:
        iter(early)
    except ValueError as error:
        found.append(str(error))
    with pytest.raises(ValueError, match=r"process_group is a mesh of the dimensions dp \(2\), tp \(2\)"):
        GlobalBatchSampler(16, global_batch_size=8, process_group=mesh)
    dist.barrier()
    return found


def test_ranks_are_those_of_the_group_or_of_the_mesh() -> None:
    results = run_ranks(4, _in_a_group)
    for rank, (own, mesh, group, error) in enumerate(results):
        assert own == [2 * rank, 2 * rank + 1]
        assert mesh == group == list(range(4 * (rank // 2), 4 * (rank // 2) + 4))
        assert error == (
            f"the sampler was made for rank 0 of 1, and this is rank {rank} of 4; make it after "
            "torch.distributed.init_process_group, or pass rank and world_size"
        )
