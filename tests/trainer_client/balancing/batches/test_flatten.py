"""Every supported kind of batch goes through and back; everything else gets an error that says what to do."""

from __future__ import annotations

import pickle
import random
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from benchmarks.references.redistribution import select_samples
from tests.trainer_client.random_batches import Case, assert_same, cases
from trainer_client.balancing.batches import BatchError, BatchSpec, FlatBatch, flatten, read_lengths


@dataclass(frozen=True, slots=True)
class Frozen:
    items: KeyedJaggedTensor
    label: torch.Tensor
    size: int


@dataclass
class Plain:
    inner: Frozen
    optional: torch.Tensor | None = None
    created: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.created += 1


class Pair(NamedTuple):
    left: torch.Tensor
    right: list[Any]


def keyed(weights: bool = True) -> KeyedJaggedTensor:
    """Keys out of order: z holds 1, 2, 0 values, a holds 0, 1, 3."""
    return KeyedJaggedTensor(
        ["z", "a"],
        torch.arange(7),
        torch.arange(7) / 2 if weights else None,
        lengths=torch.tensor([1, 2, 0, 0, 1, 3], dtype=torch.int32),
    )


def everything() -> tuple[Plain, BatchSpec]:
    nested = torch.nested.nested_tensor_from_jagged(torch.arange(10.0).reshape(5, 2), torch.tensor([0, 2, 2, 5]))
    pair = Pair(torch.rand(3, 2), [JaggedTensor(torch.arange(4), offsets=torch.tensor([0, 1, 1, 4])), None, nested])
    inner = Frozen(keyed(), torch.arange(6).reshape(6, 1), 3)
    batch = Plain(inner, torch.rand(3))
    batch.created = 9
    batch.extra = pair  # type: ignore[attr-defined]
    return batch, BatchSpec(rows_per_sample={"inner.label": 2}, batch_size=["inner.size"], shared=["created"])


def test_nested_dataclasses_come_back_with_their_types() -> None:
    batch, spec = everything()
    flat = flatten(batch, spec)
    half = select_samples(flat, np.array([2, 0])).unflatten()
    assert type(half) is Plain
    assert type(half.inner) is Frozen
    assert half.created == 9, "__post_init__ does not run"
    assert half.inner.size == 2
    assert half.inner.label.tolist() == [[4], [5], [0], [1]]
    assert torch.equal(half.optional, batch.optional[[2, 0]])  # type: ignore[index]
    items = half.inner.items
    assert items.keys() == ["z", "a"]
    assert items.stride() == 2
    assert items.lengths().dtype == torch.int32
    assert items["z"].values().tolist() == [0]
    assert items["a"].values().tolist() == [4, 5, 6]
    assert items["a"].weights().tolist() == [2.0, 2.5, 3.0]
    assert items.length_per_key() == [1, 3]
    assert items.offset_per_key() == [0, 1, 4]


def test_containers_keep_their_types_and_order() -> None:
    counted: defaultdict[str, Any] = defaultdict(list, {"n": torch.arange(3)})
    nested = torch.nested.nested_tensor_from_jagged(torch.arange(10.0).reshape(5, 2), torch.tensor([0, 2, 2, 5]))
    batch = {
        "b": Pair(torch.arange(3), [JaggedTensor(torch.arange(4), lengths=torch.tensor([1, 0, 3])), None, ()]),
        "a": OrderedDict(y=torch.arange(3), x=(torch.arange(3), {})),
        7: [counted, nested],
    }
    found = select_samples(flatten(batch), np.array([2])).unflatten()
    assert list(found) == ["b", "a", 7]
    assert type(found["b"]) is Pair
    assert found["b"].right[0].values().tolist() == [1, 2, 3]
    assert found["b"].right[1:] == [None, ()]
    assert type(found["a"]) is OrderedDict
    assert list(found["a"]) == ["y", "x"]
    assert found["a"]["x"][1] == {}
    assert found[7][0].default_factory is list
    assert found[7][1].layout is torch.jagged
    assert [row.tolist() for row in found[7][1].unbind()] == [[[4.0, 5.0], [6.0, 7.0], [8.0, 9.0]]]


def test_a_bare_tensor_is_a_batch() -> None:
    assert flatten(torch.arange(4)).unflatten().tolist() == [0, 1, 2, 3]


def test_flattened_rows_by_counts_and_by_a_jagged_field() -> None:
    batch = {
        "items": keyed(),
        "count": torch.tensor([2, 0, 1]),
        "scores": torch.arange(3.0),
        "per_item": torch.arange(4) * 10,
    }
    spec = BatchSpec(rows_per_sample={"scores": "count", "per_item": "items.a"})
    flat = flatten(batch, spec)
    assert flat.num_jagged == 3  # per_item shares the lengths of items.a
    assert flat.structure.columns == ("count", "items.a", "items.z")
    assert flat.lengths.tolist() == [[2, 0, 1], [0, 1, 2], [1, 3, 0]]
    found = select_samples(flat, np.array([2, 0])).unflatten()
    assert found["scores"].tolist() == [2, 0, 1]
    assert found["per_item"].tolist() == [10, 20, 30]


def test_sizes_are_the_bytes_of_each_sample() -> None:
    flat = flatten({"items": keyed(), "x": torch.zeros(3, 5, dtype=torch.int16)})
    # 8 bytes a value, 4 a weight, 10 of x, and 4 for the length of each of the two keys.
    assert flat.sizes.tolist() == [12 * 1 + 18, 12 * 3 + 18, 12 * 3 + 18]


