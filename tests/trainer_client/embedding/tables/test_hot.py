"""Collections with hot rows beside the same without, on real Gloo ranks."""

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.trainer_client.balancing.redistribution.pool import GlooRanks, group_of
from tests.trainer_client.embedding.keys import OnRanks, batch_of, look_up
from trainer_client.embedding.checkpoint import load, save
from trainer_client.embedding.routing import DIST_TYPES, RoutingLike, hash_roundrobin
from trainer_client.embedding.tables import (
    KeyBatch,
    RoutedEmbeddingCollection,
    RoutedTable,
    choose_hot_rows,
    clip_grad_norm_,
)

KEYS = 40
FEATURES = ("other", "user", "item", "tag")
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9, "weight_decay": 0.1},
    "Adam": {"amsgrad": True},
    "AdamW": {},
    "Adagrad": {"initial_accumulator_value": 0.1},
    "RMSprop": {"centered": True},
    "Adamax": {},
    "NAdam": {},
    "RAdam": {},
    "Rprop": {},
    "Adadelta": {},
    "ASGD": {},
    "Adafactor": {},
}


@dataclass(frozen=True, kw_only=True)
class Program:
    """Some steps of training.

    Attributes:
        sizes: By step and rank, rows of each feature's batch.
        hot: By step, keys of each table that are hot from there on; None leaves them as they are.
    """

    world_size: int
    routings: tuple[RoutingLike, RoutingLike, RoutingLike]
    poolings: tuple[Any, Any, Any]
    deduplicate: bool
    optimizer: str
    factor: float | None
    weighted: bool
    clipped: bool
    accumulated: bool
    sizes: list[list[int]]
    hot: list[dict[str, list[int]] | None]
    seed: int


ROUTINGS = st.sampled_from([*DIST_TYPES, hash_roundrobin(3)])
POOLINGS = st.sampled_from(["none", "sum", "mean"])
HOT = st.fixed_dictionaries(
    {}, optional={name: st.lists(st.integers(0, KEYS - 1), max_size=KEYS) for name in ("users", "items", "tags")}
)
PROGRAMS = st.builds(
    Program,
    world_size=st.integers(1, 4),
    routings=st.tuples(ROUTINGS, ROUTINGS, ROUTINGS),
    poolings=st.tuples(POOLINGS, POOLINGS, POOLINGS),
    deduplicate=st.booleans(),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    factor=st.sampled_from([None, 1.0]),
    weighted=st.booleans(),
    clipped=st.booleans(),
    accumulated=st.booleans(),
    sizes=st.lists(st.lists(st.sampled_from([0, 1, 3]), min_size=4, max_size=4), min_size=3, max_size=5),
    hot=st.lists(st.none() | HOT, min_size=5, max_size=5),
    seed=st.integers(0, 2**30),
)


class Training:
    """A collection and its optimizer on this rank, in float64: only the order of sums tells two of them apart."""

    def __init__(self, program: Program, world_size: int) -> None:
        self.program, self.rank = program, dist.get_rank()
        users, items, tags = zip(program.routings, program.poolings, strict=True)
        plain: dict[str, Any] = {"num_embeddings": KEYS, "dtype": torch.float64}
        self.collection = RoutedEmbeddingCollection(
            [
                self._table("users", users, features=("user", "other"), embedding_dim=2, **plain),
                self._table("items", items, features=("item",), embedding_dim=2, **plain),
                self._table("tags", tags, features=("tag",), embedding_dim=3, **plain),
            ],
            process_group=group_of(world_size),
            deduplicate=program.deduplicate,
            gradient_divide_factor=program.factor,
        )
        make = getattr(torch.optim, program.optimizer)
        self.optimizer = make(self.collection.parameters(), lr=0.05, **OPTIMIZERS[program.optimizer])

    @staticmethod
    def _table(name: str, how: tuple[RoutingLike, Any], **changes: Any) -> RoutedTable:
        return RoutedTable(name=name, routing=how[0], pooling=how[1], **changes)

    def step(self, number: int) -> dict[str, Tensor]:
        results: dict[str, Tensor] = self.collection(draw_batch(self.program, number, self.rank))
        if number % 2 == 0 or not self.program.accumulated:
            self.optimizer.zero_grad()
        losses = [(result - at).square().sum() for at, result in enumerate(results.values())]
        torch.stack(losses).sum().backward()
        if self.program.clipped:
            clip_grad_norm_(self.collection, 1.0)
        self.optimizer.step()
        return results

    def rows(self) -> dict[str, Tensor]:
        """All that there is of the tables: keys, values and what the optimizer keeps."""
        found = {}
        for name, part in self.collection.tables.items():
            found |= {f"{name} keys": part.held_keys(), f"{name} values": part.weight.detach()}
            for kind, state in self.optimizer.state[part.weight].items():
                found[f"{name} {kind}"] = torch.as_tensor(state)
        return found


