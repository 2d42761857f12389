"""Containers and leaves of all kinds: samples picked from such a batch are those of plain indexing."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from dataclasses import InitVar, dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any, Generic, NamedTuple, TypeVar

import attrs
import numpy as np
import pydantic
import pytest
import torch
from torchrec.sparse.jagged_tensor import JaggedTensor

from tests.trainer_client.balancing.batches.picking import picked, picked_unsent, x
from trainer_client.balancing.batches import BatchError, BatchSpec, flatten, read_lengths

T = TypeVar("T")


@dataclass
class Computed:
    """Attributes that only `__post_init__` sets, a field that is none of its arguments, and a cached property."""

    tokens: torch.Tensor
    scale: InitVar[float] = 2.0
    doubled: torch.Tensor = field(init=False)

    def __post_init__(self, scale: float) -> None:
        self.doubled = self.tokens * scale
        self.tripled = self.tokens * 3
        self.longest = int(self.tokens.max())

    @property
    def first(self) -> torch.Tensor:
        return self.tokens[:1]

    @cached_property
    def total(self) -> int:
        return int(self.tokens.sum())


def test_what_a_dataclass_sets_by_itself_moves_too() -> None:
    batch = Computed(x())
    assert batch.total == 33
    spec = BatchSpec(derived={"longest": lambda moved: int(moved.tokens.max())})
    found = picked_unsent(batch, 1, spec=spec)
    assert type(found) is Computed
    assert found.doubled.tolist() == [22.0]
    assert found.tripled.tolist() == [33]
    assert found.longest == 11
    assert found.total == 11, "computed again"
    assert found.first.tolist() == [11]


def test_what_follows_from_samples_says_so() -> None:
    with pytest.raises(BatchError, match=r"'longest' is a int \(12\); declare it in batch_size .* in derived, with"):
        flatten(Computed(x()))


class WithProperty:
    """An own class, whose attribute is behind a property without a setter."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values
        self.__secret = values + 1

    @property
    def values(self) -> torch.Tensor:
        return self._values

    def secret(self) -> torch.Tensor:
        return self.__secret


class Slotted:
    __slots__ = ("__hidden", "left")

    def __init__(self, left: torch.Tensor) -> None:
        self.left = left
        self.__hidden = left * 2

    def hidden(self) -> torch.Tensor:
        return self.__hidden


@dataclass(frozen=True, slots=True)
class Frozen(Generic[T]):
    value: T
    more: torch.Tensor | None = None


@dataclass
class Alias(Generic[T]):
    value: T


def test_own_classes_move_with_their_attributes() -> None:
    found = picked({"a": WithProperty(x()), "b": Slotted(x()), "c": Frozen(x()), "d": Alias[torch.Tensor](x())}, 2, 0)
    assert found["a"].values.tolist() == [12, 10]
    assert found["a"].secret().tolist() == [13, 11]
    assert found["b"].left.tolist() == [12, 10]
    assert found["b"].hidden().tolist() == [24, 20]
    assert found["c"].value.tolist() == [12, 10]
    assert found["c"].more is None
    assert found["d"].value.tolist() == [12, 10]


@attrs.frozen
class Attrs:
    items: torch.Tensor
    weights: torch.Tensor | None = None


@attrs.define
class Mutable:
    items: torch.Tensor
    largest: int = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.largest = int(self.items.max())


