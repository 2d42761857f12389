"""Optimizer state of tables: what is kept, what later keys find, and what is refused."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.trainer_client.embedding.keys import make, step, weight
from trainer_client.embedding.checkpoint import CheckpointError, convert, load, open_checkpoint, save
from trainer_client.embedding.checkpoint.dcp import RECORD
from trainer_client.embedding.checkpoint.optimizers import Layout
from trainer_client.embedding.checkpoint.record import ArraySpec, TableRecord, from_json, to_json
from trainer_client.embedding.routing import roundrobin


class Lion(torch.optim.Optimizer):
    """An optimizer of a user's own, which cannot be made from its options alone."""

    def __init__(self, params: Any, *, secret: object) -> None:
        self.secret = secret
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("average", torch.zeros_like(p))
                state.setdefault("level", torch.zeros(p.shape[0]))
                state["spare"] = None
                state["count"] = state.get("count", 0.0) + 1
                state["average"].lerp_(p.grad, 0.5)
                state["level"] += p.grad.abs().sum(1)
                p.sub_(group["lr"] * state["average"].sign())


def test_an_optimizer_of_ones_own_is_kept_by_the_shapes_of_its_state(tmp_path: Path) -> None:
    first, second = make(), make()
    mine, other = (Lion(c.parameters(), secret=1) for c in (first, second))
    step(first, [mine], torch.arange(5))
    save(first, tmp_path / "saved", optimizer=mine)
    load(second, tmp_path / "saved", optimizer=other)
    for collection, optimizer in ((first, mine), (second, other)):
        step(collection, [optimizer], torch.arange(3, 9))
    assert torch.equal(weight(second), weight(first))
    assert mine.state[weight(first)].pop("spare") is None
    for name, value in mine.state[weight(first)].items():
        assert torch.equal(torch.as_tensor(other.state[weight(second)][name]), torch.as_tensor(value))
    mine.state[weight(first)]["level"] = torch.zeros(7)
    with pytest.raises(CheckpointError, match="table a: Lion keeps level for all of its rows together"):
        save(first, tmp_path / "again", optimizer=mine)
    with pytest.raises(CheckpointError, match="table a: Adafactor keeps col_var for all of its rows together"):
        save(first, tmp_path / "again", optimizer=torch.optim.Adafactor(first.parameters()))
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("options", [{}, {"capturable": True}, {"fused": True}])
def test_a_number_of_such_an_optimizer_comes_back_where_pytorchs_would_keep_it(options: dict[str, bool]) -> None:
    weight, other = (nn.Parameter(torch.empty(5, 3, device="meta")) for _ in range(2))
    optimizer = Lion([weight], secret=1)
    optimizer.param_groups[0] |= options
    optimizer.add_param_group({"params": [other]})
    record = TableRecord(
        name="a", routing=roundrobin(), world_size=1, num_embeddings=20, rows=(5,),
        arrays={"optimizer.average": ArraySpec(dtype="float32", shape=(3,))}, scalars={"step": 1.0},
    )  # fmt: skip
    layout = Layout.of(optimizer, weight, "a", record)
    assert layout.rows["average"].shape == (1, 3)
    assert layout.numbers["step"].device.type == ("meta" if options else "cpu")


def test_an_optimizer_that_does_not_hold_a_table_is_refused_on_both_ways(tmp_path: Path) -> None:
    collection = make("ab")
    everything = torch.optim.Adam(collection.parameters())
    halves: list[torch.optim.Optimizer] = [torch.optim.Adam([weight(collection, n)]) for n in "ab"]
    step(collection, halves, torch.arange(4))
    with pytest.raises(CheckpointError, match=r"table b: the optimizer given does not hold its rows; .* not of a copy"):
        save(collection, tmp_path / "saved", optimizer=halves[0])
    assert not (tmp_path / "saved").exists()
    save(collection, tmp_path / "saved", optimizer=halves)
    before = weight(collection).detach().clone()
    with pytest.raises(CheckpointError, match="table a: the optimizer given does not hold its rows"):
        load(collection, tmp_path / "saved", optimizer=torch.optim.Adam(make("ab").parameters()))
    assert torch.equal(weight(collection), before)
    load(collection, tmp_path / "saved", optimizer=everything)
    assert torch.equal(
        everything.state[weight(collection, "b")]["exp_avg"], halves[1].state[weight(collection, "b")]["exp_avg"]
    )
    weight(collection, "b").requires_grad_(False)  # frozen, so no optimizer need have it
    save(collection, tmp_path / "frozen", optimizer=halves[0])


@pytest.mark.parametrize(
    ("saved", "loaded", "message"),
    [
        (None, torch.optim.Adam, "was saved without optimizer state; leave `optimizer` out"),
        (torch.optim.SGD, torch.optim.Adam, "exp_avg, exp_avg_sq, step"),
        (torch.optim.Adam, torch.optim.SGD, r"state exp_avg, exp_avg_sq, step of Adam, and this SGD keeps none"),
        (torch.optim.Adam, torch.optim.RMSprop, "this RMSprop keeps square_avg, step; give an optimizer with the same"),
    ],
)
def test_state_of_another_kind_is_refused_before_anything_changes(
    saved: Any, loaded: Any, message: str, tmp_path: Path
) -> None:
    first, second = make(), make()
    optimizer = (
        saved(first.parameters(), lr=0.1, **({"momentum": 0.9} if saved is torch.optim.SGD else {})) if saved else None
    )
    step(first, [optimizer] if optimizer else [], torch.arange(4))
    save(first, tmp_path / "saved", optimizer=optimizer)
    other = loaded(second.parameters(), lr=0.1)
    with pytest.raises(CheckpointError, match=message):
        load(second, tmp_path / "saved", optimizer=other)
    assert second.tables["a"].held_keys().numel() == 0
    assert not other.state
    load(second, tmp_path / "saved")
    assert second.tables["a"].held_keys().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.Adagrad, torch.optim.RMSprop])