def draw_batch(program: Program, step: int, rank: int) -> KeyBatch:
    generator = torch.Generator().manual_seed(program.seed + 10 * step + rank)
    size = program.sizes[step % len(program.sizes)][rank]
    lengths = torch.randint(0, 6, (4 * size,), generator=generator)
    # half of the lookups are of a few keys.
    few = torch.randint(0, 5, (int(lengths.sum()),), generator=generator)
    values = torch.where(torch.rand(len(few), generator=generator) < 0.5, few, (few + 1) * 7 % KEYS)
    weights = torch.rand(len(values), generator=generator, dtype=torch.float64) if program.weighted else None
    return KeyBatch(features=FEATURES, values=values, lengths=lengths, batch_sizes=[size] * 4, weights=weights)


def assert_alike(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-6, atol=1e-9, msg=lambda text, name=name: f"{name} {text}"
        )


def hold(training: Training, keys: dict[str, list[int]]) -> None:
    """Names hot rows; what other ranks than 0 say does not matter."""
    chosen = {name: torch.tensor(hot, dtype=torch.int64) for name, hot in keys.items()}
    training.collection.hold_hot_rows(chosen if training.rank == 0 else None)


def train_both(program: Program) -> None:
    """In a rank: each step with hot rows and without."""
    hot, plain = (Training(program, program.world_size) for _ in range(2))
    for number in range(len(program.sizes)):
        if (chosen := program.hot[number]) is not None:
            hold(hot, chosen)
        assert_alike(hot.step(number), plain.step(number))
        assert_alike(hot.rows(), plain.rows())
    for evaluated in (hot, plain):
        evaluated.collection.eval()
    with torch.no_grad():
        batch = draw_batch(program, 77, hot.rank)
        assert_alike(hot.collection(batch), plain.collection(batch))


@settings(max_examples=16, deadline=None)
@given(PROGRAMS)
def test_training_with_hot_rows_is_training_without(ranks: GlooRanks, program: Program) -> None:
    ranks.call(train_both, [(program,)] * program.world_size)


def save_and_go_on(program: Program, loaders: int, hot: list[dict[str, list[int]]], root: str) -> None:
    """In a rank: what was trained with hot rows is saved and loaded without, and the other way, and goes on."""
    rank, both = dist.get_rank(), group_of(max(program.world_size, loaders))
    folders = [Path(root) / name for name in ("hot", "plain")]
    if rank < program.world_size:
        saved = [Training(program, program.world_size) for _ in folders]
        hold(saved[0], hot[0])
        for training, folder in zip(saved, folders, strict=True):
            for number in range(2):
                training.step(number)
            save(training.collection, folder, optimizer=training.optimizer)
    dist.barrier(both)
    if rank < loaders:
        loaded = [Training(program, loaders) for _ in folders]
        hold(loaded[1], hot[1])
        for steps in (range(2, 5), range(2, 3)):  # the second time into what has trained already, its hot rows known
            for training, folder in zip(loaded, folders, strict=True):
                load(training.collection, folder, optimizer=training.optimizer)
            for number in steps:
                assert_alike(loaded[1].step(number), loaded[0].step(number))
                assert_alike(loaded[1].rows(), loaded[0].rows())


@settings(max_examples=5, deadline=None)
@given(PROGRAMS.filter(lambda each: each.optimizer != "Adafactor"), st.integers(1, 4), st.lists(HOT, min_size=2))
def test_checkpoints_know_nothing_of_hot_rows(
    ranks: GlooRanks,
    tmp_path_factory: pytest.TempPathFactory,
    program: Program,
    loaders: int,
    hot: list[dict[str, list[int]]],
) -> None:
    root = str(tmp_path_factory.mktemp("checkpoints"))
    ranks.call(save_and_go_on, [(program, loaders, hot, root)] * max(program.world_size, loaders))


