"""Saving by several processes over Gloo, and loading under other modes and numbers of ranks."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.harness.ranks import run_ranks
from tests.trainer_client.balancing.redistribution.pool import GlooRanks, group_of
from tests.trainer_client.embedding.checkpoint.dumps import DIM, KEYS, NUM_EMBEDDINGS, values_of, write_dump
from tests.trainer_client.embedding.keys import OnRanks, make, step
from tests.trainer_client.embedding.training import HOT, PROGRAMS, ROUTINGS, Program, Training, assert_alike, hold
from trainer_client.embedding.checkpoint import CheckpointError, RoutingMismatchError, load, save
from trainer_client.embedding.dynamicemb import dynamicemb_loads_by_owner
from trainer_client.embedding.routing import Routing, RoutingLike, hash_roundrobin, owners, roundrobin
from trainer_client.embedding.tables import RoutedEmbeddingCollection, RoutedTable

Rows = dict[Any, dict[str, torch.Tensor]]


def rows_of(training: Training) -> Rows:
    """Values and state of each row that this rank holds, by table and key."""
    found = {}
    for name, part in training.collection.tables.items():
        arrays = {"values": part.weight.detach()} | {
            kind: torch.as_tensor(state) for kind, state in training.optimizer.state[part.weight].items()
        }
        for row, key in enumerate(part.held_keys().tolist()):
            found[name, key] = {kind: (each[row] if each.dim() else each).clone() for kind, each in arrays.items()}
    return found


def save_and_go_on(
    program: Program, loaders: int, loaded_as: tuple[RoutingLike, ...], hot: list[dict[str, list[int]]], root: str
) -> tuple[Rows, Rows]:
    """In a rank: what was trained with hot rows is saved and loaded without, and the other way, and goes on."""
    rank, both = dist.get_rank(), group_of(max(program.world_size, loaders))
    folders, before, after = [Path(root) / name for name in ("hot", "plain")], Rows(), Rows()
    if rank < program.world_size:
        saved = [Training(program, program.world_size) for _ in folders]
        hold(saved[0], hot[0])
        for training, folder in zip(saved, folders, strict=True):
            for number in range(2):
                training.step(number)
            save(training.collection, folder, optimizer=training.optimizer)
        before = rows_of(saved[1])
    dist.barrier(both)
    if rank < loaders:
        loaded = [Training(replace(program, routings=loaded_as), loaders) for _ in folders]
        hold(loaded[1], hot[1])
        for steps in (range(2, 5), range(2, 3)):  # the second time into what has trained already, its hot rows known
            for training, folder in zip(loaded, folders, strict=True):
                load(training.collection, folder, optimizer=training.optimizer)
            after = rows_of(loaded[1])
            for number in steps:
                assert_alike(loaded[1].step(number), loaded[0].step(number))
                assert_alike(loaded[1].rows(), loaded[0].rows())
        for table in loaded[0].collection.configs:
            keys, block = loaded[0].collection.tables[table.name].held_keys(), table.rows_per_rank(loaders)
            owner = owners(keys, table.resolved_routing, world_size=loaders, block_size=block)
            assert bool((owner == rank).all())
    return before, after


@settings(max_examples=8, deadline=None)
@given(
    PROGRAMS.filter(lambda each: each.optimizer != "Adafactor"),
    st.integers(1, 4),
    st.tuples(ROUTINGS, ROUTINGS, ROUTINGS),
    st.lists(HOT, min_size=2),
)
def test_what_ranks_save_any_ranks_load_under_any_routing_with_hot_rows_or_without(
    ranks: GlooRanks,
    tmp_path_factory: pytest.TempPathFactory,
    program: Program,
    loaders: int,
    loaded_as: tuple[RoutingLike, ...],
    hot: list[dict[str, list[int]]],
) -> None:
    root = str(tmp_path_factory.mktemp("checkpoints"))
    before, after = Rows(), Rows()
    arguments = [(program, loaders, loaded_as, hot, root)] * max(program.world_size, loaders)
    for saved, loaded in ranks.call(save_and_go_on, arguments):
        assert before.keys().isdisjoint(saved)
        assert after.keys().isdisjoint(loaded)
        before |= saved
        after |= loaded
    is_whole = {name for name, way in zip(("users", "items", "tags"), loaded_as, strict=True) if way == "continuous"}
    assert {place for place in after if place in before or place[0] not in is_whole} == before.keys()
    for place, arrays in before.items():
        assert after[place].keys() == arrays.keys()
        assert all(torch.equal(after[place][kind], array) for kind, array in arrays.items()), place


def test_without_conversion_another_routing_is_refused_with_both_named(tmp_path: Path) -> None:
    save(make(), tmp_path / "saved")
    with pytest.raises(
        RoutingMismatchError, match=r"under roundrobin over 1 rank and .* under hash_roundrobin\(seed=2\) over 1 rank"
    ):
        load(make(routing=hash_roundrobin(2)), tmp_path / "saved", convert=False)
    load(make(), tmp_path / "saved", convert=False)


def test_a_key_that_comes_twice_is_named_with_its_file(tmp_path: Path) -> None:
    keys = np.arange(0, 2 * 70_000, 2)
    for name, doubled, file in (
        ("in one chunk", np.insert(keys, 7, 4), "rank_0"),
        ("in two chunks", np.append(keys, 4), "rank_0"),
        ("under another routing", np.append(keys, 8), "rank_[01]"),
    ):
        here = tmp_path / name
        here.mkdir()
        (here / "t_opt_args.json").write_text('{"dist_type": "hash_roundrobin"}')
        ranks = 1 if file == "rank_0" else 2
        owner = owners(torch.from_numpy(doubled), hash_roundrobin(), world_size=ranks).numpy()
        for rank in range(ranks):
            mine = doubled[owner == rank]
            mine.tofile(here / f"t_emb_keys.rank_{rank}.world_size_{ranks}")
            mine.astype(np.float32).tofile(here / f"t_emb_values.rank_{rank}.world_size_{ranks}")
        table = RoutedTable(
            name="t", embedding_dim=1, features=("f",), num_embeddings=100_000, routing=hash_roundrobin()
        )
        with pytest.raises(CheckpointError, match=rf"t_emb_keys\.{file}\.world_size_\d: key [48] of table t .* twice"):
            load(RoutedEmbeddingCollection([table]), here)


def load_what_one_rank_cannot(_: int, root: str) -> None:
    table = RoutedTable(name="items", embedding_dim=DIM, features=("item",), num_embeddings=NUM_EMBEDDINGS)
    with pytest.raises(CheckpointError, match=r"rank_1\.world_size_2: key -?\d+ of table items is in the"):
        load(RoutedEmbeddingCollection([table]), Path(root) / "dump")


def test_what_is_wrong_for_one_rank_is_an_error_on_all(two: OnRanks, tmp_path: Path) -> None:
    write_dump(tmp_path / "dump", roundrobin(), 2, counter=False)
    for file in (tmp_path / "dump").glob("items_emb_*.rank_1.world_size_2"):
        file.write_bytes(file.read_bytes() * 2)
    two(load_what_one_rank_cannot, str(tmp_path))


def test_misfits_are_named(tmp_path: Path) -> None:
    collection = make("ab")
    step(collection, [], torch.arange(-4, 9))
    save(collection, tmp_path / "saved")
    for other, words in (
        (make(embedding_dim=5), r"table a has rows of shape \(3,\), not \(5,\)"),
        (make("ab", capacity=3), r"a rank gets .* or more, and it has room for 3; raise its capacity"),
        (make("x"), "no table x; it holds a, b"),
        (make(routing="continuous"), r"saved: .*a: key -?[0-9]+ is outside of this rank's rows 0 to 19"),
    ):
        with pytest.raises(CheckpointError, match=words):
            load(other, tmp_path / "saved")


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
