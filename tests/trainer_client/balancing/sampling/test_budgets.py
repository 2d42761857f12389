"""Global batches of a budget: where they end, how ranks share them, and that any number of ranks goes on with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from trainer_client.balancing.sampling import GlobalBatchSampler, SampleOrder, TokenBudgetSampler

Steps = list[list[list[int]]]


def _ranks(costs: Any, world_size: int, **options: Any) -> list[TokenBudgetSampler]:
    data = options.pop("data", None)
    data = len(costs) if data is None else data
    options = {"budget": 1000, **options}
    return [
        TokenBudgetSampler(data, costs=costs, rank=rank, world_size=world_size, **options) for rank in range(world_size)
    ]


def _steps(ranks: list[Any], at_most: int | None = None) -> Steps:
    iterators = [iter(rank) for rank in ranks]
    steps: Steps = []
    while at_most is None or len(steps) < at_most:
        step = [next(iterator, []) for iterator in iterators]
        if not any(step):
            break
        steps.append(step)
    return steps


def _global(steps: Steps) -> list[list[int]]:
    return [sorted(index for batch in step for index in batch) for step in steps]


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


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_global_batches_are_the_next_samples_that_fit_the_budget(data: Any) -> None:
    count = data.draw(st.integers(0, 120))
    costs = np.array(data.draw(st.lists(st.integers(0, 60), min_size=count, max_size=count)), np.int64)
    if data.draw(st.booleans()):
        costs = costs / 4
    world_size, budget = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 150))
    least = data.draw(st.integers(world_size, 6))
    most = data.draw(st.integers(least, 40))
    ranks = _ranks(costs, world_size, budget=budget, min_samples=least, max_samples=most, seed=4)
    steps = _steps(ranks)
    order = SampleOrder(count, seed=4).samples(np.arange(count))
    assert _global(steps) == _expected(costs, budget, least, most, order)
    assert [len(rank) for rank in ranks] == [sum(bool(step[k]) for step in steps) for k in range(world_size)]


def test_ranks_get_loads_that_differ_little() -> None:
    costs = _lengths(20_000) ** 2
    for counts, allowed in (("equal", 1.005), ("free", 1.005)):
        steps = _steps(_ranks(costs, 4, budget=200 * float(costs.mean()), counts=counts, seed=1))
        loads = np.array([[costs[batch].sum() for batch in step] for step in steps[:-1]])
        assert (loads.max(1) / loads.mean(1)).mean() < allowed
        if counts == "equal":
            assert all(max(map(len, step)) - min(map(len, step)) <= 1 for step in steps)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_number_of_ranks_goes_on_with_the_same_global_batches(data: Any) -> None:
    costs, options = _lengths(300), {"budget": 1500, "min_samples": 6, "seed": 1}
    expected = _global(_steps(_ranks(costs, 1, **options)))
    ranks = _ranks(costs, data.draw(st.integers(1, 6)), **options)
    found: list[list[int]] = []
    for _ in range(2):
        steps = _steps(ranks, data.draw(st.integers(0, 8)))
        trained = max(0, len(steps) - data.draw(st.integers(0, 4)))
        found += _global(steps[:trained])
        states = [rank.state_after(trained) for rank in ranks]
        assert states == [states[0]] * len(ranks)
        ranks = _ranks(costs, data.draw(st.integers(1, 6)), **options)
        for rank in ranks:
            rank.load_state_dict(states[0])
            rank.set_epoch(0)
    assert found + _global(_steps(ranks)) == expected


def test_samplers_hand_their_position_to_one_another() -> None:
    fixed = GlobalBatchSampler(500, global_batch_size=50)
    (budget,) = _ranks(_lengths(500), 1)
    budget.load_state_dict({**fixed.state_dict(), "position": 100})
    found = _global(_steps([budget]))
    assert sum(map(len, found)) == 400
    fixed.load_state_dict(budget.state_after(3))
    assert sum(map(len, found[:3])) + sum(map(len, fixed)) == 400


def test_a_sample_above_the_budget_has_a_batch_with_a_sample_for_each_rank() -> None:
    costs = np.full(40, 10)
    costs[20] = 5000
    steps = _steps(_ranks(costs, 4, budget=100, shuffle=False))
    assert _global(steps)[2:4] == [[20, 21, 22, 23], list(range(24, 34))]
    assert [len(batch) for batch in steps[2]] == [1, 1, 1, 1]
    alone = _global(_steps(_ranks(costs, 1, budget=100, shuffle=False)))
    assert alone[2:4] == [[20], list(range(21, 31))]


def test_no_rank_gets_more_than_it_can_hold() -> None:
    rng = np.random.default_rng(2)
    memory = rng.integers(1, 100, 3000)
    ranks = _ranks(memory**2, 3, budget=3e5, memory=memory, memory_cap=800)
    steps = _steps(ranks)
    assert max(memory[batch].sum() for step in steps for batch in step) <= 800
    assert max(memory[batch].sum() for step in steps for batch in step) > 700  # the cap binds
    assert sorted(index for step in _global(steps) for index in step) == list(range(3000))
    with pytest.raises(ValueError, match=r"sample 7 takes 99 of memory and memory_cap is 90; raise it"):
        _steps(_ranks(np.array([5] * 7 + [99] + [5] * 9), 2, budget=500, memory_cap=90, shuffle=False))


def test_a_batch_that_only_its_division_makes_too_large_is_made_smaller() -> None:
    # Two ranks hold 100 each, and the first three samples take 180 together, but no two of them fit on one rank.
    steps = _steps(_ranks(np.array([60, 60, 60, 40, 40]), 2, budget=200, memory_cap=100, shuffle=False))
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
    assert _steps(_ranks(given_as[kind], 2, data=Data())) == _steps(_ranks(costs, 2))


def test_the_last_batch_can_be_left_out() -> None:
    costs = _lengths(300)
    ranks, whole = _ranks(costs, 2, drop_last=True), _ranks(costs, 2)
    assert _steps(ranks) == _steps(whole)[:-1]
    assert len(ranks[0]) == len(ranks[1]) == len(whole[0]) - 1


def test_the_length_of_a_huge_data_set_is_not_guessed() -> None:
    sampler = TokenBudgetSampler(10**9, budget=1e4, costs=np.lib.stride_tricks.as_strided(np.ones(1), (10**9,), (0,)))
    with pytest.raises(TypeError, match="not known without a walk through all 1000000000 samples"):
        len(sampler)
    assert [len(batch) for _, batch in zip(range(2), sampler, strict=False)] == [10**4] * 2
    state = sampler.state_after(1)
    sampler.load_state_dict({**state, "position": 10**9 - 10**4 - 5})
    assert [len(batch) for batch in sampler] == [10**4, 5]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"budget": 0}, "budget is 0; use a finite number above 0"),
        ({"costs": [1.0] * 9}, r"costs is float64 of shape \(9,\); give one number for each of the 10 samples"),
        ({"costs": "length"}, "costs is 'length', which list lacks"),
        ({"costs": ["a"] * 10}, "costs is <U1 of shape"),
        ({"counts": "same"}, "counts is 'same'"),
        ({"max_samples": 0}, "max_samples is 0; use a whole number of at least 1"),
        ({"min_samples": 1, "rank": 0, "world_size": 2}, "min_samples is 1; use a whole number of at least 2"),
        ({"min_samples": 5, "max_samples": 4}, "max_samples is 4; use a whole number of at least 5"),
        ({"memory": [1.0] * 10}, "memory is given without memory_cap"),
        ({"memory_cap": -1}, "memory_cap is -1"),
    ],
)
def test_a_wrong_argument_is_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TokenBudgetSampler(**{"data": [0] * 10, "budget": 5, "costs": np.ones(10), **options})


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_a_wrong_cost_is_named_when_its_batch_comes(bad: float) -> None:
    costs = np.ones(10)
    costs[6] = bad
    with pytest.raises(ValueError, match=rf"costs\[6\] is {bad}; use finite numbers, 0 or more"):
        list(TokenBudgetSampler(10, budget=5, costs=costs))
