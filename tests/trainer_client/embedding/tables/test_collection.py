"""Real processes over Gloo against plain torch holding the whole tables in one process."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.harness.ranks import run_ranks
from tests.trainer_client.embedding.tables.whole import train_beside_whole
from trainer_client.embedding.tables import KeyBatch, RoutedEmbeddingCollection, RoutedTable
from trainer_client.embedding.tables.tables import initial_rows


def train_on_ranks(rank: int) -> None:
    for deduplicate in (False, True):
        train_beside_whole(rank, dist.get_world_size(), deduplicate=deduplicate)
    train_beside_whole(rank, dist.get_world_size(), deduplicate=True, hot=True)


def test_ranks_compute_what_one_process_computes() -> None:
    run_ranks(3, train_on_ranks)


@pytest.mark.parametrize("deduplicate", [False, True])
def test_one_process_without_a_process_group(deduplicate: bool) -> None:
    train_beside_whole(0, 1, deduplicate=deduplicate)


def test_reads_a_keyed_jagged_tensor() -> None:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    jagged = KeyedJaggedTensor(keys=["item"], values=torch.tensor([5, -6, 5]), lengths=torch.tensor([1, 0, 2]))
    table = RoutedTable(name="items", embedding_dim=3, features=("item",), num_embeddings=10, pooling="sum")
    results = RoutedEmbeddingCollection([table])(jagged)
    rows = initial_rows(torch.tensor([5, -6]), table)
    torch.testing.assert_close(results["item"], torch.stack([rows[0], torch.zeros(3), rows.sum(0)]))


def test_initial_values_are_spread_and_depend_on_seed_and_key() -> None:
    table = RoutedTable(name="t", embedding_dim=8, features=("f",), num_embeddings=4)
    rows = initial_rows(torch.arange(20_000), table)
    assert float(rows.abs().max()) <= 0.5
    assert abs(float(rows.mean())) < 0.005
    assert abs(float(rows.std()) - 0.5 / 3**0.5) < 0.005
    assert float(torch.corrcoef(rows.T).fill_diagonal_(0).abs().max()) < 0.05
    other = RoutedTable(name="t", embedding_dim=8, features=("f",), num_embeddings=4, seed=1)
    assert float((initial_rows(torch.arange(100), other) == rows[:100]).float().mean()) < 0.01


def look_up_one(collection: RoutedEmbeddingCollection, keys: Tensor, lengths: Tensor) -> Tensor:
    batch = KeyBatch(features=["f"], values=keys, lengths=lengths, batch_sizes=[lengths.numel()])
    found: Tensor = collection(batch)["f"]
    return found


@pytest.mark.parametrize(
    ("feature", "keys", "weights", "message"),
    [
        ("f", 3, None, "table k: 3 keys do not fit into the 2 rows"),
        ("user", 11, None, "table users: a key is outside of 0 to 9"),
        ("user", 1, 3, "weights has 3 elements, but there are 1 keys"),
        ("x", 1, None, "no feature 'user'"),
    ],
)
def test_batches_that_do_not_fit_are_refused(feature: str, keys: int, weights: int | None, message: str) -> None:
    kinds: dict[str, Any] = {"f": {"name": "k", "capacity": 2}}
    other: dict[str, Any] = {"name": "users", "routing": "continuous"}
    table = RoutedTable(
        embedding_dim=2, features=("f" if feature == "f" else "user",), num_embeddings=10, **kinds.get(feature, other)
    )
    batch = KeyBatch(
        features=[feature],
        values=torch.arange(keys),
        lengths=torch.tensor([keys]),
        batch_sizes=[1],
        weights=None if weights is None else torch.ones(weights),
    )
    with pytest.raises(ValueError, match=message):
        RoutedEmbeddingCollection([table])(batch)


def test_declarations_that_contradict_themselves_are_refused() -> None:
    plain: dict[str, Any] = {"name": "t", "embedding_dim": 1, "features": ("f",), "num_embeddings": 1}
    for change, message in (
        ({"embedding_dim": 0}, "embedding_dim is 0"),
        ({"pooling": "max"}, "'max'"),
        ({"capacity": 0}, "capacity is 0"),
    ):
        with pytest.raises(ValueError, match=message):
            RoutedTable(**(plain | change))
    with pytest.raises(ValueError, match="feature 'f' is named twice"):
        RoutedEmbeddingCollection([RoutedTable(**plain), RoutedTable(**(plain | {"name": "x"}))])


def gradients_by_factor(rank: int) -> None:
    table = RoutedTable(name="t", embedding_dim=2, features=("f",), num_embeddings=8, routing="continuous")
    for factor, expected in ((None, 1.5), (1, 3.0), (6, 0.5)):
        collection = RoutedEmbeddingCollection([table], gradient_divide_factor=factor)
        # Key 1 comes once from rank 0 and twice from rank 1, key 6 from neither.
        found = look_up_one(collection, torch.tensor([1] * (rank + 1)), torch.tensor([rank + 1]))
        found.sum().backward()
        gradient = collection.tables["t"].weight.grad
        whole = torch.zeros(8, 2)
        dist.all_gather_into_tensor(whole, gradient.contiguous())
        assert whole[1].tolist() == [expected] * 2
        assert int(whole.count_nonzero()) == 2
    with pytest.raises(ValueError, match="gradient_divide_factor is 0; give a number above 0"):
        RoutedEmbeddingCollection([table], gradient_divide_factor=0)
    # Second derivatives travel as first ones do.
    found = look_up_one(collection, torch.tensor([1, 6]), torch.tensor([2]))
    weight = collection.tables["t"].weight
    weight.grad = None
    (first,) = torch.autograd.grad(found.pow(3).sum(), weight, create_graph=True)
    first.sum().backward()
    # Each rank's share of the gradient is 3 x^2 / 6; its derivative is divided once more on its way.
    torch.testing.assert_close(weight.grad[rank + 1], 2 * 6 * weight.detach()[rank + 1] / 36)


def test_gradients_are_averaged_over_ranks_or_divided_as_told() -> None:
    run_ranks(2, gradients_by_factor)


def look_up_nothing(rank: int) -> None:
    """Ranks without samples or keys take part, and tables without rows are trained."""
    tables = [
        RoutedTable(name="small", embedding_dim=2, features=("s",), num_embeddings=2, routing="continuous"),
        RoutedTable(name="keys", embedding_dim=2, features=("k",), num_embeddings=9, pooling="mean"),
    ]
    for deduplicate in (False, True):
        collection = RoutedEmbeddingCollection(tables, deduplicate=deduplicate)
        adam = torch.optim.Adam(collection.parameters())
        for step in range(3):
            rows = 0 if rank == step else 2
            found = collection(
                KeyBatch(
                    features=["s", "k"],
                    values=torch.arange(2 * rows) % 2,
                    lengths=torch.ones(2 * rows, dtype=torch.int64),
                    batch_sizes=[rows, rows],
                )
            )
            assert {name: value.shape for name, value in found.items()} == {"s": (rows, 2), "k": (rows, 2)}
            adam.zero_grad()
            torch.stack([value.sum() for value in found.values()]).sum().backward()
            adam.step()
        assert len(adam.state) == 2


def test_empty_batches_and_tables_without_rows_on_a_rank() -> None:
    run_ranks(3, look_up_nothing)


def test_rows_are_taken_only_where_they_are_trained() -> None:
    table = RoutedTable(name="t", embedding_dim=2, features=("f",), num_embeddings=8)
    collection = RoutedEmbeddingCollection([table])
    keys, lengths = torch.tensor([4, -9, 4]), torch.tensor([3])
    expected = initial_rows(keys, table)
    with torch.no_grad():
        assert torch.equal(look_up_one(collection, keys, lengths), expected)
    with torch.inference_mode():
        assert torch.equal(look_up_one(collection, keys, lengths), expected)
    collection.eval()
    assert torch.equal(look_up_one(collection, keys, lengths), expected)
    assert collection.tables["t"].held_keys().numel() == 0
    collection.train()
    assert torch.equal(look_up_one(collection, keys, lengths), expected)
    assert collection.tables["t"].held_keys().tolist() == [4, -9]


def test_accumulated_and_repeated_passes_add_up() -> None:
    table = RoutedTable(name="t", embedding_dim=2, features=("f",), num_embeddings=8)
    once, often = RoutedEmbeddingCollection([table]), RoutedEmbeddingCollection([table], deduplicate=True)
    keys, lengths = torch.tensor([3, 4, 3, 9]), torch.tensor([3, 1])
    look_up_one(once, keys, lengths).square().sum().mul(3).backward()
    compiled = torch.compile(lambda k, n: look_up_one(often, k, n) * 1, backend="eager")
    loss = compiled(keys, lengths).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    compiled(keys, lengths).square().sum().backward()
    torch.testing.assert_close(often.tables["t"].weight.grad, once.tables["t"].weight.grad)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint64])
@pytest.mark.parametrize("deduplicate", [False, True])
def test_keys_of_any_integer_dtype(dtype: torch.dtype, deduplicate: bool) -> None:
    table = RoutedTable(name="t", embedding_dim=2, features=("f",), num_embeddings=8)
    collection = RoutedEmbeddingCollection([table], deduplicate=deduplicate)
    keys, lengths = torch.tensor([3, 4, 3, 9]), torch.tensor([3, 1])
    assert torch.equal(look_up_one(collection, keys.to(dtype), lengths), look_up_one(collection, keys, lengths))
    with pytest.raises(ValueError, match=r"keys have dtype torch.float32; use int32, int64 or uint64"):
        look_up_one(collection, keys.float(), lengths)


def fail_on_one_rank(rank: int, deduplicate: bool) -> list[str]:
    """Mistakes of rank 1, or rows that only rank 0 or 1 lacks, with a good batch after each."""
    tables = [
        RoutedTable(name="rows", embedding_dim=2, features=("row",), num_embeddings=10, routing="continuous"),
        RoutedTable(name="keys", embedding_dim=3, features=("key", "other"), num_embeddings=10, capacity=8),
    ]
    collection = RoutedEmbeddingCollection(tables, deduplicate=deduplicate)

    def batch(row: list[int], key: list[int], features: tuple[str, ...] = ("row", "key", "other")) -> KeyBatch:
        values, lengths = torch.tensor([*row, *key, 1]), torch.tensor([len(row), len(key), 1])
        return KeyBatch(features=features, values=values, lengths=lengths, batch_sizes=[1, 1, 1])

    good = batch([1, 6], [2, 3])
    bad = [
        batch([1], [3], ("row", "key", "another")),
        replace(good, weights=torch.ones(2)),
        replace(good, lengths=torch.tensor([9, 9, 9])),
        batch([99], [3]),
        batch([1], list(range(100, 140, 2))),  # of which all belong to rank 0
        batch([1], list(range(101, 141, 2))),
    ]  # fmt: skip
    told = []
    for each in bad:
        try:
            collection(each if rank == 1 else good)
            told.append("")
        except (ValueError, RuntimeError) as error:
            told.append(str(error))
        assert collection(good)["row"].shape == (2, 2)
    return told


@pytest.mark.parametrize("deduplicate", [False, True])
def test_what_one_rank_refuses_is_raised_on_all_ranks_in_the_same_step(deduplicate: bool) -> None:
    results = run_ranks(2, fail_on_one_rank, deduplicate)
    assert results[0] == results[1]
    said = ("no feature 'other'", "weights has 2 elements", "", "rows: a key is outside", "keys: 2", "keys: 2")
    for text, words, rank in zip(results[0], said, (1, 1, 1, None, 0, 1), strict=True):
        assert words in text
        assert text.startswith("rank " if rank is None else f"rank {rank}: "), text