TABLE = RoutedTable(name="t", embedding_dim=2, features=("f",), num_embeddings=40, capacity=8)


def count_lookups(_: int, deduplicate: bool) -> list[int]:
    """Rows that this rank's part of the table looks up in each step."""
    collection = RoutedEmbeddingCollection([TABLE], deduplicate=deduplicate)
    collection.hold_hot_rows({"t": torch.tensor([0, 2, 4, 6, 30])})
    counts: list[int] = []
    collection.tables["t"].register_forward_pre_hook(lambda _, keys: counts.append(keys[0].numel()))
    for keys in ([0, 2, 4, 6], [0, 2, 4, 6, 0, 1], [] if collection.rank else [0, 0, 30], [30]):
        look_up(collection, f=keys).sum().backward()
    return counts


@pytest.mark.parametrize("deduplicate", [False, True])
def test_lookups_of_hot_rows_stay_at_home_once_their_keys_have_rows(two: OnRanks, deduplicate: bool) -> None:
    owner, other = two(count_lookups, deduplicate)
    # keys 0 to 6 get rows in the first step, 30 in the third; what is held is asked in lookups 1, 2 and 4.
    assert owner == [8, 4, 5, 5]
    assert other == [0, 2, 0, 0]


def train_in_halves(rank: int, dtype: torch.dtype, deduplicate: bool) -> tuple[float, bool]:
    """How far values of a half type get from those without hot rows, over the largest; and gradients near its end."""
    values, finite = [], True
    for hot in ({}, {"t": torch.arange(6)}):
        table = replace(TABLE, dtype=dtype)
        collection = RoutedEmbeddingCollection([table], gradient_divide_factor=1.0, deduplicate=deduplicate)
        collection.hold_hot_rows(hot)
        optimizer = torch.optim.SGD(collection.parameters(), lr=0.05)
        for step in range(4):
            optimizer.zero_grad()
            look_up(collection, f=[0, 1, 2, 3, 4, 5, 6 + step, rank]).float().sub(1).square().sum().backward()
            optimizer.step()
        values.append(next(collection.parameters()).detach().float())
        collection.gradient_divide_factor = 2.0
        optimizer.zero_grad()
        look_up(collection, f=[0] * 16 if rank else [1]).mul(8000).sum().backward()  # 64,000, which is half of the sum
        finite = finite and bool(next(collection.parameters()).grad.isfinite().all())  # type: ignore[union-attr]
    return float((values[0] - values[1]).abs().max() / values[0].abs().max()), finite


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("deduplicate", [False, True])
def test_half_types_are_trained_alike_up_to_their_rounding(two: OnRanks, dtype: torch.dtype, deduplicate: bool) -> None:
    apart, finite = zip(*two(train_in_halves, dtype, deduplicate), strict=True)
    assert max(apart) <= 4 * torch.finfo(dtype).eps
    assert all(finite)


def fail_with_hot_rows(rank: int) -> list[str]:
    continuous = RoutedTable(name="c", embedding_dim=2, features=("g",), num_embeddings=9, routing="continuous")
    collection = RoutedEmbeddingCollection([TABLE, continuous])
    errors = []
    wrong: list[Any] = [{"x": [1]}, {"c": [3, 9]}, {"c": [-1]}, {"t": [0.5]}, {"t": "all"}, torch.tensor([1, 2])]
    for keys in wrong:
        with pytest.raises(ValueError, match=r".*") as raised:
            collection.hold_hot_rows(keys if rank == 0 else None)
        errors.append(str(raised.value))
    collection = RoutedEmbeddingCollection([TABLE])
    collection.hold_hot_rows({"t": torch.arange(6)})
    for _ in range(2):
        look_up(collection, f=[0, 1, 2, 3])
    good = batch_of(f=[0, 9])
    wrong_length = replace(good, lengths=torch.tensor([5]))
    negative = replace(good, lengths=torch.tensor([-1, 3]), batch_sizes=[2])
    flat = replace(good, values=good.values.view(1, 2))
    for bad in (batch_of(g=[0, 9]), wrong_length, negative, flat, batch_of(f=range(0, 40, 2))):
        with pytest.raises((ValueError, RuntimeError)) as refused:
            collection(bad if rank == 1 else good)
        errors.append(str(refused.value))
        assert collection(good)["f"].shape == (2, 2)
    return errors


