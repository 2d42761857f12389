"""The part of the adapter that needs neither a GPU nor DynamicEmb."""

from typing import Any

import pytest
import torch

from examples.dynamicemb_tables import table_options
from trainer_client.embedding.tables import RoutedTable


def make_table(**changes: Any) -> RoutedTable:
    plain = {"name": "items", "embedding_dim": 12, "features": ("item",), "num_embeddings": 100_000}
    return RoutedTable(**(plain | changes))


@pytest.mark.parametrize("dist_type", ["roundrobin", "hash_roundrobin"])
def test_options_carry_routing_dtype_and_a_whole_number_of_buckets(dist_type: str) -> None:
    options = table_options(make_table(routing=dist_type, dtype=torch.bfloat16), world_size=7)
    assert options["dist_type"] == dist_type
    assert options["embedding_dtype"] == torch.bfloat16
    assert options["index_type"] == torch.int64
    assert options["dim"] == 12
    assert options["max_capacity"] % 128 == 0
    assert 0 <= options["max_capacity"] - make_table().rows_per_rank(7) < 128


@pytest.mark.parametrize(
    ("optimizer", "row_bytes"), [("sgd", 48), ("adam", 144), ("adagrad", 96), ("rowwise_adagrad", 64)]
)
def test_by_default_all_values_are_in_hbm_with_their_optimizer_state(optimizer: str, row_bytes: int) -> None:
    options = table_options(make_table(capacity=1000), world_size=2, optimizer=optimizer)
    assert options["max_capacity"] == 1024
    assert options["local_hbm_for_values"] == 1024 * row_bytes
    assert table_options(make_table(), world_size=2, hbm_bytes=5)["local_hbm_for_values"] == 5


@pytest.mark.parametrize(
    ("changes", "optimizer", "message"),
    [
        ({"routing": "continuous"}, "adam", "items: continuous routing sends row numbers"),
        ({"dtype": torch.float64}, "adam", "items: dtype is torch.float64"),
        ({}, "lamb", "optimizer is 'lamb'"),
    ],
)
def test_refusals(changes: dict[str, Any], optimizer: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        table_options(make_table(**changes), world_size=2, optimizer=optimizer)
