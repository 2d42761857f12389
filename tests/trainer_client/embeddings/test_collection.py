"""Real processes over Gloo against plain torch holding the whole tables in one process."""

import pytest
import torch
import torch.distributed as dist

from tests.trainer_client.embeddings.whole import TABLES, Whole, check_rows, loss_of, make_batch
from tests.trainer_client.ranks import run_ranks
from trainer_client.embeddings import KeyBatch, KeyTable, RoutedEmbeddingCollection, RoutedTable
from trainer_client.embeddings.tables import initial_rows


def train_and_compare(rank: int) -> None:
    num_ranks = dist.get_world_size()
    for deduplicate in (False, True):
        collection, whole = RoutedEmbeddingCollection(TABLES, deduplicate=deduplicate), Whole()
        ours = torch.optim.Adam(collection.parameters(), lr=0.1)
        theirs = torch.optim.Adam(whole.weights.values(), lr=0.1)
        for step in range(3):
            ours.zero_grad()
            theirs.zero_grad()
            expected = [whole.look_up(make_batch(other, step)) for other in range(num_ranks)]
            results = collection(make_batch(rank, step))
            for name, value in expected[rank].items():
                torch.testing.assert_close(results[name], value)
            loss_of(results).backward()
            torch.stack([loss_of(result) for result in expected]).sum().backward()
            ours.step()
            theirs.step()
        check_rows(collection, whole, rank, num_ranks)


def test_ranks_compute_what_one_process_computes() -> None:
    run_ranks(3, train_and_compare)


@pytest.mark.parametrize("deduplicate", [False, True])
def test_one_process_without_a_process_group(deduplicate: bool) -> None:
    batch = make_batch(0, 0)
    results = RoutedEmbeddingCollection(TABLES, deduplicate=deduplicate)(batch)
    for name, value in Whole().look_up(batch).items():
        torch.testing.assert_close(results[name], value)


def test_reads_a_keyed_jagged_tensor() -> None:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    jagged = KeyedJaggedTensor(keys=["item"], values=torch.tensor([5, -6, 5]), lengths=torch.tensor([1, 0, 2]))
    table = RoutedTable(name="items", embedding_dim=3, features=("item",), num_embeddings=10, pooling="sum")
    results = RoutedEmbeddingCollection([table])(jagged)
    rows = initial_rows(torch.tensor([5, -6]), table)
    torch.testing.assert_close(results["item"], torch.stack([rows[0], torch.zeros(3), rows.sum(0)]))


def test_evaluation_inserts_nothing() -> None:
    table = RoutedTable(name="items", embedding_dim=3, features=("item",), num_embeddings=10)
    owned = KeyTable(table, num_ranks=1, device=torch.device("cpu"))
    keys = torch.tensor([4, -9, 4], dtype=torch.int32)
    expected = initial_rows(keys.long(), table)
    owned.eval()
    torch.testing.assert_close(owned(keys), expected)
    assert owned.held_keys().numel() == 0
    owned.train()
    torch.testing.assert_close(owned(keys), expected)
    assert owned.held_keys().tolist() == [-9, 4]


def test_initial_values_are_spread_and_depend_on_seed_and_key() -> None:
    table = RoutedTable(name="t", embedding_dim=8, features=("f",), num_embeddings=4)
    rows = initial_rows(torch.arange(20_000), table)
    assert float(rows.abs().max()) <= 0.5
    assert abs(float(rows.mean())) < 0.005
    assert abs(float(rows.std()) - 0.5 / 3**0.5) < 0.005
    assert float(torch.corrcoef(rows.T).fill_diagonal_(0).abs().max()) < 0.05
    other = RoutedTable(name="t", embedding_dim=8, features=("f",), num_embeddings=4, seed=1)
    assert float((initial_rows(torch.arange(100), other) == rows[:100]).float().mean()) < 0.01


def test_refusals_name_table_and_value() -> None:
    table = RoutedTable(name="users", embedding_dim=2, features=("user",), num_embeddings=10, routing="continuous")
    with pytest.raises(ValueError, match="feature 'user' is named twice"):
        RoutedEmbeddingCollection([table, RoutedTable(name="x", embedding_dim=2, features=("user",), num_embeddings=1)])
    with pytest.raises(ValueError, match="outside of 0 to 9"):
        RoutedEmbeddingCollection([table])(
            KeyBatch(features=["user"], values=torch.tensor([10]), lengths=torch.tensor([1]), batch_sizes=[1])
        )
    with pytest.raises(ValueError, match="no feature 'user'"):
        RoutedEmbeddingCollection([table])(
            KeyBatch(features=["x"], values=torch.tensor([1]), lengths=torch.tensor([1]), batch_sizes=[1])
        )
    small = RoutedTable(name="k", embedding_dim=2, features=("f",), num_embeddings=1, capacity=2)
    with pytest.raises(ValueError, match="3 keys do not fit into the 2 rows"):
        RoutedEmbeddingCollection([small])(
            KeyBatch(features=["f"], values=torch.arange(3), lengths=torch.tensor([3]), batch_sizes=[1])
        )
    for change, message in (({"embedding_dim": 0}, "embedding_dim is 0"), ({"pooling": "max"}, "'max'")):
        with pytest.raises(ValueError, match=message):
            RoutedTable(**({"name": "t", "embedding_dim": 1, "features": (), "num_embeddings": 1} | change))  # type: ignore[arg-type]