def test_what_was_saved_before_the_first_step_is_loaded_as_that(kind: Any, tmp_path: Path) -> None:
    first, used = make(), make()
    optimizer, other = (kind(collection.parameters(), lr=0.1) for collection in (first, used))
    save(first, tmp_path / "saved", optimizer=optimizer)
    step(used, [other], torch.arange(9))
    load(used, tmp_path / "saved", optimizer=other)
    before, after = (each.state_dict()["state"] for each in (optimizer, other))
    torch.testing.assert_close(after, before)


@pytest.mark.parametrize("routing", ["continuous", "roundrobin"])
def test_loading_replaces_what_a_used_collection_holds(routing: str, tmp_path: Path) -> None:
    first, used = make(routing=routing), make(routing=routing)
    adagrad = [torch.optim.Adagrad(c.parameters(), lr=0.1, initial_accumulator_value=0.5) for c in (first, used)]
    step(first, [adagrad[0]], torch.tensor([3, 1, 2]))
    save(first, tmp_path / "saved", optimizer=adagrad[0])
    for keys in (torch.arange(8, 20), torch.arange(4)):
        step(used, [adagrad[1]], keys)
    load(used, tmp_path / "saved", optimizer=adagrad[1])
    assert used.tables["a"].held_keys().tolist() == first.tables["a"].held_keys().tolist()
    for collection, optimizer in zip((first, used), adagrad, strict=True):
        step(collection, [optimizer], torch.arange(1, 11))
    assert torch.equal(weight(used), weight(first))
    assert torch.equal(adagrad[1].state[weight(used)]["sum"], adagrad[0].state[weight(first)]["sum"])


def test_a_row_stays_where_it_was_so_that_a_whole_optimizer_state_fits(tmp_path: Path) -> None:
    first, second = make(), make()
    adam = [torch.optim.Adam(c.parameters(), lr=0.1) for c in (first, second)]
    for keys in (torch.tensor([9, 2, 17, 4]), torch.tensor([5, 11, 2])):
        step(first, [adam[0]], keys)
    save(first, tmp_path / "saved")
    load(second, tmp_path / "saved")
    adam[1].load_state_dict(copy.deepcopy(adam[0].state_dict()))
    for collection, optimizer in zip((first, second), adam, strict=True):
        step(collection, [optimizer], torch.arange(1, 12))
    assert torch.equal(weight(second), weight(first))


def test_keys_that_come_after_a_load_into_more_rows_find_fresh_state(tmp_path: Path) -> None:
    first = make(capacity=8)
    rprop = torch.optim.Rprop(first.parameters(), lr=0.25)
    step(first, [rprop], torch.arange(6))
    save(first, tmp_path / "free", optimizer=rprop)
    step(first, [rprop], torch.arange(8))  # no row is left to tell
    save(first, tmp_path / "full", optimizer=rprop)
    for name, lr in (("free", 0.5), ("full", 0.25)):
        wide = make(capacity=30)
        other = torch.optim.Rprop(wide.parameters(), lr=lr)
        load(wide, tmp_path / name, optimizer=other)
        assert set(other.state[weight(wide)]["step_size"][8:].flatten().tolist()) == {0.25}


def test_records_of_the_first_version_are_read(tmp_path: Path) -> None:
    collection = make()
    adam = torch.optim.Adam(collection.parameters())
    step(collection, [adam], torch.arange(3))
    save(collection, tmp_path / "saved", optimizer=adam)
    document = json.loads(to_json(list(open_checkpoint(tmp_path / "saved").records.values())))
    document["format_version"] = 1
    for table in document["tables"]:
        del table["optimizer"], table["fresh"]
    (record,) = from_json(json.dumps(document), where=RECORD)
    assert record.scalars == {"step": 1.0}
    assert (record.optimizer, record.fresh) == ("", {})
    for other, words in (
        ({"format_version": 3}, "format version 3; this release reads 1 to 2"),
        ({"tables": [document["tables"][0] | {"hash_identity": "x"}]}, "table a was routed by hash 'x'; this release"),
    ):
        with pytest.raises(CheckpointError, match=words):
            from_json(json.dumps(document | other), where=RECORD)


def test_state_comes_back_from_a_dump_as_it_went(tmp_path: Path) -> None:
    first, second = make(), make()
    adagrad = [torch.optim.Adagrad(c.parameters(), lr=0.1, initial_accumulator_value=0.5) for c in (first, second)]
    step(first, [adagrad[0]], torch.arange(5))
    save(first, tmp_path / "saved", optimizer=adagrad[0])
    convert(open_checkpoint(tmp_path / "saved"), tmp_path / "dump", world_size=1, target_format="dynamicemb")
    load(second, tmp_path / "dump", optimizer=adagrad[1])
    for collection, optimizer in zip((first, second), adagrad, strict=True):
        step(collection, [optimizer], torch.arange(3, 9))
    assert torch.equal(weight(second), weight(first))
