"""Rounds that are not like the others: of other shapes or fields, in windows, with few samples, or unplanned."""

from __future__ import annotations

import re
import threading
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.harness.balancer_process import ServiceProcess
from benchmarks.harness.ranks import run_ranks
from evenkeel.partitioning.compile import Preparation
from tests.trainer_client.balancing.jobs import (
    SPEC,
    Job,
    balancer_of,
    check_served,
    cost_of,
    logged,
    make_batch,
    run_in_turn,
    run_job,
)
from trainer_client import BalancedLoader, BalanceOptions, Balancer, BatchSpec, RoundReport
from trainer_client.balancing import kernels


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


def test_other_fields_under_one_name_are_refused_with_a_hint_at_names(of_two: dict[str, list[Any]]) -> None:
    for first, error, again in of_two["one name"]:
        assert first == again == 4
        assert "'train' began with batches of other fields" in error
        assert "this one has values: int64[], jagged by count" in error
        assert "different names (BalancedLoader(name=…))" in error
    assert of_two["two names"] == [[4, 3, 4]] * 2


@pytest.fixture(scope="module")
def of_two() -> dict[str, list[Any]]:
    jobs: dict[str, tuple[Any, ...]] = {
        "one name": (other_fields_under_one_name, "train"), "two names": (other_fields_under_one_name, "eval"),
        "ends": (ends,), "weights": (weights,), "dropped": (_many_dropped_in_a_row,),
    }  # fmt: skip
    return dict(zip(jobs, run_in_turn(2, *jobs.values()), strict=True))


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


def test_drop_last_ends_the_loops_of_all_ranks_where_one_rank_s_data_has_ended(of_two: dict[str, list[Any]]) -> None:
    assert of_two["ends"] == [([2, 2], 2), ([2, 2], 0)]


def weights(rank: int) -> tuple[list[float], list[str]]:
    said = logged()
    with balancer_of("off", "weights") as balancer:
        loader = BalancedLoader([{"id": torch.arange(4 - 2 * rank)}] * 2, balancer, cost=lambda batch: batch["id"])
        empty = BalancedLoader([{"id": torch.arange(4)}] * (2 - 2 * rank), balancer, cost=lambda batch: batch["id"])
        return [each.mean_loss_scale for each in (loader, empty) for _ in each], said


def test_a_mean_over_no_samples_is_warned_of_once(of_two: dict[str, list[Any]]) -> None:
    (first, said), (second, warned) = of_two["weights"]
    assert first == [2 * 4 / 6] * 2 + [2.0] * 2
    assert second == [2 * 2 / 6] * 2 + [0.0] * 2
    assert not said
    assert len(warned) == 1
    assert "a mean over none is NaN" in warned[0]


def _many_dropped_in_a_row(rank: int) -> list[list[int]]:
    sizes = (2, 0, 0, 0, 0, 3, 0, 1)
    batches = [{"id": torch.arange(size) + 10 * rank + 100 * step} for step, size in enumerate(sizes)]
    trained = []
    for depth in (1, 2, 4):
        with Balancer.embedded(options=BalanceOptions(depth=depth)) as balancer:
            loader = BalancedLoader(batches, balancer, cost=lambda batch: batch["id"], drop_last=True)
            trained.append([sample for batch in loader for sample in batch["id"].tolist()])
    return trained


def test_a_loop_goes_on_after_more_dropped_batches_than_are_in_flight(of_two: dict[str, list[Any]]) -> None:
    expected = [0, 1, 10, 11, 500, 501, 502, 510, 511, 512, 700, 710]
    for one, other in zip(*of_two["dropped"], strict=True):
        assert sorted(one + other) == expected


def unplanned(rank: int) -> tuple[list[str], list[RoundReport]]:
    said = logged()
    data = [{"tokens": torch.tensor([5, 9, 2])} for _ in range(9)]
    with balancer_of(None, "unplanned") as balancer:
        loader = BalancedLoader(data, balancer, cost=lambda batch: batch["tokens"] * (-1 if rank == 1 else 1))
        reports = [loader.report for _ in loader]
    assert {report.mode.value for report in reports} == {"identity"}
    return said, reports


