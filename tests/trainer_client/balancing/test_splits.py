"""Samples split over real ranks, by a real balancer and without one: every value arrives once, where the pieces say."""

from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.harness.balancer_process import ServiceProcess
from benchmarks.harness.ranks import run_ranks
from tests.trainer_client.balancing.jobs import balancer_of, logged, run_in_turn
from trainer_client import BalancedLoader, BalanceOptions, Balancer, BatchSpec, HSTUCost, SplitOptions
from trainer_client.balancing.pipelines import balanced_batches

HSTU = HSTUCost(num_layers=1, width=8, num_heads=1, head_dim=4, history=["count", "count"], context=2, candidates=3)
SPEC = BatchSpec(
    sequence={"items", "actions"},
    rows_per_sample={"items": "count", "actions": "count", "tags": "num_tags"},
)


def options(**changes: Any) -> BalanceOptions:
    return BalanceOptions(**{"timeout": timedelta(seconds=20), "split": SplitOptions(), **changes})


@dataclass(frozen=True)
class Splits:
    """A job of which some samples outweigh a rank's share."""

    name: str
    address: str | None
    ranks: int = 3
    steps: int = 4
    giant: int = 400
    every: int = 2  # steps, of which one has a giant
    options: BalanceOptions = field(default_factory=options)

    def batch(self, rank: int, step: int) -> dict[str, torch.Tensor]:
        rng = np.random.default_rng(100 * step + rank)
        count = torch.from_numpy(rng.integers(1, 12, 4))
        if step % self.every == 0 and rank == step // self.every % self.ranks:
            count[1] = self.giant
        tags = torch.from_numpy(rng.integers(0, 3, 4))
        sample = torch.arange(4) + 10 * rank + 1000 * step
        items = torch.cat([torch.arange(n) + 1000 * s for n, s in zip(count.tolist(), sample.tolist(), strict=True)])
        return {
            "id": sample, "count": count, "num_tags": tags, "items": items, "actions": items.neg(),
            "tags": sample.repeat_interleave(tags),
        }  # fmt: skip


def train(rank: int, job: Splits) -> list[dict[str, Any]]:
    """What a rank gets, step by step."""
    batches = [job.batch(rank, step) for step in range(job.steps)]
    records = []
    with balancer_of(job.address, job.name, options=job.options) as balancer:
        loader = BalancedLoader(batches, balancer, cost=HSTU, spec=SPEC)
        for batch in loader:
            ends = batch["count"].cumsum(0).tolist()
            starts = [0, *ends[:-1]]
            rows = [batch["items"][a:b].tolist() for a, b in zip(starts, ends, strict=True)]
            assert torch.equal(batch["actions"], -batch["items"])
            report = loader.report
            records.append(
                {
                    "ids": batch["id"].tolist(), "rows": rows, "splits": loader.splits, "mode": report.mode.value,
                    "tags": batch["tags"].tolist(), "split": report.split_samples, "pieces": report.pieces,
                    "load": report.max_load / report.mean_load, "whole": report.max_load_whole,
                    "samples": report.samples, "own": report.own_samples, "exchanged": report.exchanged,
                }
            )  # fmt: skip
    return records


def run(*jobs: Splits) -> list[list[list[dict[str, Any]]]]:
    """Runs jobs of as many ranks, and checks what came of each; the records by job, rank and step."""
    by_job = run_in_turn(jobs[0].ranks, *((train, job) for job in jobs))
    for job, results in zip(jobs, by_job, strict=True):
        check(job, results)
    return by_job


def check(job: Splits, results: list[list[dict[str, Any]]]) -> None:
    """Checks that every sample arrived once, whole or in pieces one behind the other, which are where they say."""
    assert {len(records) for records in results} == {job.steps}
    for first in range(0, job.steps, job.options.window):
        steps = range(first, min(first + job.options.window, job.steps))
        loaded = [job.batch(rank, step) for step in steps for rank in range(job.ranks)]
        counts = torch.cat([batch["count"] for batch in loaded]).tolist()
        ids = torch.cat([batch["id"] for batch in loaded]).tolist()
        found = []
        for records in ([result[step] for result in results] for step in steps):
            found += check_step(records)
        whole = [(one, [1000 * one + at for at in range(count)]) for one, count in zip(ids, counts, strict=True)]
        assert sorted(found) == sorted(whole)
        tags = sorted(tag for step in steps for result in results for tag in result[step]["tags"])
        assert tags == sorted(torch.cat([batch["tags"] for batch in loaded]).tolist())


