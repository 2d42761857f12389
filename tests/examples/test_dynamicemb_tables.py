"""The part of the adapter that needs neither a GPU nor DynamicEmb."""

from typing import Any

import pytest
import torch

from examples.dynamicemb_tables import table_options
from trainer_client.embedding.tables import RoutedTable

TABLE: dict[str, Any] = {"name": "items", "embedding_dim": 12, "features": ("item",), "num_embeddings": 100_000}


@pytest.mark.parametrize(
    ("optimizer", "row_bytes"), [("sgd", 48), ("adam", 144), ("adagrad", 96), ("rowwise_adagrad", 64)]
)
def test_options_carry_routing_dtype_and_memory_for_all_values_with_their_state(optimizer: str, row_bytes: int) -> None:
    table = RoutedTable(**TABLE, routing="hash_roundrobin")
    options = table_options(table, world_size=7, optimizer=optimizer)
    assert (options["dist_type"], options["dim"], options["index_type"]) == ("hash_roundrobin", 12, torch.int64)
    assert options["embedding_dtype"] == torch.float32
    assert options["max_capacity"] % 128 == 0
    assert 0 <= options["max_capacity"] - table.rows_per_rank(7) < 128
    assert options["local_hbm_for_values"] == options["max_capacity"] * row_bytes
    assert table_options(table, world_size=2, hbm_bytes=5)["local_hbm_for_values"] == 5


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
        table_options(RoutedTable(**TABLE, **changes), world_size=2, optimizer=optimizer)
