"""Rounds that are not like the others: of other shapes or fields, with few samples or none, or that nobody can plan."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.harness.balancer_process import ServiceProcess
from benchmarks.harness.ranks import run_ranks
from tests.trainer_client.balancing.jobs import balancer_of, check_served, logged, run_in_turn
from trainer_client import BalancedLoader, BalanceOptions, Balancer, BatchSpec, RoundReport


def padded(rank: int, step: int, size: int) -> dict[str, torch.Tensor]:
    """Rows as long as the step says; an empty batch has rows of length 0, as padding to the longest gives it."""
    width = 3 + 2 * step if size else 0
    ids = torch.arange(size) + 100 * step + 1000 * rank
    return {"id": ids, "rows": ids[:, None].expand(size, width).contiguous()}


SIZES = ((4, 4, 0, 5, 5), (4, 3, 6), (0, 2))


def shapes(rank: int, address: str | None) -> list[tuple[list[int], tuple[int, ...]]]:
    batches = [padded(rank, step, size) for step, size in enumerate(SIZES[rank])]
    with balancer_of(address, "shapes") as balancer:
        loader = BalancedLoader(batches, balancer, cost=lambda batch: batch["id"] % 7 + 1)
        steps = []
        for _ in range(2):
            for batch in loader:
                assert batch["rows"].tolist() == [[i] * batch["rows"].shape[1] for i in batch["id"].tolist()]
                steps.append((batch["id"].tolist(), tuple(batch["rows"].shape)))
        check_served(loader, address)
    return steps


def test_ranks_without_samples_follow_rounds_whose_rows_have_other_shapes(balancer: ServiceProcess) -> None:
    for results in run_in_turn(3, *((shapes, address) for address in (None, balancer.address, "off"))):
        assert {len(steps) for steps in results} == {10}
        for index, step in enumerate(zip(*results, strict=True)):
            number = index % 5
            wanted = [
                i for rank in range(3) if number < len(SIZES[rank])
                for i in padded(rank, number, SIZES[rank][number])["id"].tolist()
            ]  # fmt: skip
            assert sorted(i for ids, _ in step for i in ids) == sorted(wanted)
            assert [shape for _, shape in step] == [(len(ids), 3 + 2 * number) for ids, _ in step]


def other_shapes_in_a_window(rank: int) -> None:
    batches = [padded(rank, step, 4) for step in range(4)]
    with balancer_of(None, "window", window=2) as balancer:
        list(BalancedLoader(batches, balancer, cost=lambda batch: batch["id"]))


def test_batches_of_one_window_must_have_rows_of_one_shape() -> None:
    for error in run_ranks(2, other_shapes_in_a_window, check=False):
        assert isinstance(error, ValueError)
        assert "batches of one window differ" in str(error)
        assert "int64[3]" in str(error)
        assert "use window=1, or pad them alike" in str(error)


def other_fields_under_one_name(rank: int, name: str) -> list[Any]:
    """A loop, one over batches of another kind, and the first again; the first batches of all have no sample."""
    plain = [padded(rank, 0, 0), padded(rank, 0, 4)]
    jagged = [{"count": torch.arange(0, size), "values": torch.arange(size * (size - 1) // 2)} for size in (0, 3)]
    spec = BatchSpec(rows_per_sample={"values": "count"})
    results: list[Any] = []
    with balancer_of(None, "names") as balancer:
        for batches, each in ((plain, "train"), (jagged, name), (plain, "train")):
            costs, how = ("id", None) if batches is plain else ("count", spec)
            loader: BalancedLoader[Any] = BalancedLoader(
                batches, balancer, cost=lambda batch, costs=costs: batch[costs] + 1, spec=how, name=each
            )
            try:
                results.append(sum(len(batch[costs]) for batch in loader))
            except ValueError as error:
                results.append(str(error))
    return results


def test_other_fields_under_one_name_are_refused_with_a_hint_at_names() -> None:
    one_name, two_names = run_in_turn(2, *((other_fields_under_one_name, name) for name in ("train", "eval")))
    for first, error, again in one_name:
        assert first == again == 4
        assert "'train' began with batches of other fields" in error
        assert "this one has values: int64[], jagged by count" in error
        assert "different names (BalancedLoader(name=…))" in error
    assert two_names == [[4, 3, 4]] * 2


LOADED = ((5, 3, 2, 0, 1, 4), (5, 1, 1, 2, 0), (6, 2, 0, 0, 1))
"""Samples of each rank's batches; globally 16, 6, 3, 2, 2 and 4 for 3 ranks."""


