"""Shards of per-rank streams: read once each, by any number of ranks, stopped anywhere."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.ranks import run_ranks
from examples.shards import ShardLoader, train, write_shards


def _ranks(folder: Path, world_size: int, **options: Any) -> list[ShardLoader]:
    paths = sorted(folder.glob("*.jsonl"))
    return [ShardLoader(paths, batch_size=16, rank=k, world_size=world_size, **options) for k in range(world_size)]


def _read(loader: ShardLoader, at_most: int | None = None) -> list[int]:
    found: list[int] = []
    for number, batch in enumerate(loader, 1):
        found += batch["id"].tolist()
        if number == at_most:
            break
    return found


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 5), (4, 4), (1, 12)])
def test_any_number_of_ranks_reads_what_others_have_left(tmp_path: Path, before: int, after: int) -> None:
    records = write_shards(tmp_path, 9)
    ranks = _ranks(tmp_path, before)
    for rank in ranks:
        rank.set_epoch(2)
    found = [record for number, rank in enumerate(ranks) for record in _read(rank, 2 + 3 * number)]
    states = [rank.state_dict() for rank in ranks]
    others = _ranks(tmp_path, after)
    for rank in others:
        rank.load_state_dicts(states)
        rank.set_epoch(2)
    left = [rank.state_dict()["offsets"] for rank in others]
    assert Counter(shard for state in left for shard in state) == Counter(
        s for state in states for s in state["offsets"]
    )
    found += [record for rank in others for record in _read(rank)]
    assert sorted(found) == list(range(records))
    assert [rank.state_dict()["offsets"] for rank in others] == [{}] * after


def _train(_: int, folder: str, max_steps: int | None) -> Counter[int]:
    return train(Path(folder), batch_size=16, max_steps=max_steps)


def test_a_balanced_job_goes_on_with_other_ranks(tmp_path: Path) -> None:
    records = write_shards(tmp_path, 8)
    trained: Counter[int] = Counter()
    for world_size, steps in ((3, 4), (2, 5), (2, None)):
        for found in run_ranks(world_size, _train, str(tmp_path), steps):
            trained.update(found)
    assert trained == Counter(range(records))
