"""Hot rows as they are chosen, beside what ranks ask of owners with batches that are drawn."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer_client.embedding.routing import DIST_TYPES
from trainer_client.embedding.tables import RoutedTable, choose_hot_rows

ROWS, RANKS, LOOKUPS, STEPS = 4_000, 8, 3_000, 3
TABLE = RoutedTable(name="t", embedding_dim=32, features=("f",), num_embeddings=ROWS)
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
    table, share = replace(TABLE, routing=routing), torch.arange(1, ROWS + 1).double() ** -exponent
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
    table = replace(TABLE, embedding_dim=512, num_embeddings=len(share), routing="continuous")
    choice = choose_hot_rows(table, torch.arange(len(share)), wanted_by(share, 2_000), world_size=RANKS)
    assert choice.without.heaviest_owner > 1.5
    assert choice.expected.heaviest_owner < 1.05
    assert choice.expected.busiest_link_bytes < 0.75 * choice.without.busiest_link_bytes
    assert set(choice.keys.tolist()) <= set(hot.tolist())


def test_between_nodes_a_row_that_all_want_travels_once_a_node() -> None:
    keys = torch.arange(64)  # one for each owner
    choice = choose_hot_rows(TABLE, keys, torch.ones(64), world_size=64, ranks_per_node=8)
    assert sorted(choice.keys.tolist()) == keys.tolist()
    assert choice.without.busiest_link_bytes == pytest.approx(8 * 56 * (2 * ROW_BYTES + 8))
    assert choice.expected.busiest_link_bytes == pytest.approx(63 * 2 * ROW_BYTES)
    assert choice.expected.all_to_all_bytes == 0


def test_no_row_is_hot_where_none_is_wanted_by_many() -> None:
    choice = choose_hot_rows(TABLE, torch.arange(ROWS), torch.full((ROWS,), 0.05), world_size=RANKS)
    assert not choice.keys.numel()
    assert choice.expected == choice.without
    assert not choose_hot_rows(TABLE, torch.arange(0), torch.ones(0), world_size=8).keys.numel()


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
        choose_hot_rows(TABLE, torch.tensor(keys), torch.tensor(wanted), world_size=8, ranks_per_node=per_node)