def few(
    rank: int, address: str | None, min_samples: int, drop_last: bool, more: dict[str, Any]
) -> tuple[list[list[int]], int, set[str]]:
    batches = [
        {"id": torch.arange(size) + 100 * step + 1000 * rank, "cost": torch.arange(size) ** 6 + 1}
        for step, size in enumerate(LOADED[rank])
    ]
    job = f"few-{min_samples}-{drop_last}-{sorted(more)}"
    with balancer_of(address, job, min_samples=min_samples, counts="free", **more) as balancer:
        loader = BalancedLoader(batches, balancer, cost=lambda batch: batch["cost"], drop_last=drop_last)
        got = [batch["id"].tolist() for batch in loader]
        again = [batch["id"].tolist() for batch in loader]
        assert got == again  # the next loop begins where the data does
        check_served(loader, address)
    return got, loader.counters.dropped_samples // 2, {mode.value for mode, _ in loader.counters.rounds}


def total(step: int) -> list[int]:
    return sorted(
        1000 * rank + 100 * step + i
        for rank, sizes in enumerate(LOADED) if step < len(sizes)
        for i in range(sizes[step])
    )  # fmt: skip


WAYS = ("embedded", "service", "off", "window")


@pytest.fixture(scope="module")
def small(balancer: ServiceProcess) -> dict[tuple[str, int, bool], list[Any]]:
    """What ranks got of `LOADED`, by the way of balancing, `min_samples` and `drop_last`."""
    addresses = {"service": balancer.address, "off": "off"}
    ways = [(how, least, False) for how in WAYS for least in (1, 2)]
    ways += [(how, 1, True) for how in WAYS] + [("off", 0, False)]
    jobs = [
        (few, addresses.get(how), least, drop_last, {"window": 4 if drop_last else 2} if how == "window" else {})
        for how, least, drop_last in ways
    ]
    return dict(zip(ways, run_in_turn(3, *jobs), strict=True))