def test_costs_that_cannot_be_used_are_told_by_their_rank_and_the_first_again_and_again() -> None:
    results = run_ranks(3, unplanned)
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


WINDOW = 3


def options(**changes: Any) -> BalanceOptions:
    return BalanceOptions(**{"timeout": timedelta(seconds=10), "window": WINDOW, **changes})


Records = list[list[dict[str, Any]]]
"""By rank and step."""


def check(job: Job, results: Records) -> None:
    """Checks that every sample of a window was trained once in it, in batches of the sizes loaded."""
    assert {len(records) for records in results} == {max(job.steps)}
    for first in range(0, max(job.steps), WINDOW):
        last = min(first + WINDOW, max(job.steps))
        trained, expected = [], []
        for step in range(first, last):
            records = [result[step] for result in results]
            ids = [sample for record in records for sample in record["ids"]]
            trained += ids
            expected += job.expected(step)
            assert len(ids) == len(job.expected(step))
            assert {(record["mode"], record["reason"], record["samples"]) for record in records} == {
                (records[0]["mode"], records[0]["reason"], len(ids))
            }
            for record in records:
                assert record["load"] == record["own_load"]
                assert record["loss_scale"] == (len(job.steps) / len(ids) if ids else 0.0)
                assert record["round"] == first // WINDOW
        assert sorted(trained) == sorted(expected)


def windows_total(results: Records) -> float:
    """Sum over the steps of the largest load: what the job's time is proportional to."""
    return sum(max(record["load"] for record in step) for step in zip(*results, strict=True))