def check_step(records: list[dict[str, Any]]) -> list[tuple[int, list[int]]]:
    """Samples of a step of all ranks, and their items; checks what each says of splits."""
    splits = records[0]["splits"]
    assert all(record["splits"] == splits for record in records)
    assert {record["split"] for record in records} == {len(splits)}
    assert {record["pieces"] for record in records} == {sum(len(sample.pieces) for sample in splits)}
    assert sum(record["own"] for record in records) == records[0]["samples"] + records[0]["pieces"] - len(splits)
    left = {
        (rank, place): (one, row)
        for rank, record in enumerate(records)
        for place, (one, row) in enumerate(zip(record["ids"], record["rows"], strict=True))
    }
    found = []
    for sample in splits:
        ids, rows = zip(*(left.pop((piece.rank, piece.sequence)) for piece in sample.pieces), strict=True)
        assert len(set(ids)) == 1
        found.append((ids[0], [item for row in rows for item in row]))
        for number, (piece, row) in enumerate(zip(sample.pieces, rows, strict=True)):
            context = 0 if number else 2
            candidates = 0 if number + 1 < len(rows) else 3
            assert len(piece) == context + 2 * len(row) + candidates
    return [*found, *left.values()]


def test_the_service_and_the_ranks_alone_split_samples(balancer: ServiceProcess) -> None:
    jobs = (Splits("served", balancer.address), Splits("in windows", None, options=options(window=2)))
    for results, mode in zip(run(*jobs), ("service", "embedded"), strict=True):
        assert {record["mode"] for record in results[0]} == {mode}
        split = [record for record in results[0] if record["split"]]
        assert len(split) == 2
        for record in split:
            assert record["load"] < 1.1
            assert record["whole"] > 0
            assert record["exchanged"] > 0


def _loops(rank: int) -> tuple[list[str], list[tuple[float, float]], list[float]]:
    """Loops that ask for splits and that do not; what was said, scales of loops by hand, and loads that they timed."""
    job, said = Splits("asked", None, ranks=2), logged()
    batches = [job.batch(rank, step) for step in range(job.steps)]
    scales, loads = [], []
    with Balancer.embedded(options=job.options) as balancer:
        for name in ("ignores", "asks"):
            loader = BalancedLoader(batches, balancer, cost=HSTU, spec=SPEC, name=name)
            assert sum(len(loader.splits) for _ in loader if name == "asks") == (name == "asks") * 2
        for balanced in balanced_batches(loader):
            assert balanced.splits == loader.splits
        for name in ("ignores by hand", "asks by hand"):
            for batch in batches:
                ticket = balancer.submit(batch, cost=HSTU, spec=SPEC, loader=name)
                with pytest.raises(RuntimeError, match="the report is known when"):
                    _ = replace(ticket, future=Future()).report
                moved = balancer.redistribute(batch, ticket, loader=name)  # by the spec that was submitted
                assert int(moved["count"].sum()) == len(moved["items"])
                ticket.took(1.0)
                scales.append((ticket.report.loss_scale, 2 / ticket.report.samples))
                loads.append(balancer.stream(name).measured.take().load - ticket.report.own_load)
                assert name == "ignores by hand" or len(ticket.splits) == ticket.report.split_samples
            ticket = balancer.submit(None, cost=HSTU, loader=name)
            assert balancer.redistribute(None, ticket, loader=name) is None
            with pytest.raises(RuntimeError, match="no report"):
                _ = ticket.report
    return [line for line in said if "splits" in line], scales, loads


def test_a_loop_that_does_not_look_at_splits_is_warned_once_and_a_ticket_tells_what_a_loader_does() -> None:
    for said, scales, loads in run_ranks(2, _loops):
        assert [line.split(":")[0] for line in said] == ["ignores", "ignores by hand"]
        assert all(found == expected for found, expected in scales)
        assert [load == 0 for load in loads] == [False, True] * 4  # no times of split samples