@pytest.mark.parametrize("how", WAYS)
def test_every_rank_gets_samples_while_there_are_as_many(how: str, small: dict[Any, Any]) -> None:
    for least in (1, 2):
        results = small[how, least, False]
        for step in range(6):
            ids = [got[step] for got, _, _ in results]
            if how != "window":
                assert sorted(i for each in ids for i in each) == total(step)
            count = sum(map(len, ids))
            assert min(map(len, ids)) >= min(least, count // 3), (step, ids)
        assert [dropped for _, dropped, _ in results] == [0, 0, 0]
        if how == "off":
            assert results[0][2] == {"identity", "spread", "end"}
    assert any(not ids for got, _, _ in small["off", 0, False] for ids in got[:3])  # it is the option that does it


@pytest.mark.parametrize("how", WAYS)
def test_drop_last_drops_batches_with_fewer_samples_than_ranks(how: str, small: dict[Any, Any]) -> None:
    results = small[how, 1, True]
    kept = [0, 1, 2]  # the fourth and fifth are too small; the sixth has enough, but two ranks' data has ended by then
    if how == "window":
        trained = sorted(i for got, _, _ in results for ids in got for i in ids)
        assert {len(got) for got, _, _ in results} == {4}
        assert len(trained) == 25 + 4
    else:
        for got, _, _ in results:
            assert len(got) == 4
        for step, number in enumerate([*kept, 5]):
            assert sorted(i for got, _, _ in results for i in got[step]) == total(number)
    assert all(ids for got, _, _ in results for ids in got)
    assert sum(dropped for _, dropped, _ in results) == 4


def ends(rank: int) -> tuple[list[int], int]:
    """Rank 0 has more batches than the others, which are too small for two ranks by themselves."""
    batches = [{"id": torch.arange(2 if step < 2 else 1)} for step in range(8 if rank == 0 else 2)]
    with balancer_of(None, "ends") as balancer:
        loader = BalancedLoader(batches, balancer, cost=lambda batch: batch["id"] + 1, drop_last=True)
        return [len(batch["id"]) for batch in loader], loader.counters.dropped_samples


def test_drop_last_ends_the_loops_of_all_ranks_where_one_rank_s_data_has_ended() -> None:
    assert run_ranks(2, ends) == [([2, 2], 2), ([2, 2], 0)]


def weights(rank: int) -> tuple[list[float], list[str]]:
    said = logged()
    with balancer_of("off", "weights") as balancer:
        loader = BalancedLoader([{"id": torch.arange(4 - 2 * rank)}] * 2, balancer, cost=lambda batch: batch["id"])
        empty = BalancedLoader([{"id": torch.arange(4)}] * (2 - 2 * rank), balancer, cost=lambda batch: batch["id"])
        return [each.mean_loss_scale for each in (loader, empty) for _ in each], said


def test_a_mean_over_no_samples_is_warned_of_once() -> None:
    (first, said), (second, warned) = run_ranks(2, weights)
    assert first == [2 * 4 / 6] * 2 + [2.0] * 2
    assert second == [2 * 2 / 6] * 2 + [0.0] * 2
    assert not said
    assert len(warned) == 1
    assert "a mean over none is NaN" in warned[0]


def one_rank(rank: int) -> list[int]:
    batches = [{"id": torch.arange(size)} for size in (4, 2, 4, 1)]
    with balancer_of(None, "one", min_samples=3) as balancer:
        return [len(batch["id"]) for batch in BalancedLoader(batches, balancer, cost=lambda b: b["id"], drop_last=True)]


def test_drop_last_on_one_rank() -> None:
    assert one_rank(0) == [4, 4]


def _many_dropped_in_a_row(rank: int) -> list[list[int]]:
    sizes = (2, 0, 0, 0, 0, 3, 0, 1)
    batches = [{"id": torch.arange(size) + 10 * rank + 100 * step} for step, size in enumerate(sizes)]
    trained = []
    for depth in (1, 2, 4):
        with Balancer.embedded(options=BalanceOptions(depth=depth)) as balancer:
            loader = BalancedLoader(batches, balancer, cost=lambda batch: batch["id"], drop_last=True)
            trained.append([sample for batch in loader for sample in batch["id"].tolist()])
    return trained


def test_a_loop_goes_on_after_more_dropped_batches_than_are_in_flight() -> None:
    expected = [0, 1, 10, 11, 500, 501, 502, 510, 511, 512, 700, 710]
    for one, other in zip(*run_ranks(2, _many_dropped_in_a_row), strict=True):
        assert sorted(one + other) == expected


NEAR = ([1000, 4, 1], [1000, 2, 1])  # 1005 and 1003: within 0.1 % of an even 1004


def nearly_even(rank: int, address: str | None, tolerance: float) -> list[int]:
    batch = {"id": torch.arange(3) + 10 * rank, "cost": torch.tensor(NEAR[rank])}
    with balancer_of(address, f"near-{tolerance}", tolerance=tolerance, move_price=0.0, counts="free") as balancer:
        loader = BalancedLoader([batch], balancer, cost=lambda batch: batch["cost"])
        (trained,) = list(loader)
        check_served(loader, address)
    ids: list[int] = trained["id"].tolist()
    return ids


def test_a_tolerance_of_0_wants_exact_balance_embedded_and_from_the_service(balancer: ServiceProcess) -> None:
    addresses = (None, balancer.address)
    *near, exact, served = run_in_turn(
        2, *((nearly_even, to, tolerance) for tolerance in (1e-3, 0) for to in addresses)
    )
    assert near == [[[0, 1, 2], [10, 11, 12]]] * 2
    costs = {10 * rank + index: cost for rank, each in enumerate(NEAR) for index, cost in enumerate(each)}
    assert {sum(costs[sample] for sample in ids) for ids in exact + served} == {1004}


def unplanned(rank: int, batches: int, invalid: int = -1) -> tuple[list[str], list[RoundReport]]:
    said = logged()
    data = [{"tokens": torch.tensor([5, 9, 2])} for _ in range(batches)]
    with balancer_of(None, "unplanned", memory_caps=[1, 1] if invalid < 0 else None) as balancer:
        loader = BalancedLoader(data, balancer, cost=lambda batch: batch["tokens"] * (-1 if rank == invalid else 1))
        reports = [loader.report for _ in loader]
    assert {report.mode.value for report in reports} == {"identity"}
    return said, reports


def test_one_rank_tells_of_fewer_and_fewer_of_them() -> None:
    (said, stayed), (nothing, too) = run_ranks(2, unplanned, 9)
    assert len(stayed) == len(too) == 9
    assert [(report.imbalance, report.home_load) for report in stayed] == [(1.0, 16.0)] * 9
    assert nothing == []
    counts = [re.search(r"stays unbalanced \((\d+) so far\): .*raise memory_caps", line) for line in said]
    assert [found and int(found[1]) for found in counts] == [1, 2, 4, 8]


def test_costs_that_cannot_be_used_are_told_by_their_rank_and_the_first_again_and_again() -> None:
    results = run_ranks(3, unplanned, 9, 1)
    for rank, (_, reports) in enumerate(results):
        for report in reports:
            np.testing.assert_equal(report.home_load, np.nan if rank == 1 else 16.0)
            np.testing.assert_equal(report.own_load, np.nan if rank == 1 else 16.0)
            assert np.isnan([report.imbalance_before, report.imbalance, report.max_load, report.lower_bound]).all()
    first, own, other = (said for said, _ in results)
    assert own == other == []  # the lead says it for all
    why = r"the costs of rank\(s\) 1 cannot be used: .*must be finite and at least 0"
    counts = [re.search(rf"stays unbalanced \((\d+) so far\): .*{why}", line) for line in first]
    assert [found and int(found[1]) for found in counts] == [1, 2, 4, 8]
