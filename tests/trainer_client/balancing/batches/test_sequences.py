"""Lists and tuples are read by declaration and by what they hold, never by how long they are or by their values."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from datetime import date
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.trainer_client.balancing.batches.helpers import select, x
from trainer_client.balancing.batches import BatchError, BatchSpec, flatten
from trainer_client.balancing.batches.kinds import PICKLES

Pair = namedtuple("Pair", "left right")


@dataclass
class Meta:
    """What a sample is about, without tensors."""

    name: str
    tags: Any = None


def pickles_of(batch: Any, spec: BatchSpec | None = None) -> set[str]:
    return {leaf.path for leaf in flatten(batch, spec).structure.leaves if leaf.label == PICKLES}


def is_objects(value: Any, samples: int = 3, spec: BatchSpec | None = None) -> bool:
    """Whether `v` of a batch is one object for each sample; read after a batch of another kind, too."""
    return pickles_of({"x": x(samples), "v": value}, spec) == {"v"}


PER_SAMPLE: dict[str, Any] = {
    "values that are all None": lambda n: [None] * n,
    "some None": lambda n: [None if i % 2 else f"c{i}" for i in range(n)],
    "empty dicts": lambda n: [{} for _ in range(n)],
    "dicts": lambda n: [{"id": i, "tags": ["a"] * i} for i in range(n)],
    "dataclasses": lambda n: [Meta(f"{i}", ["a"]) for i in range(n)],
    "named tuples": lambda n: [Pair(i, "b") for i in range(n)],
    "namespaces": lambda n: [SimpleNamespace(name=str(i)) for i in range(n)],
    "dates": lambda n: [date(2026, 1, 1 + i) for i in range(n)],
    "numbers of NumPy": lambda n: [np.float32(i) for i in range(n)],
    "sets": lambda n: [{i} for i in range(n)],
}


@pytest.mark.parametrize("kind", PER_SAMPLE)
@pytest.mark.parametrize("samples", [0, 1, 2, 5])
def test_lists_without_tensors_hold_one_object_for_each_sample(kind: str, samples: int) -> None:
    values = PER_SAMPLE[kind](samples)
    assert is_objects(values, samples)
    if samples:
        found = select({"x": x(samples), "v": values}, samples - 1, 0)["v"]
        assert list(found) == [values[-1], values[0]]
        with pytest.raises(BatchError, match=rf"'x' holds {samples + 1} samples, 'v' {samples}; declare .* objects"):
            flatten({"x": x(samples + 1), "v": values})


NESTED: dict[str, Any] = {
    "lists": [["a", "b", "c"], ["d"], []],
    "a square": [["a", "b", "c"]] * 3,
    "empty lists": [[], [], []],
    "lists or None": [None, ["a"], None],
    "tuples": (("a", "b", "c"),) * 2,
    "dicts of lists only": [{"tags": ["a", "b", "c"]}] * 3,
}


@pytest.mark.parametrize("kind", NESTED)
def test_lists_in_lists_must_be_declared(kind: str) -> None:
    values = NESTED[kind]
    for samples in (1, 2, 3):
        with pytest.raises(BatchError, match=r"'v' is a (list|tuple) with lists in it.*objects=\{'v'\}.*'v\.\*'"):
            flatten({"x": x(samples), "v": values})
    if len(values) == 3:
        assert select({"x": x(), "v": values}, 2, 0, spec=BatchSpec(objects=["v"]))["v"] == [values[2], values[0]]


def test_lists_in_lists_move_as_they_are_declared() -> None:
    square = [[f"{row}{column}" for column in "abc"] for row in range(3)]
    rows = select({"x": x(), "v": square}, 2, 0, spec=BatchSpec(objects=["v"]))["v"]
    assert rows == [["2a", "2b", "2c"], ["0a", "0b", "0c"]]
    columns = select({"x": x(), "v": square}, 2, 0, spec=BatchSpec(objects=["v.*"]))["v"]
    assert columns == [["0c", "0a"], ["1c", "1a"], ["2c", "2a"]]


def test_lists_with_tensors_are_containers_whatever_their_length() -> None:
    for samples in (1, 2, 3):
        batch = {
            "x": x(samples),
            "v": [x(samples), None],
            "w": (x(samples), ["a"] * samples),
            "arrays": [np.ones(samples)],
        }
        assert pickles_of(batch) == {"w.1"}
    with pytest.raises(BatchError, match=r"'m.0.id' is a int \(1\).*; if 'm' holds one entry .* declare it in objects"):
        flatten({"x": x(), "m": [{"id": 1, "image": torch.zeros(2)}] * 3})
    assert select({"x": x(), "pair": (None, None)}, 1, spec=BatchSpec(rows_per_sample={"pair.0": 1}))["pair"] == (
        None, None,
    )  # fmt: skip