class Model(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(arbitrary_types_allowed=True, extra="allow", frozen=True)
    items: torch.Tensor
    title: list[str]
    nothing: None = None
    _private: Any = pydantic.PrivateAttr(default=None)


def test_attrs_and_pydantic_classes_come_back_without_validation() -> None:
    model = Model(items=x(), title=["a", "b", "c"], extra=x() * 2)
    model._private = x() * 3
    batch = {"attrs": Attrs(x(), x() * 2), "mutable": Mutable(x()), "model": model}
    found = picked(batch, 2, spec=BatchSpec(derived={"mutable.largest": largest_item}))
    assert type(found["attrs"]) is Attrs
    assert found["attrs"].weights.tolist() == [24]
    assert found["mutable"].largest == 12
    assert type(found["model"]) is Model
    assert found["model"].items.tolist() == [12]
    assert found["model"].title == ["c"]
    assert found["model"].extra.tolist() == [24]
    assert found["model"]._private.tolist() == [36]
    assert found["model"].model_fields_set == model.model_fields_set
    assert found["model"].model_copy().items.tolist() == [12]


def largest_item(batch: dict[str, Any]) -> int:
    return int(batch["mutable"].items.max())


class Bag(dict[str, Any]):
    """A dict with attributes."""

    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.offsets = items["x"] * 2


class Encoding(UserDict[str, Any]):
    def __getattr__(self, name: str) -> Any:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


def test_subclasses_of_dicts_keep_their_attributes() -> None:
    batch = {"bag": Bag(x=x()), "encoding": Encoding(x=x()), "ordered": OrderedDict(x=x())}
    batch["encoding"].rest = x() * 2  # type: ignore[attr-defined]
    found = picked(batch, 1, 2)
    assert found["bag"].offsets.tolist() == [22, 24]
    assert type(found["encoding"]) is Encoding
    assert found["encoding"].x.tolist() == [11, 12]
    assert found["encoding"].rest.tolist() == [22, 24]
    assert read_lengths(batch, "encoding.x").tolist() == [10, 11, 12]


class Point(NamedTuple):
    place: torch.Tensor
    other: Any = None

    def norm(self) -> torch.Tensor:
        return self.place.abs()


def test_named_tuples_keep_their_methods_and_torch_s_own_are_tuples_too() -> None:
    found = picked({"p": Point(-x(), (None, [None, Point(x())])), "max": torch.stack([x(), -x()], 1).max(dim=1)}, 0)
    assert found["p"].norm().tolist() == [10]
    assert found["p"].other[1][1].place.tolist() == [10]
    assert found["max"].values.tolist() == [10]
    assert found["max"].indices.tolist() == [0]


def test_tensordicts_and_tensorclasses_move() -> None:
    from tensordict import NonTensorStack, TensorDict, tensorclass

    @tensorclass
    class Sample:
        rows: torch.Tensor
        label: Any
        absent: Any = None

    inner = TensorDict({"deep": torch.arange(6).view(3, 2)}, batch_size=[3, 2], names=["sample", "step"])
    batch = TensorDict(
        {"x": x(), "inner": inner, "name": NonTensorStack("a", "b", "c"), "kind": "train"}, batch_size=[3]
    )
    spec = BatchSpec(shared=["kind"], derived={"sum": torch_sum})
    batch["sum"] = torch.zeros(3)
    found = picked_unsent(batch, 2, 1, spec=spec)
    assert type(found) is TensorDict
    assert found.batch_size == (2,)
    assert found["x"].tolist() == [12, 11]
    assert found["inner", "deep"].tolist() == [[4, 5], [2, 3]]
    assert found["inner"].batch_size == (2, 2)
    assert found["inner"].names == ["sample", "step"]
    assert list(found["name"]) == ["c", "b"]
    assert found["kind"] == "train"
    assert found["sum"].tolist() == [23, 23]
    assert picked_unsent(batch[:0], spec=spec)["name"] == []
    free = TensorDict({"x": x()})
    assert picked(free, 1).batch_size == ()
    sample = Sample(rows=x(), label=x() * 2, batch_size=[3])
    assert type(picked_unsent(sample, 1, spec=BatchSpec())) is Sample
    assert picked_unsent(sample, 1, spec=BatchSpec()).label.tolist() == [22]


def torch_sum(batch: Any) -> torch.Tensor:
    return batch["x"].sum().expand(batch["x"].shape[0])


def test_what_is_none_in_some_batches_keeps_its_declarations() -> None:
    spec = BatchSpec(rows_per_sample={"v.n": 2, "w": "j"}, padded={"p": "j"}, objects=["o"], batch_size=["s"])
    full = {
        "x": x(), "v": {"n": torch.zeros(6)}, "w": torch.zeros(3), "j": JaggedTensor(x(), lengths=torch.ones(3).long()),
        "p": torch.zeros(3, 1), "o": [[1]] * 3, "s": 3,
    }  # fmt: skip
    for batch in (full, {"x": x(), **dict.fromkeys(list(full)[1:])}, full):
        assert picked(batch, 0, spec=spec).keys() == full.keys()


def test_batches_are_copied_where_loaders_use_their_memory_again() -> None:
    memory, array = x(), np.arange(3)
    flats = [flatten({"x": memory, "a": array}, BatchSpec(copy=copy)) for copy in (True, False)]
    memory.zero_()
    array[:] = 0
    assert flats[0].unflatten()["x"].tolist() == [10, 11, 12]
    assert flats[0].unflatten()["a"].tolist() == [0, 1, 2]
    assert flats[1].unflatten()["x"].tolist() == [0, 0, 0]


def test_a_default_device_does_not_matter() -> None:
    batch = {"p": torch.zeros(3, 2), "names": ["a", "b", "c"], "q": torch.ones(3, 4), "n": torch.tensor([1, 4, 2])}
    spec = BatchSpec(padded={"p": "n", "q": "n"} | {"p": _whole()})
    with torch.device("meta"):
        found = picked_unsent(batch, 1, 2, spec=spec)
    assert found["q"].tolist() == [[1.0] * 4, [1.0, 1.0, 0.0, 0.0]]
    assert found["names"] == ["b", "c"]


def _whole() -> Any:
    from trainer_client.balancing.batches import Padded

    return Padded()


def test_namespaces_are_classes_that_hold_tensors() -> None:
    found = picked(SimpleNamespace(x=x(), inner=SimpleNamespace(y=x() * 2), nothing=None), 2, 0)
    assert found.x.tolist() == [12, 10]
    assert found.inner.y.tolist() == [24, 20]


def test_a_tensordict_has_its_fields_by_name() -> None:
    from tensordict import TensorDict

    batch = TensorDict({"count": torch.tensor([3, 1]), "other": torch.rand(2)}, batch_size=[2])
    assert read_lengths(batch, "count").tolist() == [3, 1]
    with pytest.raises(BatchError, match=r"the batch has no 'cuont': .* in a dict of count, other"):
        read_lengths(batch, "cuont")
