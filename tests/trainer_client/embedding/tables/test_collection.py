"""Real processes over Gloo against plain torch holding the whole tables in one process."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness.ranks import run_ranks
from tests.trainer_client.embedding.keys import OnRanks, batch_of, look_up
from tests.trainer_client.embedding.tables.wrapped import WRAPPERS, train_wrapped
from trainer_client.embedding.tables import KeyBatch, RoutedEmbeddingCollection, RoutedTable, clip_grad_norm_
from trainer_client.embedding.tables.tables import initial_rows

TABLE = RoutedTable(name="t", embedding_dim=2, features=("f",), num_embeddings=8)
ROWS = replace(TABLE, routing="continuous")


def look_up_nothing(rank: int) -> None:
    """Ranks without samples or keys take part, and tables without rows are trained."""
    tables = [
        replace(ROWS, name="small", features=("s",), num_embeddings=2),
        replace(TABLE, name="keys", features=("k",), pooling="mean"),
    ]
    for deduplicate in (False, True):
        collection = RoutedEmbeddingCollection(tables, deduplicate=deduplicate)
        adam = torch.optim.Adam(collection.parameters())
        for step in range(3):
            rows = 0 if rank == step else 2
            values, lengths = torch.arange(2 * rows) % 2, torch.ones(2 * rows, dtype=torch.int64)
            batch = KeyBatch(features=["s", "k"], values=values, lengths=lengths, batch_sizes=[rows, rows])
            found = collection(batch)
            assert {name: value.shape for name, value in found.items()} == {"s": (rows, 2), "k": (rows, 2)}
            adam.zero_grad()
            torch.stack([value.sum() for value in found.values()]).sum().backward()
            adam.step()
        assert len(adam.state) == 2


def train_in_wrappers(rank: int, wraps: list[str]) -> None:
    for name in wraps:
        train_wrapped(name, rank, dist.get_world_size(), torch.device("cpu"), 1e-4)
    look_up_nothing(rank)


@pytest.mark.parametrize(("world_size", "wraps"), [(2, WRAPPERS), (3, WRAPPERS[:2])])
def test_wrapped_models_train_as_one_process_does(world_size: int, wraps: list[str]) -> None:
    run_ranks(world_size, train_in_wrappers, wraps)


def overflow_on_one_rank(rank: int) -> float:
    model = nn.ModuleDict({"sparse": RoutedEmbeddingCollection([TABLE]), "dense": nn.Linear(2, 1)})
    DistributedDataParallel(model)  # the dense part starts alike
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = ShardedGradScaler(device="cpu", init_scale=1024.0)
    before = [parameter.detach().clone() for parameter in model["dense"].parameters()]
    rows = look_up(model["sparse"], f=[0, 1])  # type: ignore[arg-type]
    # The gradient of key 1, which is rank 1's, is no finite number once it is scaled.
    loss = (rows * torch.tensor([[1.0], [1e36]])).sum() + model["dense"](torch.ones(2)).sum()
    scaler.scale(loss).backward()
    finite = all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters())
    assert finite == (rank == 0)
    scaler.step(sgd)
    scaler.update()
    assert all(torch.equal(p, b) for p, b in zip(model["dense"].parameters(), before, strict=True))
    return float(scaler.get_scale())


def test_with_a_sharded_scaler_all_ranks_skip_a_step(two: OnRanks) -> None:
    assert two(overflow_on_one_rank) == [512.0, 512.0]


def use_wrongly(rank: int) -> None:
    collection = RoutedEmbeddingCollection([TABLE], process_group=init_device_mesh("cpu", (2,)))
    assert (collection.rank, collection.world_size) == (rank, 2)
    with pytest.raises(ValueError, match=r"a mesh of 2 dimensions; pass the one whose ranks share the tables"):
        RoutedEmbeddingCollection([TABLE], process_group=init_device_mesh("cpu", (2, 1)))
    dense = nn.ModuleDict({"sparse": collection, "dense": nn.Linear(2, 1)})
    model = FullyShardedDataParallel(dense, device_id=torch.device("cpu"))
    with pytest.raises(ValueError, match="FullyShardedDataParallel, which has a clip_grad_norm_ of its own"):
        clip_grad_norm_(model, 0.1)


def test_what_cannot_be_shared_or_clipped_is_named(two: OnRanks) -> None:
    two(use_wrongly)


def test_reads_a_keyed_jagged_tensor() -> None:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    jagged = KeyedJaggedTensor(keys=["f"], values=torch.tensor([5, -6, 5]), lengths=torch.tensor([1, 0, 2]))
    table = replace(TABLE, pooling="sum")
    rows = initial_rows(torch.tensor([5, -6]), table)
    expected = torch.stack([rows[0], torch.zeros(2), rows.sum(0)])
    torch.testing.assert_close(RoutedEmbeddingCollection([table])(jagged)["f"], expected)


def test_initial_values_are_spread_and_depend_on_seed_and_key() -> None:
    table = replace(TABLE, embedding_dim=8, num_embeddings=4)
    rows = initial_rows(torch.arange(20_000), table)
    assert float(rows.abs().max()) <= 0.5
    assert abs(float(rows.mean())) < 0.005
    assert abs(float(rows.std()) - 0.5 / 3**0.5) < 0.005
    assert float(torch.corrcoef(rows.T).fill_diagonal_(0).abs().max()) < 0.05
    other = initial_rows(torch.arange(100), replace(table, seed=1))
    assert float((other == rows[:100]).float().mean()) < 0.01


@pytest.mark.parametrize(
    ("table", "batch", "message"),
    [
        (replace(TABLE, capacity=2), batch_of(f=[0, 1, 2]), "table t: 3 keys do not fit into the 2 rows"),
        (replace(ROWS, num_embeddings=10), batch_of(f=range(11)), "table t: a key is outside of 0 to 9"),
        (ROWS, replace(batch_of(f=[0]), weights=torch.ones(3)), "weights has 3 elements, but there are 1 keys"),
        (ROWS, batch_of(x=[0]), "no feature 'f'"),
        (TABLE, batch_of(f=torch.ones(1)), "keys have dtype torch.float32; use int32, int64 or uint64"),
    ],
)
def test_batches_that_do_not_fit_are_refused_in_one_process(table: RoutedTable, batch: KeyBatch, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RoutedEmbeddingCollection([table])(batch)


def test_declarations_that_contradict_themselves_are_refused() -> None:
    changes: list[tuple[dict[str, Any], str]] = [
        ({"embedding_dim": 0}, "embedding_dim is 0"), ({"pooling": "max"}, "'max'"), ({"capacity": 0}, "capacity is 0"),
        ({"num_embeddings": 2.5}, "num_embeddings is 2.5"), ({"features": "f"}, "features is 'f'"),
    ]  # fmt: skip
    for change, message in changes:
        with pytest.raises(ValueError, match=message):
            replace(TABLE, **change)
    with pytest.raises(ValueError, match="feature 'f' is named twice"):
        RoutedEmbeddingCollection([TABLE, replace(TABLE, name="x")])
    with pytest.raises(ValueError, match="gradient_divide_factor is 0; give a number above 0"):
        RoutedEmbeddingCollection([TABLE], gradient_divide_factor=0)


def gradients_by_factor(rank: int) -> None:
    for factor, expected in ((None, 1.5), (1, 3.0), (6, 0.5)):
        collection = RoutedEmbeddingCollection([ROWS], gradient_divide_factor=factor)
        # Key 1 comes once from rank 0 and twice from rank 1, key 6 from neither.
        look_up(collection, f=[1] * (rank + 1)).sum().backward()
        gradient = collection.tables["t"].weight.grad
        whole = torch.zeros(8, 2)
        dist.all_gather_into_tensor(whole, gradient.contiguous())
        assert whole[1].tolist() == [expected] * 2
        assert int(whole.count_nonzero()) == 2
    # Second derivatives travel as first ones do.
    weight = collection.tables["t"].weight
    weight.grad = None
    (first,) = torch.autograd.grad(look_up(collection, f=[1, 6]).pow(3).sum(), weight, create_graph=True)
    first.sum().backward()
    # Each rank's share of the gradient is 3 x^2 / 6; its derivative is divided once more on its way.
    torch.testing.assert_close(weight.grad[rank + 1], 2 * 6 * weight.detach()[rank + 1] / 36)


def test_gradients_are_averaged_over_ranks_or_divided_as_told(two: OnRanks) -> None:
    two(gradients_by_factor)


def test_rows_are_taken_only_where_they_are_trained() -> None:
    collection, keys = RoutedEmbeddingCollection([TABLE]), torch.tensor([4, -9, 4])
    expected = initial_rows(keys, TABLE)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert torch.equal(look_up(collection, f=keys), expected)
    collection.eval()
    assert torch.equal(look_up(collection, f=keys), expected)
    assert collection.tables["t"].held_keys().numel() == 0
    collection.train()
    assert torch.equal(look_up(collection, f=keys), expected)
    assert collection.tables["t"].held_keys().tolist() == [4, -9]


def test_accumulated_and_repeated_passes_add_up() -> None:
    once, often = RoutedEmbeddingCollection([TABLE]), RoutedEmbeddingCollection([TABLE], deduplicate=True)
    keys = torch.tensor([3, 4, 3, 9])
    look_up(once, f=keys).square().sum().mul(3).backward()
    compiled = torch.compile(lambda k: look_up(often, f=k) * 1, backend="eager")
    loss = compiled(keys).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    compiled(keys).square().sum().backward()
    torch.testing.assert_close(often.tables["t"].weight.grad, once.tables["t"].weight.grad)


def fail_on_one_rank(rank: int, deduplicate: bool, hot: bool) -> list[str]:
    """Mistakes of rank 1, or rows that only rank 0 or 1 lacks, with a good batch after each."""
    tables = [
        replace(ROWS, name="rows", features=("row",), num_embeddings=10),
        replace(TABLE, name="keys", embedding_dim=3, features=("key", "other"), num_embeddings=10, capacity=8),
    ]
    collection = RoutedEmbeddingCollection(tables, deduplicate=deduplicate)
    good = batch_of(row=[1, 6], key=[2, 3], other=[1])
    if hot:
        collection.hold_hot_rows({"keys": torch.arange(4), "rows": torch.tensor([1])})
        collection(good)
    bad = [
        batch_of(row=[1], key=[3], another=[1]),
        replace(good, weights=torch.ones(2)),
        replace(good, lengths=torch.tensor([9, 9, 9])),
        replace(good, lengths=torch.tensor([-1, 3, 3])),
        replace(good, values=good.values.view(1, 5)),
        replace(good, values=good.values.float()),
        batch_of(row=[99], key=[3], other=[1]),
        batch_of(row=[1], key=range(100, 140, 2), other=[1]),  # of which all belong to rank 0
        batch_of(row=[1], key=range(101, 141, 2), other=[1]),
    ]
    messages = []
    for each in bad:
        with pytest.raises((ValueError, RuntimeError)) as refused:
            collection(each if rank == 1 else good)
        messages.append(str(refused.value))
        assert collection(good)["row"].shape == (2, 2)
    return messages


@pytest.mark.parametrize("deduplicate", [False, True])
@pytest.mark.parametrize("hot", [False, True])
def test_what_one_rank_refuses_is_raised_on_all_ranks_in_the_same_step(
    two: OnRanks, deduplicate: bool, hot: bool
) -> None:
    first, second = two(fail_on_one_rank, deduplicate, hot)
    assert first == second
    mistakes = ["the batch has no feature 'other'", "weights has 2 elements", "", "", "", "keys have dtype"]
    expected = [*(f"rank 1: {each}" for each in mistakes), "rank ", "rank 0: table keys: 2", "rank 1: table keys: 2"]
    for text, words in zip(first, expected, strict=True):
        assert text.startswith(words)
    assert "table rows: a key is outside of 0 to 9" in first[6]


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint64])
@pytest.mark.parametrize("deduplicate", [False, True])
def test_keys_of_any_integer_dtype(dtype: torch.dtype, deduplicate: bool) -> None:
    collection = RoutedEmbeddingCollection([TABLE], deduplicate=deduplicate)
    keys = torch.tensor([3, 4, 3, 9])
    assert torch.equal(look_up(collection, f=keys.to(dtype)), look_up(collection, f=keys))