def test_what_one_rank_refuses_is_raised_on_all(two: OnRanks) -> None:
    first, second = two(fail_with_hot_rows)
    assert first == second
    parts = (
        "hot rows are named of table 'x'; the tables are t, c",
        "table c: hot row 9 is outside of 0 to 8",
        "table c: hot row -1 is outside of 0 to 8",
        "hot rows of table t: keys have dtype torch.float32; use int32",
        "hot rows of table t: ",
        "keys is Tensor; give a dict",
        "rank 1: the batch has no feature 'f'",
        "rank 1: lengths add up to 5, but there are 2 keys",
        "rank 1: lengths have -1; give the number of keys of each row",
        "rank 1: indices have shape (1, 2); flatten them",
        "rank 0: table t: 2",
    )
    for error, part in zip(first, parts, strict=True):
        assert error.startswith(part)


def bring_back(_: int) -> list[int]:
    """Rows that ranks hold after a state dict of before the hot rows' first lookup was loaded, and a lookup."""
    collection = RoutedEmbeddingCollection([TABLE])
    look_up(collection, f=[1])
    before = copy.deepcopy(collection.state_dict())
    collection.hold_hot_rows({"t": torch.tensor([4, 5])})
    for _ in range(2):
        look_up(collection, f=[4, 5])
    collection.load_state_dict(before)
    other = copy.deepcopy(collection)
    assert torch.equal(look_up(collection, f=[4]), look_up(other, f=[4]))
    return [each.tables["t"].used for each in (collection, other)]


def test_keys_that_a_state_dict_lacks_take_no_row_before_they_are_looked_up(two: OnRanks) -> None:
    assert two(bring_back) == [[1, 1], [1, 1]]


def load_elsewhere(rank: int) -> list[list[float]]:
    """Lookups beside a table without features, after a state without the collection's rows came to one rank."""
    unused = RoutedTable(name="a", embedding_dim=2, features=(), num_embeddings=40, routing="continuous")
    collection = RoutedEmbeddingCollection([unused, TABLE], deduplicate=False)
    model = torch.nn.ModuleDict({"tables": collection, "dense": torch.nn.Linear(2, 2)})
    plain = look_up(collection, f=[0, 1, 5]).tolist()
    collection.hold_hot_rows({"a": torch.arange(7), "t": torch.tensor([0, 1, 5])})
    for _ in range(3):
        assert look_up(collection, f=[0, 1, 5]).tolist() == plain
    if rank == 0:
        model.load_state_dict({"dense.bias": torch.zeros(2)}, strict=False)
    result: list[list[float]] = look_up(collection, f=[0, 1, 5]).tolist()
    assert result == plain
    return result


def test_a_state_without_rows_and_a_table_without_features_change_nothing(two: OnRanks) -> None:
    first, second = two(load_elsewhere)
    assert first == second


ROWS, RANKS, LOOKUPS, STEPS = 4_000, 8, 3_000, 3
CHOICE_TABLE = RoutedTable(name="t", embedding_dim=32, features=("f",), num_embeddings=ROWS)
ROW_BYTES = 128


def wanted_by(share: torch.Tensor, lookups: float) -> torch.Tensor:
    """Chance that one of so many independent lookups is of each key."""
    return 1 - (1 - share / share.sum()) ** lookups


def draw(share: torch.Tensor) -> list[torch.Tensor]:
    """Keys of some batches of all ranks, each key of a batch once."""
    generator = torch.Generator().manual_seed(1)
    batches = (torch.multinomial(share, LOOKUPS, replacement=True, generator=generator) for _ in range(STEPS * RANKS))
    return [keys.unique() for keys in batches]