def test_samples_meet_within_their_window_only(balancer: ServiceProcess) -> None:
    job = Job(steps=(7, 7, 7), batch_size=3, address=balancer.address, name="window-service", options=options())
    without = replace(job, address=None, options=options(window=1))
    served, embedded, alone = run_in_turn(3, *((run_job, each) for each in (job, replace(job, address=None), without)))
    check(job, served)
    check(job, embedded)
    assert {record["mode"] for record in served[0]} == {"service"}
    assert {record["mode"] for record in embedded[0]} == {"embedded"}
    for rank in range(3):
        assert [record["ids"] for record in served[rank]] == [record["ids"] for record in embedded[rank]]
        assert [record["imbalance"] for record in served[rank]] == [record["imbalance"] for record in embedded[rank]]
    assert windows_total(served) < 0.9 * windows_total(alone)  # small batches of data with heavy tails
    steps = [record["ids"] for record in served[0]]
    assert any(sample // 1000 % 1000 != index for index, ids in enumerate(steps) for sample in ids)


def _costs_fail_in_one_batch(rank: int) -> list[tuple[str, str, list[int]]]:
    def cost(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return batch["id"] * (-1 if rank == 1 and int(batch["id"][0]) % 1_000_000 == 4000 else 1)

    batches = [{"id": torch.arange(4) + 1000 * step + 1_000_000 * rank} for step in range(6)]
    with Balancer.embedded(options=options()) as balancer:
        loader = BalancedLoader(batches, balancer, cost=cost)
        return [(loader.report.mode.value, loader.report.reason.value, batch["id"].tolist()) for batch in loader]


def test_invalid_costs_of_one_batch_leave_its_whole_window_at_home() -> None:
    results = run_ranks(2, _costs_fail_in_one_batch)
    for rank, steps in enumerate(results):
        assert [mode for mode, _, _ in steps] == ["embedded"] * 3 + ["identity"] * 3
        assert [ids[0] for _, _, ids in steps[3:]] == [3000 + 1_000_000 * rank + 1000 * i for i in range(3)]
        assert steps[4][1] == "invalid_costs"


def _submits_by_hand(rank: int) -> list[list[int]]:
    batches = [make_batch(rank, step, 6) for step in range(4)]
    trained = []
    with Balancer.embedded(options=options(window=4)) as balancer:
        stream = balancer.stream()
        ticket = stream.submit_window(batches, cost=lambda batch: batch["count"], spec=SPEC)
        outcome = stream.directive(ticket)
        for index in range(len(outcome.reports)):
            moved = stream.start(ticket, outcome, batch=index).wait().unflatten()
            trained.append(moved["id"].tolist())
        moved = balancer.redistribute(
            batches[0], balancer.submit(batches[0], cost=lambda batch: batch["count"], spec=SPEC), spec=SPEC
        )
        trained.append(moved["id"].tolist())  # a window that holds one batch only
        with pytest.raises(ValueError, match="5 batches for a window of 4"):
            stream.submit_window([*batches, batches[0]], cost=lambda batch: batch["count"], spec=SPEC)
    return trained


def test_a_loop_of_its_own_submits_windows() -> None:
    results = run_ranks(2, _submits_by_hand)
    trained = sorted(sample for steps in results for ids in steps[:4] for sample in ids)
    assert trained == sorted(
        int(sample) for rank in range(2) for step in range(4) for sample in make_batch(rank, step, 6)["id"]
    )
    last = sorted(sample for steps in results for sample in steps[4])
    assert last == sorted(int(sample) for rank in range(2) for sample in make_batch(rank, 0, 6)["id"])


STEPS = 8


class _Late(Preparation):
    """Kernels that are compiled when the test says so."""

    def __init__(self) -> None:
        self._done = threading.Event()

    def finish(self) -> None:
        self._done.set()


def _run(rank: int, late: int, caps: list[float] | None) -> tuple[list[tuple[str, str, int]], list[str]]:
    """Trains while rank `late` compiles until its fourth step; each step's outcome, and what was logged."""
    told = logged()
    preparation = _Late()
    if rank != late:
        preparation.finish()
    elif caps is not None:
        threading.Timer(1.0, preparation.finish).start()
    kernels._preparation = lambda: preparation  # type: ignore[assignment]
    job = Job(steps=(STEPS, STEPS), options=BalanceOptions(memory_caps=caps))
    records: list[tuple[str, str, int]] = []
    with job.balancer() as balancer:
        batches = [make_batch(rank, k, 8) for k in range(STEPS)]
        loader = BalancedLoader(batches, balancer, cost=cost_of, spec=SPEC)
        for batch in loader:
            records.append((str(loader.report.mode), str(loader.report.reason), len(batch["id"])))
            if len(records) == 4:
                preparation.finish()
    return records, told


@pytest.fixture(scope="module")
def of_kernels() -> list[list[Any]]:
    """Where the lead compiles, where the other rank does, and where the lead does and has caps."""
    return run_in_turn(2, (_run, 0, None), (_run, 1, None), (_run, 0, [1e12, 1e12]))


def test_until_the_lead_has_its_kernels_it_plans_by_a_plain_heuristic(of_kernels: list[list[Any]]) -> None:
    results = of_kernels[0]
    for records, _ in results:
        reasons = [reason for _, reason, _ in records]
        first = reasons.index("no_service")
        assert 4 <= first <= 6  # as many rounds are in flight
        assert set(reasons[:first]) == {"compiling"}
        assert set(reasons[first:]) == {"no_service"}
        assert {mode for mode, _, _ in records} == {"embedded"}
        assert [samples for _, _, samples in records] == [8] * STEPS
    told = [line for line in results[0][1] if "kernels" in line]
    assert len(told) == 2
    assert "`evenkeel warm-up`" in told[0]
    assert "ready" in told[1]
    assert not any("kernels" in line for line in results[1][1])


def test_other_ranks_need_none(of_kernels: list[list[Any]]) -> None:
    for records, _ in of_kernels[1]:
        assert {reason for _, reason, _ in records} == {"no_service"}


def test_with_memory_caps_the_first_batch_waits_since_as_loaded_it_might_not_fit(of_kernels: list[list[Any]]) -> None:
    for records, told in of_kernels[2]:
        assert {(mode, reason) for mode, reason, _ in records} == {("embedded", "no_service")}
        assert len(records) == STEPS
        assert all("compiling" in line for line in told if "kernels" in line)


def _fail() -> None:
    raise OSError("no space")


def test_what_cannot_be_prepared_is_compiled_when_it_is_called(caplog: pytest.LogCaptureFixture) -> None:
    assert Preparation(_fail).wait(10)
    assert "could not be prepared" in caplog.text
    assert "no space" in caplog.text
