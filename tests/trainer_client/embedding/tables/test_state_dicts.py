"""Tables in PyTorch's own ways of keeping, copying and averaging a model."""

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import load as dcp_load
from torch.distributed.checkpoint import save as dcp_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.trainer_client.embedding.keys import OnRanks, batch_of
from trainer_client.embedding.routing import RoutingLike, hash_roundrobin
from trainer_client.embedding.tables import KeyBatch, RoutedEmbeddingCollection, RoutedTable

KEYS = torch.arange(-40, 40) * 3


def make_tables(routing: RoutingLike = "roundrobin", **changes: Any) -> list[RoutedTable]:
    return [
        RoutedTable(
            name="items.main", embedding_dim=4, features=("item",), num_embeddings=50, **changes, routing=routing
        ),
        RoutedTable(name="users", embedding_dim=4, features=("user",), num_embeddings=9, routing="continuous"),
    ]


class Model(nn.Module):
    def __init__(self, routing: RoutingLike = "roundrobin", **changes: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.sparse = nn.Sequential(RoutedEmbeddingCollection(make_tables(routing, **changes)))
        self.dense = nn.Linear(4, 2)

    def forward(self, batch: KeyBatch) -> Tensor:
        found = self.sparse(batch)
        value: Tensor = self.dense(torch.cat([found["item"], found["user"]]))
        return value


def train(model: nn.Module, steps: range, rank: int = 0) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for step in steps:
        draw = torch.Generator().manual_seed(7 * step + rank)
        items, users = (torch.randint(0, most, (count,), generator=draw) for most, count in ((80, 6), (9, 3)))
        optimizer.zero_grad()
        model(batch_of(item=KEYS[items], user=users)).square().sum().backward()
        optimizer.step()
    return optimizer


def values(model: nn.Module) -> Tensor:
    """What the model says of all keys, in evaluation."""
    model.eval()
    found: Tensor = model(batch_of(item=KEYS, user=range(9))).detach()
    model.train()
    return found


def test_a_state_dict_or_a_pickle_brings_back_all_rows_and_training_goes_on_alike() -> None:
    first, second = Model(), Model()
    train(first, range(3))
    train(second, range(5, 7))  # other keys, which must be gone
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    for assign in (False, True):
        second.load_state_dict(loaded, assign=assign)
        assert torch.equal(values(second), values(first))
    pickled = io.BytesIO()
    torch.save(first, pickled)
    pickled.seek(0)
    third = torch.load(pickled, weights_only=False)
    for model in (first, second, third):
        train(model, range(10, 13))
    assert torch.equal(values(second), values(first))
    assert torch.equal(values(third), values(first))


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"routing": hash_roundrobin(7)}, r"routing roundrobin \(here hash_roundrobin\(seed=7\)\)"),
        ({"capacity": 100}, r"weight has shape \(1024, 4\) in the state dict and \(100, 4\) here"),
    ],
)
def test_another_routing_or_capacity_is_refused_and_changes_nothing(
    other: dict[str, Any], message: str, strict: bool
) -> None:
    first, second = Model(), Model(**other)
    train(first, range(3))
    before = second.state_dict()["sparse.0.items_main_rank_0_of_1.weight"].clone()
    with pytest.raises(RuntimeError, match=rf"table items.main: .*{message}; .*load with checkpoint.load"):
        second.load_state_dict(first.state_dict(), strict=strict)
    assert torch.equal(second.state_dict()["sparse.0.items_main_rank_0_of_1.weight"], before)


@pytest.mark.parametrize("lost", ["sorted_keys", "_extra_state", "weight"])
def test_rows_without_their_keys_are_refused(lost: str) -> None:
    state = Model().state_dict()
    del state[f"sparse.0.items_main_rank_0_of_1.{lost}"]
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=f"table items.main: the state dict has .* but not {lost}"):
            Model().load_state_dict(state, strict=strict)


def test_a_state_dict_without_tables_may_be_loaded_where_strict_is_off() -> None:
    state = {name: tensor for name, tensor in Model().state_dict().items() if name.startswith("dense")}
    assert len(Model().load_state_dict(state, strict=False).missing_keys) == 6
    with pytest.raises(RuntimeError, match=r"Missing key.*items_main_rank_0_of_1\.weight"):
        Model().load_state_dict(state)