def asked(table: RoutedTable, batches: list[torch.Tensor], hot: torch.Tensor) -> tuple[float, float]:
    """Bytes that a rank sends, and the heaviest owner over the mean."""
    keys = torch.cat(batches)
    keys = keys[~torch.isin(keys, hot)]
    loads = torch.bincount(table.route(keys, RANKS)[0], minlength=RANKS).float()
    sent = float(loads.sum()) / RANKS / STEPS * (RANKS - 1) / RANKS * (2 * ROW_BYTES + 8)
    return sent, float(loads.max() / loads.mean()) if loads.any() else 1.0


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(DIST_TYPES), st.floats(0, 1.5), st.sampled_from([None, 2, 4]), st.sampled_from([1e9, 1e5, 1e4]))
def test_what_is_expected_of_a_choice_comes_about(
    routing: str, exponent: float, per_node: int | None, memory: float
) -> None:
    table, share = replace(CHOICE_TABLE, routing=routing), torch.arange(1, ROWS + 1).double() ** -exponent
    choice = choose_hot_rows(
        table, torch.arange(ROWS), wanted_by(share, LOOKUPS), world_size=RANKS, ranks_per_node=per_node,
        memory_bytes=memory,
    )  # fmt: skip
    assert choice.memory_bytes == len(choice.keys) * 2 * ROW_BYTES <= memory
    assert choice.expected.busiest_link_bytes <= choice.without.busiest_link_bytes
    batches = draw(share)
    for costs, hot in ((choice.without, choice.keys[:0]), (choice.expected, choice.keys)):
        sent, heaviest = asked(table, batches, hot)
        assert sent == pytest.approx(costs.all_to_all_bytes, rel=0.05, abs=50 * ROW_BYTES)
        if sent > 1000 * ROW_BYTES:
            assert heaviest == pytest.approx(costs.heaviest_owner, rel=0.15)


def test_owners_of_a_few_popular_rows_become_as_loaded_as_the_others() -> None:
    """As in public notes: of a table by blocks of rows the first owner is asked for 2.8 times its share."""
    share = torch.ones(ROWS * 100).double()
    hot = torch.arange(0, ROWS * 100 // RANKS, 200)
    share[hot] += (2.8 - 1) / (RANKS - 1) / (1 - 1.8 / 7) * len(share) / len(hot)
    table = replace(CHOICE_TABLE, embedding_dim=512, num_embeddings=len(share), routing="continuous")
    choice = choose_hot_rows(table, torch.arange(len(share)), wanted_by(share, 2_000), world_size=RANKS)
    assert choice.without.heaviest_owner > 1.5
    assert choice.expected.heaviest_owner < 1.05
    assert choice.expected.busiest_link_bytes < 0.75 * choice.without.busiest_link_bytes
    assert set(choice.keys.tolist()) <= set(hot.tolist())


def test_between_nodes_a_row_that_all_want_travels_once_a_node() -> None:
    keys = torch.arange(64)  # one for each owner
    choice = choose_hot_rows(CHOICE_TABLE, keys, torch.ones(64), world_size=64, ranks_per_node=8)
    assert sorted(choice.keys.tolist()) == keys.tolist()
    assert choice.without.busiest_link_bytes == pytest.approx(8 * 56 * (2 * ROW_BYTES + 8))
    assert choice.expected.busiest_link_bytes == pytest.approx(63 * 2 * ROW_BYTES)
    assert choice.expected.all_to_all_bytes == 0


def test_no_row_is_hot_where_none_is_wanted_by_many() -> None:
    choice = choose_hot_rows(CHOICE_TABLE, torch.arange(ROWS), torch.full((ROWS,), 0.05), world_size=RANKS)
    assert not choice.keys.numel()
    assert choice.expected == choice.without
    assert not choose_hot_rows(CHOICE_TABLE, torch.arange(0), torch.ones(0), world_size=8).keys.numel()


@pytest.mark.parametrize(
    ("keys", "wanted", "per_node", "error"),
    [
        ([1, 2], [1.0], None, r"keys have shape \(2,\), wanted \(1,\); give one for each key"),
        ([1, 2], [0.5, 7.0], None, "wanted is 0.5 to 7; give shares of batches, from 0 to 1"),
        ([1], [float("nan")], None, "wanted is nan to nan; give shares"),
        ([1, 1], [0.5, 0.5], None, "keys has some of them twice; give each once"),
        ([1], [1.0], 3, "ranks_per_node is 3; give a divisor of world_size 8"),
    ],
)
def test_what_cannot_be_chosen_from_is_named(
    keys: list[int], wanted: list[float], per_node: int | None, error: str
) -> None:
    with pytest.raises(ValueError, match=error):
        choose_hot_rows(CHOICE_TABLE, torch.tensor(keys), torch.tensor(wanted), world_size=8, ranks_per_node=per_node)