def test_shared_values_stay() -> None:
    names = ["a", "b"]
    batch = {"x": torch.arange(3), "meta": {"names": names, "scale": torch.tensor(2.0)}, "rate": 0.5}
    flat = flatten(batch, BatchSpec(shared=["meta", "ra*"]))
    assert flat.empty().unflatten()["meta"]["names"] == names
    assert flat.to("cpu").unflatten()["rate"] == 0.5
    assert [str(one) for one in flat.schema.fields] == ["meta: shared", "rate: shared", "x: int64[], 1 rows per sample"]


def test_batch_size_as_a_tensor() -> None:
    batch = {"x": torch.arange(3), "n": torch.tensor(3, dtype=torch.int16)}
    found = select_samples(flatten(batch, BatchSpec(batch_size=["n"])), np.array([1])).unflatten()
    assert found["n"].item() == 1
    assert found["n"].dtype == torch.int16


@settings(max_examples=60, deadline=None)
@given(case=cases(max_ranks=1))
def test_unflatten_and_pickle_keep_every_bit(case: Case) -> None:
    flat = case.batches[0]
    spec = BatchSpec(
        rows_per_sample={
            **{leaf.path: leaf.rows for leaf in flat.structure.leaves if leaf.rows > 1},
            **{
                leaf.path: flat.structure.columns[leaf.columns[0]]
                for leaf in flat.structure.leaves
                if leaf.path.startswith("counted") and leaf.columns
            },
        },
        batch_size=["size"],
    )
    assert_same(flatten(flat.unflatten(), spec), flat)
    assert_same(pickle.loads(pickle.dumps(flat)), flat)
    empty: FlatBatch = pickle.loads(pickle.dumps(flat.empty()))
    assert empty.schema.hash == flat.schema.hash
    assert flatten(empty.unflatten(), spec).num_samples == 0


def test_schema_does_not_depend_on_the_order_of_keys() -> None:
    batch = {f"k{index}": torch.zeros(2, index) for index in range(6)}
    keys = list(batch)
    random.Random(3).shuffle(keys)
    one, other = flatten(batch), flatten({key: batch[key] for key in keys})
    assert one.schema.hash == other.schema.hash
    assert len(one.schema.hash) == 16


def test_schemas_that_differ_say_how() -> None:
    one = flatten({"x": torch.zeros(3), "w": keyed(weights=False)["z"]})
    other = flatten({"x": torch.zeros(3, dtype=torch.float64), "y": torch.zeros(3), "w": keyed(weights=False)["z"]})
    assert one.schema.hash != other.schema.hash
    assert one.schema.diff(other.schema, own="rank 0", others="rank 3").split("\n") == [
        "rank 0 has x: float32[], 1 rows per sample; rank 3 has x: float64[], 1 rows per sample",
        "rank 0 has no y; rank 3 has y: float32[], 1 rows per sample",
    ]
    assert one.schema.diff(one.schema) == ""


def refused(batch: Any, message: str, spec: BatchSpec | None = None) -> None:
    with pytest.raises(BatchError, match=message):
        flatten(batch, spec)


class OnDevice(torch.Tensor):
    """A tensor that says it is on another device."""

    is_cpu = False  # type: ignore[assignment]


def test_lengths_on_a_device_are_not_waited_for_unless_allowed() -> None:
    on_device = JaggedTensor(torch.arange(3), lengths=torch.tensor([1, 2]).as_subclass(OnDevice))
    refused({"v": on_device}, "lengths of 'v' are only on .*allow_sync=True")
    assert flatten({"v": on_device}, allow_sync=True).lengths.tolist() == [[1], [2]]
    flat = flatten({"v": on_device}, lengths=np.array([[1], [2]]))
    assert flat.lengths.tolist() == [[1], [2]]
    with pytest.raises(BatchError, match=r"lengths has shape \(1, 1\); the batch has 2 samples"):
        flatten({"v": on_device}, lengths=np.array([[3]]))


def test_lengths_known_only_to_a_device_say_so() -> None:
    flat = flatten({"v": keyed()["a"]})
    moved = flat.rebuild(flat.tensors, num_samples=3, totals=flat.totals, lengths_tensor=flat.lengths_tensor)
    with pytest.raises(BatchError, match="only on its device"):
        _ = moved.lengths
    assert moved.unflatten()["v"].lengths().tolist() == [0, 1, 3]


def test_lengths_by_path() -> None:
    batch, spec = everything()
    for source in (batch, flatten(batch, spec)):
        assert read_lengths(source, "inner.items.a").tolist() == [0, 1, 3]
    flat = flatten({"n": torch.tensor([4, 5]), "x": torch.zeros(2)})
    assert flat.lengths_of("n").tolist() == [4, 5]
    with pytest.raises(BatchError, match="'x' is no jagged field nor an integer per sample"):
        flat.lengths_of("x")
    pair = {"p": Pair(torch.arange(2), [torch.tensor([3, 4])])}
    assert read_lengths(pair, "p.left").tolist() == [0, 1]
    assert read_lengths(pair, "p.right.0").tolist() == [3, 4]


def test_nested_tensors_that_share_their_offsets_do_so_again() -> None:
    offsets = torch.tensor([0, 2, 2, 5])
    one, other = (torch.nested.nested_tensor_from_jagged(torch.rand(5), offsets) for _ in range(2))
    apart = torch.nested.nested_tensor_from_jagged(torch.rand(5), torch.tensor([0, 1, 2, 5]))
    back = flatten({"one": one, "apart": apart, "other": other}).unflatten()
    assert torch.equal((back["one"] + back["other"]).values(), (one + other).values())
    assert back["one"].offsets() is back["other"].offsets() is not back["apart"].offsets()
