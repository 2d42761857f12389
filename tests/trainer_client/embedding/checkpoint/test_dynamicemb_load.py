"""Loading into DynamicEmb by owner, with a stand-in for DynamicEmb: its functions' names and arguments, no GPU."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from benchmarks.harness.ranks import run_ranks
from tests.trainer_client.embedding.checkpoint.dumps import DIM, KEYS, values_of, write_dump
from trainer_client.embedding.checkpoint import CheckpointError
from trainer_client.embedding.dynamicemb import dynamicemb_loads_by_owner
from trainer_client.embedding.routing import Routing, hash_roundrobin, roundrobin

CPU = torch.device("cpu")


class StandInIndex:
    """Of DynamicEmb's `LinearBucketTable`, what counters use."""

    def __init__(self) -> None:
        self.held: dict[int, int] = {}

    def insert(self, keys: torch.Tensor, table_ids: torch.Tensor, score_arg: Any) -> None:
        assert score_arg.policy == "assign"
        assert bool((table_ids == 1).all())
        self.held |= dict(zip(keys.tolist(), score_arg.value.tolist(), strict=True))

    def load(self, key_file: str, score_files: dict[str, str], table_id: int | None = None) -> None:
        raise AssertionError("counters are read by DynamicEmb's own filter")


def stand_in() -> dict[str, ModuleType]:
    """A package `dynamicemb` with what loading consists of, and the filter of its release."""
    values, index = ModuleType("dynamicemb.key_value_table"), ModuleType("dynamicemb.scored_hashtable")

    def read(
        emb_key_path: str, embedding_file_path: str, score_file_path: str | None, opt_file_path: str | None, dim: int,
        optstate_dim: int, device: torch.device, batch_size: int = 65_536, num_scores: int = 1,
    ) -> Iterator[Any]:  # fmt: skip
        keys = torch.from_numpy(np.fromfile(emb_key_path, dtype=np.int64))
        embeddings = torch.from_numpy(np.fromfile(embedding_file_path, dtype=np.float32)).view(-1, dim)
        ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        kept = keys % ranks == rank
        yield keys[kept], embeddings[kept], None, None

    vars(values)["_iter_batches_from_files"] = read
    vars(index).update(
        LinearBucketTable=StandInIndex,
        ScoreArg=SimpleNamespace,
        ScorePolicy=SimpleNamespace(ASSIGN="assign"),
    )
    return {"dynamicemb": ModuleType("dynamicemb"), values.__name__: values, index.__name__: index}


def load_like_dynamicemb(path: Path, files: list[int], world_size: int, *, scores: bool) -> dict[int, list[Any]]:
    """What its storage inserts of some ranks' files."""
    values = sys.modules["dynamicemb.key_value_table"]
    held: dict[int, list[Any]] = {}
    for file in files:
        names = {
            array: str(path / f"items_emb_{array}.rank_{file}.world_size_{world_size}")
            for array in ("keys", "values", "scores", "opt_values")
        }
        for keys, embeddings, found, state in vars(values)["_iter_batches_from_files"](
            names["keys"], names["values"], names["scores"] if scores else None, names["opt_values"], DIM, 2 * DIM, CPU,
            num_scores=2,
        ):  # fmt: skip
            for row, key in enumerate(keys.tolist()):
                assert key not in held
                held[key] = [
                    embeddings[row].tolist(),
                    None if found is None else found[row].tolist(),
                    None if state is None else state[row].tolist(),
                ]
    return held


def load_rank(_: int, cases: list[tuple[str, int]]) -> list[tuple[dict[int, list[Any]], list[int], dict[int, int]]]:
    sys.modules.update(stand_in())
    rank, world_size, results = dist.get_rank(), dist.get_world_size(), []
    for folder, saved_by in cases:
        path = Path(folder)
        files = [rank] if saved_by == world_size else list(range(saved_by))  # as DynamicEmb chooses them
        plain = load_like_dynamicemb(path, files, saved_by, scores=True)
        counter = StandInIndex()
        with dynamicemb_loads_by_owner():
            held = load_like_dynamicemb(path, files, saved_by, scores=True)
            for file in files:
                name = str(path / f"items_counter_{{}}.rank_{file}.world_size_{saved_by}")
                counter.load(name.format("keys"), {"frequencies": name.format("frequencies")}, table_id=1)
        assert load_like_dynamicemb(path, files, saved_by, scores=True).keys() == plain.keys()  # theirs is back
        results.append((held, sorted(plain), counter.held))
    return results


def test_every_row_arrives_at_its_owner_with_scores_state_and_counter(tmp_path: Path) -> None:
    cases = [(hash_roundrobin(), 3), (hash_roundrobin(), 2), (roundrobin(), 3), (roundrobin(), 4)]
    for routing, saved_by in cases:
        write_dump(tmp_path / f"{routing}{saved_by}", routing, saved_by)
    found = run_ranks(3, load_rank, [(str(tmp_path / f"{routing}{saved_by}"), saved_by) for routing, saved_by in cases])
    for case, (routing, saved_by) in enumerate(cases):
        held = [rank[case][0] for rank in found]
        plain = [rank[case][1] for rank in found]
        counters = [rank[case][2] for rank in found]
        assert sorted(key for rank in held for key in rank) == sorted(KEYS.tolist())
        assert sum(map(len, counters)) >= len(KEYS) // 2
        for rank in range(3):
            keys = (*held[rank], *counters[rank])
            assert all(routing.owner(key, world_size=3, block_size=0) == rank for key in keys)
        for key, (embedding, scores, state) in (item for rank in held for item in rank.items()):
            raw = np.array([key])
            assert embedding == values_of(raw, DIM, 1)[0].tolist()
            assert state == values_of(raw, 2 * DIM, 2)[0].tolist()
            assert scores == values_of(raw, 2, 3)[0].astype(np.int64).tolist()
        # The release's own filter: of its own file a rank keeps some keys only, of others' the wrong ones.
        assert sum(map(len, plain)) < len(KEYS) if saved_by == 3 else plain != [sorted(rank) for rank in held]


def test_without_scores_none_are_given_and_what_cannot_be_loaded_by_owner_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, module in stand_in().items():
        monkeypatch.setitem(sys.modules, name, module)
    write_dump(tmp_path, hash_roundrobin(), 1)
    with dynamicemb_loads_by_owner():
        held = load_like_dynamicemb(tmp_path, [0], 1, scores=False)
    assert len(held) == len(KEYS)
    assert {scores for _, scores, _ in held.values()} == {None}
    write_dump(tmp_path, Routing(dist_type="continuous"), 1)
    with dynamicemb_loads_by_owner(), pytest.raises(CheckpointError, match="table items was dumped under continuous"):
        load_like_dynamicemb(tmp_path, [0], 1, scores=False)
    del vars(sys.modules["dynamicemb.key_value_table"])["_iter_batches_from_files"]
    with pytest.raises(CheckpointError, match=r"has no dynamicemb\.key_value_table\._iter_batches_from_files"):
        dynamicemb_loads_by_owner().__enter__()
