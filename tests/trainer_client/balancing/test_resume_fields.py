"""Going on with batches of other fields is refused on all ranks, wherever the state was taken; what may vary may."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies
from torch.utils.data import DataLoader

from benchmarks.harness.ranks import run_ranks
from benchmarks.harness.steps import SPEC, cost_of
from trainer_client import BalancedLoader, BalanceOptions, Balancer
from trainer_client.balancing.batches import FieldSchema, Schema
from trainer_client.balancing.resume import ResumeError
from trainer_client.balancing.sampling import GlobalBatchSampler

Batch = dict[str, torch.Tensor]
SAMPLES = 36


def collate(ids: list[int]) -> Batch:
    """Some fields; rows of `padded` are as long as the longest sample of the global batch."""
    samples = torch.tensor(ids, dtype=torch.int64)
    counts = samples % 5
    longest = 1 + min(ids, default=0) // 24
    return {
        "id": samples, "count": counts, "values": samples.repeat_interleave(counts),
        "padded": torch.zeros(len(ids), longest, 2), "label": samples.float(),
    }  # fmt: skip


def without(batch: Batch, name: str) -> Batch:
    return {key: value for key, value in batch.items() if key != name}


CHANGES: dict[str, tuple[Callable[[Batch], Batch], str]] = {
    "dtype": (
        lambda batch: {**batch, "label": batch["label"].long()},
        "had label: float32 before, and have label: int64 now",
    ),
    "jagged dtype": (
        lambda batch: {**batch, "values": batch["values"].int()},
        "had values: int64, jagged by count before, and have values: int32, jagged by count now",
    ),
    "name": (
        lambda batch: {**without(batch, "label"), "clicked": batch["label"]},
        "had label: float32 before, and have clicked: float32 now",
    ),
    "more": (lambda batch: {**batch, "more": batch["label"]}, "its batches have more: float32 now, unlike when"),
    "fewer": (lambda batch: without(batch, "label"), "had label: float32 before, and lack that now"),
    "dimensions": (
        lambda batch: {**batch, "padded": batch["padded"].sum(-1)},
        "had padded: float32, rows of 2 dimensions before, and have padded: float32, rows of 1 dimension now",
    ),
}  # fmt: skip


def make(
    balancer: Balancer, change: Callable[[Batch], Batch] = dict, rank: int = 0, world_size: int = 1
) -> BalancedLoader[Batch]:
    sampler = GlobalBatchSampler(SAMPLES, global_batch_size=4, shuffle=False, rank=rank, world_size=world_size)
    data = DataLoader(range(SAMPLES), batch_sampler=sampler, collate_fn=lambda ids: change(collate(ids)))  # type: ignore[arg-type]
    return BalancedLoader(data, balancer, cost=cost_of, spec=SPEC)


def embedded(window: int) -> Balancer:
    return Balancer.embedded(options=BalanceOptions(window=window, timeout=timedelta(seconds=20)))


def refusals(rank: int, window: int) -> dict[str, list[str]]:
    """What this rank hears where the data of one rank, or of all, have changed since the state was taken."""
    told: dict[str, list[str]] = {}
    with embedded(window) as balancer:
        states = []
        for _, _ in zip(range(4), loader := make(balancer, rank=rank, world_size=2), strict=False):
            states.append(loader.state_dict())
        for name, (change, _) in CHANGES.items():
            told[name] = []
            for state in states:
                again = make(embedded(window), change, rank, 2)
                again.load_state_dict(state)
                with pytest.raises(ResumeError) as error:
                    list(again)
                told[name].append(str(error.value))
    return told


@pytest.mark.parametrize("window", [1, 3])
def test_other_fields_are_refused_on_all_ranks(window: int) -> None:
    first, second = run_ranks(2, refusals, window)
    assert first == second
    for name, (_, words) in CHANGES.items():
        for said in first[name]:
            assert re.search(r"rank 0 cannot go on with the loader 'train': its batches ", said), said
            assert words in said
            assert "go on with batches of the same fields and dtypes, or begin the epoch anew" in said


@pytest.mark.parametrize("window", [1, 2, 3])
def test_what_may_vary_between_batches_is_no_other_schema(window: int) -> None:
    """Rows of any size; fields of any kind, where windows are of one kind; costs; and what has nothing left."""

    def alternating(batch: Batch) -> Batch:
        kind = int(batch["id"][0]) // (4 * window) % 2
        return {**batch, "kind": batch["id"].double()} if kind else without(batch, "label")

    for change in (dict, alternating):
        whole = [batch["id"].tolist() for batch in make(embedded(window), change)]
        loader = make(embedded(window), change)
        states = [loader.state_dict(), *(loader.state_dict() for _ in loader)]
        assert len(states) == 10
        for number, state in enumerate(states):
            again = make(embedded(window), change)
            again.load_state_dict(state)
            assert [batch["id"].tolist() for batch in again] == whole[number:]
    behind = make(embedded(window), lambda batch: without(batch, "label"))
    behind.load_state_dict(states[-1])
    assert list(behind) == []
    assert len(list(behind)) == 9


def go_on(
    rank: int, states: list[dict[str, Any]] | None, steps: int, changed: bool
) -> tuple[list[int], dict[str, Any] | str]:
    """Trains some steps; of the last one only the first rank has a sample."""
    with embedded(1) as balancer:
        change = CHANGES["dtype"][0] if changed else dict
        sampler = GlobalBatchSampler(9, global_batch_size=4, shuffle=False)
        data = DataLoader(range(9), batch_sampler=sampler, collate_fn=lambda ids: change(collate(ids)))  # type: ignore[arg-type]
        loader = BalancedLoader(data, balancer, cost=cost_of, spec=SPEC)
        if states is not None:
            loader.load_state_dict(states)
        try:
            ids = [int(one) for _, batch in zip(range(steps), loader, strict=False) for one in batch["id"]]
        except ResumeError as error:
            return [], str(error)
        return ids, loader.state_dict()


def test_ranks_that_had_no_sample_know_no_fields() -> None:
    before = run_ranks(4, go_on, None, 2, False)
    states = [state for _, state in before]
    assert [bool(state["fields"]) for state in states if isinstance(state, dict)] == [True, False, False, False]
    rest = run_ranks(3, go_on, states, 9, False)
    assert sorted(one for ids, _ in before + rest for one in ids) == list(range(9))
    (_, first), (_, second) = run_ranks(2, go_on, states, 9, True)
    assert first == second
    assert "its batches had label: float32 before, and have label: int64 now" in str(first)


names = strategies.sampled_from(["a", "b", "c.d"])
fields = strategies.builds(
    FieldSchema,
    path=names,
    dtype=strategies.sampled_from(["int64", "float32"]),
    rows=strategies.just(1),
    kind=strategies.sampled_from(["dense", "jagged", "shared"]),
    shape=strategies.lists(strategies.integers(1, 3), max_size=2).map(tuple),
)


def schema_of(chosen: list[FieldSchema]) -> Schema:
    return Schema(fields=tuple(sorted(chosen, key=lambda field: field.path)))


@hypothesis.given(*[strategies.lists(fields, unique_by=lambda field: field.path, max_size=3)] * 2)
def test_schemas_that_differ_in_more_than_sizes_of_rows_differ_in_what_states_keep(
    one: list[FieldSchema], other: list[FieldSchema]
) -> None:
    def kept(chosen: list[FieldSchema]) -> set[tuple[Any, ...]]:
        return {
            (field.path, field.kind, *((field.dtype, len(field.shape)) if field.kind != "shared" else ()))
            for field in chosen
        }

    assert (schema_of(one).constant_lines == schema_of(other).constant_lines) == (kept(one) == kept(other))


def test_of_many_fields_a_state_keeps_few_kilobytes() -> None:
    many = [FieldSchema(path=f"f{number:04}", dtype="int64", rows=1) for number in range(1000)]
    lines = schema_of(many).constant_lines
    assert sum(map(len, lines)) < 4096
    assert lines[-1].startswith("936 more fields")
    assert schema_of([*many[:-1], FieldSchema(path="f0999", dtype="int32", rows=1)]).constant_lines != lines
