"""Leaves of all kinds: samples picked from tensors, arrays and lists of objects are those of plain indexing."""

from __future__ import annotations

from datetime import date
from typing import Any

import numpy as np
import pytest
import torch

from tests.trainer_client.balancing.batches.picking import picked, x
from trainer_client.balancing.batches import BatchError, BatchSpec, flatten, read_lengths


class Own:
    """An object without tensors."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Own) and other.name == self.name

    __hash__ = None  # type: ignore[assignment]


def test_strings_numbers_and_other_objects_travel_one_for_each_sample() -> None:
    batch = {
        "x": x(),
        "name": ["first", "", "third"],
        "day": (date(2026, 1, 1), None, date(2026, 3, 3)),
        "own": [Own("a"), Own("b"), Own("c")],
        "image": [torch.zeros(2), torch.ones(3), torch.ones(1)],
        "meta": [{"id": 1}, {"id": 2}, {}],
        "big": [b"", b"x" * 5000, 2**100],
    }
    spec = BatchSpec(objects=["image", "meta"])
    found = picked(batch, 2, 1, spec=spec)
    assert found["name"] == ["third", ""]
    assert found["day"] == (date(2026, 3, 3), None)
    assert found["own"] == [Own("c"), Own("b")]
    assert [image.tolist() for image in found["image"]] == [[1.0], [1.0, 1.0, 1.0]]
    assert found["meta"] == [{}, {"id": 2}]
    assert found["big"] == [2**100, b"x" * 5000]
    assert picked(batch, spec=spec)["name"] == []
    assert str(flatten(batch, spec).schema.fields[3]) == "meta: objects[], jagged by meta"


@pytest.mark.parametrize(
    "array",
    [
        np.arange(3, dtype=dtype)
        for dtype in ("uint8", "uint16", "uint32", "uint64", "int8", ">i4", "f2", "f4", ">f8", "c8", "c16", "m8[s]")
    ]
    + [
        np.array([True, False, True]),
        np.array(["2026-01-01", "NaT", "2026-03-03"], dtype="M8[D]"),
        np.array(["a", "long", ""]),
        np.array([b"a", b"long", b""]),
        np.array([[["a"], ["b"]]] * 3),
        np.array([1, "two", None], dtype=object),
        np.arange(3, dtype=np.longdouble),
        np.array([(1, 2.0)] * 3, dtype=[("a", "i4"), ("b", "f8")]),
        np.arange(6.0).reshape(2, 3).T,
        np.arange(3)[::-1],
        np.broadcast_to(np.arange(3), (3, 3)),
    ],
    ids=lambda array: f"{array.dtype}{list(array.shape)}",
)
def test_arrays_stay_arrays(array: np.ndarray) -> None:
    for samples in ([2, 0], []):
        found = picked({"x": x(), "a": array}, *samples)["a"]
        expected = array[np.array(samples, dtype=int)]
        assert type(found) is np.ndarray
        assert found.dtype.newbyteorder("=") == expected.dtype.newbyteorder("=") or found.dtype.kind in "US"
        assert found.dtype.kind == expected.dtype.kind
        np.testing.assert_array_equal(found, expected)


def test_arrays_may_be_flattened_and_count() -> None:
    batch = {"n": np.array([2, 0, 1]), "v": np.arange(3.0), "t": torch.arange(3)}
    spec = BatchSpec(rows_per_sample={"v": "n", "t": "n"})
    found = picked(batch, 2, 0, spec=spec)
    assert found["v"].tolist() == [2.0, 0.0, 1.0]
    assert found["t"].tolist() == [2, 0, 1]
    assert read_lengths(batch, "n").tolist() == [2, 0, 1]


def test_tensors_of_all_layouts_move() -> None:
    base = torch.arange(12.0).view(3, 4)
    batch = {
        "expanded": torch.tensor([[1.0]]).expand(3, 2),
        "transposed": torch.arange(6).view(2, 3).t(),
        "strided": base[:, ::2],
        "conjugated": torch.complex(base, base).conj(),
        "negated": torch.complex(base, base).conj().imag,
        "parameter": torch.nn.Parameter(base, requires_grad=False),
        "last": x(),
    }
    found = picked(batch, 2, 0)
    for name, value in batch.items():
        assert torch.equal(found[name], value[[2, 0]].resolve_conj().resolve_neg()), name


def test_torchrec_s_modules_take_a_batch_without_samples() -> None:
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    full = KeyedJaggedTensor(["a", "b"], torch.arange(4), torch.ones(4), lengths=torch.tensor([1, 0, 2, 1]))
    empty = picked({"k": full})["k"].to("cpu")
    assert {key: part.lengths().tolist() for key, part in empty.to_dict().items()} == {"a": [], "b": []}
    assert empty.to_dict()["b"].offsets().tolist() == [0]
    assert empty.to_dict()["b"].weights().tolist() == []
    sizes: dict[str, Any] = {"name": "t", "embedding_dim": 4, "num_embeddings": 9, "feature_names": ["a", "b"]}
    bags = EmbeddingBagCollection(tables=[EmbeddingBagConfig(**sizes)])
    rows = EmbeddingCollection(tables=[EmbeddingConfig(**sizes)])
    assert bags(empty).values().shape == (0, 8)
    assert rows(empty)["b"].values().shape == (0, 4)
    sum(part.values().sum() for part in rows(empty).values()).backward()


@pytest.mark.parametrize("dtype", ["<U10", "S8", ">i4", ">f8", ">M8[s]", ">U5"])
def test_arrays_keep_their_dtype(dtype: str) -> None:
    array = np.array([1, 2, 3]).astype(dtype)
    for samples in ([2, 0], []):
        found = picked({"x": x(), "a": array}, *samples)["a"]
        assert found.dtype == array.dtype
        assert found.tolist() == array[np.array(samples, dtype=int)].tolist()


def test_arrays_of_strings_become_as_wide_as_what_arrives() -> None:
    narrow = flatten({"a": np.array(["a", "b"])})
    wide = flatten({"a": np.array(["long", "words"])})
    mixed = narrow.rebuild(wide.tensors, num_samples=2, totals=wide.totals, lengths=wide.lengths)
    assert mixed.unflatten()["a"].tolist() == ["long", "words"]


def test_costs_do_not_take_pickles_for_lengths() -> None:
    batch = {"x": x(), "n": [4, 5, 6]}
    with pytest.raises(BatchError, match="'n' is a list of Python objects; make it an int32 or int64 tensor"):
        read_lengths(flatten(batch), "n")
    with pytest.raises(BatchError, match="'n' is a list"):
        read_lengths(batch, "n")
