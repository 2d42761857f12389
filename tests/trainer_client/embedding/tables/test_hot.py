"""Collections with hot rows beside the same without, on real Gloo ranks."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer_client.balancing.redistribution.pool import GlooRanks
from tests.trainer_client.embedding.keys import OnRanks, look_up
from tests.trainer_client.embedding.training import PROGRAMS, Program, Training, assert_alike, draw_batch, hold
from trainer_client.embedding.routing import DIST_TYPES
from trainer_client.embedding.tables import RoutedEmbeddingCollection, RoutedTable, choose_hot_rows


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


def name_wrongly(rank: int) -> list[str]:
    continuous = RoutedTable(name="c", embedding_dim=2, features=("g",), num_embeddings=9, routing="continuous")
    collection = RoutedEmbeddingCollection([TABLE, continuous])
    errors = []
    wrong: list[Any] = [{"x": [1]}, {"c": [3, 9]}, {"c": [-1]}, {"t": [0.5]}, {"t": "all"}, torch.tensor([1, 2])]
    for keys in wrong:
        with pytest.raises(ValueError, match=r".*") as raised:
            collection.hold_hot_rows(keys if rank == 0 else None)
        errors.append(str(raised.value))
    return errors


def test_hot_rows_that_rank_0_names_wrongly_are_an_error_on_all(two: OnRanks) -> None:
    first, second = two(name_wrongly)
    assert first == second
    parts = (
        "hot rows are named of table 'x'; the tables are t, c",
        "table c: hot row 9 is outside of 0 to 8",
        "table c: hot row -1 is outside of 0 to 8",
        "hot rows of table t: keys have dtype torch.float32; use int32",
        "hot rows of table t: ",
        "keys is Tensor; give a dict",
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


def test_between_nodes_a_row_that_all_want_travels_once_a_node() -> None:
    keys = torch.arange(64)  # one for each owner
    choice = choose_hot_rows(CHOICE_TABLE, keys, torch.ones(64), world_size=64, ranks_per_node=8)
    assert sorted(choice.keys.tolist()) == keys.tolist()
    assert choice.without.busiest_link_bytes == pytest.approx(8 * 56 * (2 * ROW_BYTES + 8))
    assert choice.expected.busiest_link_bytes == pytest.approx(63 * 2 * ROW_BYTES)
    assert choice.expected.all_to_all_bytes == 0


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