def test_copies_are_apart_and_averages_follow_the_keys() -> None:
    model = Model()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    expected = None
    for step in range(3):
        before = copy.deepcopy(model)
        train(model, range(step, step + 1))
        average.update_parameters(model)
        found = values(model)
        assert not torch.equal(found, values(before))
        assert not torch.equal(values(before), values(model))
        weight = model.sparse[0].tables["items.main"].weight.detach()  # type: ignore[union-attr,index]
        expected = weight.clone() if expected is None else expected + 0.5 * (weight - expected)
    average.eval()
    held = model.sparse[0].tables["items.main"].held_keys()  # type: ignore[union-attr,index]
    rows = average.module.sparse(batch_of(item=held, user=[]))["item"]
    assert expected is not None
    torch.testing.assert_close(rows, expected[: held.numel()])
    assert held.numel() > 8


@pytest.mark.parametrize("harm", ["another's keys", "rows twice", "averaged"])
def test_a_map_of_keys_that_something_else_wrote_is_noticed(harm: str) -> None:
    model = Model()
    train(model, range(3))
    owned = model.sparse[0].tables["items.main"]  # type: ignore[union-attr,index]
    if harm == "another's keys":
        owned.world_size = 2  # what a broadcast from another rank would leave here
        owned.sorted_keys.copy_(owned.sorted_keys.clone())
    elif harm == "rows twice":
        owned.sorted_rows[1] = owned.sorted_rows[0]
    else:
        for tensor in model.state_dict().values():  # as averages over state dicts do
            tensor.copy_(0.3 * tensor)
    with pytest.raises(ValueError, match=r"table items.main: its keys were overwritten .* load a checkpoint"):
        values(model)


def test_other_dtypes_and_devices_are_those_of_the_rows() -> None:
    model = Model()
    train(model, range(2))
    expected = values(model)
    for dtype in (torch.bfloat16, torch.float64):
        other = copy.deepcopy(model).to(dtype)
        assert values(other).dtype == dtype
        torch.testing.assert_close(values(other), expected.to(dtype), rtol=0.05, atol=0.02)
        other.train()
        assert other(batch_of(item=KEYS, user=range(9))).dtype == dtype
    empty = RoutedEmbeddingCollection(make_tables(), device="meta").to_empty(device="cpu")
    for owned in empty.tables.values():
        owned.reset_parameters()
    fresh = RoutedEmbeddingCollection(make_tables())
    batch = batch_of(item=KEYS, user=range(9))
    assert all(torch.equal(empty(batch)[name], rows) for name, rows in fresh(batch).items())


def keep_and_bring_back(rank: int, folder: str) -> None:
    other = 1 - rank
    model = Model()
    wrapped = DistributedDataParallel(model)
    optimizer = train(wrapped, range(3), rank)
    expected = values(model)
    torch.save(model.state_dict(), f"{folder}/{rank}.pt")
    torch.save(model, f"{folder}/{rank}.module")
    dist.barrier()
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=rf"users: .* rows of rank {other} of 2, and this is rank {rank} of 2"):
            Model().load_state_dict(torch.load(f"{folder}/{other}.pt", weights_only=True), strict=strict)
    with pytest.raises(
        ValueError, match=rf"rows of rank {other} of 2, and this is rank {rank} of 2; .*checkpoint.load"
    ):
        torch.load(f"{folder}/{other}.module", weights_only=False)
    again = Model()
    again.load_state_dict(torch.load(f"{folder}/{rank}.pt", weights_only=True))
    assert torch.equal(values(again), expected)
    # PyTorch's distributed checkpoint keeps one copy of what all ranks have under one name.
    weights, state = get_state_dict(wrapped, optimizer)
    dcp_save({"model": weights, "optimizer": state}, checkpoint_id=f"{folder}/dcp")
    fresh = DistributedDataParallel(Model())
    adam = torch.optim.Adam(fresh.parameters(), lr=0.1)
    weights, state = get_state_dict(fresh, adam)
    dcp_load({"model": weights, "optimizer": state}, checkpoint_id=f"{folder}/dcp")
    set_state_dict(fresh, adam, model_state_dict=weights, optim_state_dict=state)
    assert torch.equal(values(fresh), expected)
    for mine, theirs in zip(model.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(optimizer.state[mine]["exp_avg"], adam.state[theirs]["exp_avg"])
    own = RoutedEmbeddingCollection(make_tables(), process_group=dist.new_group([0, 1]))
    assert copy.deepcopy(own).group is own.group


def test_each_rank_gets_its_own_rows_back(two: OnRanks, tmp_path: Path) -> None:
    two(keep_and_bring_back, str(tmp_path))
