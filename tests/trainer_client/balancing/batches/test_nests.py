"""Fields of all kinds in containers of all kinds: what is picked from a batch is the batch of the picked samples."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.references.redistribution import select_samples
from tests.trainer_client.balancing.batches.helpers import select, x
from tests.trainer_client.nests import CONTAINERS, KINDS, Shape, make, nests, parts, spec_of
from trainer_client.balancing.batches import BatchError, BatchSpec, FlatBatch, flatten
from trainer_client.balancing.source import fingerprint

samples_lists = st.lists(st.integers(0, 99), max_size=6, unique=True)


def check(shape: Shape, samples: list[int], wanted: list[int]) -> None:
    batch, spec = make(shape, samples), spec_of(shape)
    seen = fingerprint(batch)
    assert seen == fingerprint(make(shape, samples)) != fingerprint(make(shape, [one + 1 for one in samples]))
    flat = flatten(batch, spec)
    assert parts(flat.unflatten(spec)) == parts(batch)
    found = select_samples(pickle.loads(pickle.dumps(flat)), np.array(wanted, dtype=int)).unflatten(spec)
    assert parts(found) == parts(make(shape, [samples[index] for index in wanted]))
    empty: FlatBatch = pickle.loads(pickle.dumps(flat.empty()))
    assert parts(empty.unflatten(spec)) == parts(make(shape, []))
    assert empty.schema.hash == flat.schema.hash


def test_each_kind_in_each_container() -> None:
    shapes = [(container, kind, "floats") for kind in KINDS for container in ("dict", "tuple")]
    shapes += [(container, "keyed", "counted") for container in CONTAINERS]
    for shape in shapes:
        check(shape, [5, 7, 8, 12], [3, 0, 1])


@settings(max_examples=60, deadline=None)
@given(shape=nests, samples=samples_lists.filter(bool), data=st.data())
def test_what_is_picked_is_the_batch_of_the_picked_samples(shape: Shape, samples: list[int], data: Any) -> None:
    check(shape, samples, data.draw(st.lists(st.sampled_from(range(len(samples))), max_size=6)))


def outcome(batch: Any, spec: BatchSpec) -> Any:
    """Everything that flattening tells, or its error."""
    try:
        flat = flatten(batch, spec)
    except BatchError as error:
        return str(error)
    return flat.structure, flat.num_samples, flat.totals.tolist(), flat.lengths.tolist(), parts(flat.unflatten(spec))


@settings(max_examples=40, deadline=None)
@given(shapes=st.tuples(nests, nests), sizes=st.tuples(samples_lists, samples_lists))
def test_the_batches_before_do_not_matter(shapes: tuple[Shape, Shape], sizes: tuple[list[int], list[int]]) -> None:
    """One spec for both shapes: where what is declared is not there, both times the error is the same."""
    for spec in map(spec_of, shapes):
        for shape, samples in ((shapes[0], sizes[0]), (shapes[1], sizes[1]), (shapes[0], sizes[1])):
            batch = make(shape, samples)
            assert outcome(batch, spec) == outcome(batch, replace(spec))


def test_nested_tensors_that_share_their_offsets_do_so_again() -> None:
    offsets = torch.tensor([0, 2, 2, 5])
    one, other = (torch.nested.nested_tensor_from_jagged(torch.rand(5), offsets) for _ in range(2))
    apart = torch.nested.nested_tensor_from_jagged(torch.rand(5), torch.tensor([0, 1, 2, 5]))
    back = flatten({"one": one, "apart": apart, "other": other}).unflatten()
    assert torch.equal((back["one"] + back["other"]).values(), (one + other).values())
    assert back["one"].offsets() is back["other"].offsets() is not back["apart"].offsets()


def test_arrays_of_strings_keep_their_dtype_or_become_as_wide_as_what_arrives() -> None:
    narrow, wide = flatten({"a": np.array(["a", "b"])}), flatten({"a": np.array(["long", "words"])})
    assert narrow.rebuild(wide.tensors, wide.lengths).unflatten()["a"].tolist() == ["long", "words"]
    for dtype in ("<U10", "S8", ">U5"):
        array = np.array([1, 2, 3]).astype(dtype)
        assert [select({"a": array}, *picked)["a"].dtype for picked in ([2, 0], [])] == [array.dtype] * 2


def test_what_is_none_in_some_batches_keeps_its_declarations() -> None:
    spec = BatchSpec(rows_per_sample={"v.n": 2, "w": "n"}, padded={"p": "n"}, objects=["o"], batch_size=["s"])
    full = {"x": x(), "v": {"n": torch.zeros(6)}, "w": torch.zeros(3), "n": torch.ones(3).long(),
            "p": torch.zeros(3, 1), "o": [[1]] * 3, "s": 3}  # fmt: skip
    for batch in (full, {"x": x(), **dict.fromkeys(list(full)[1:])}, full):
        assert select(batch, 0, spec=spec).keys() == full.keys()


def test_derived_values_see_no_values_of_another_batch() -> None:
    seen: list[Any] = []

    def total(batch: Any) -> int:
        seen.append((batch["total"], batch["more"][0]))
        return int(batch["x"].sum())

    spec = BatchSpec(derived={"total": total, "more.0": lambda batch: len(batch["x"])})
    found = select_samples(flatten({"x": x(), "total": 33, "more": (3, x())}, spec), np.array([1, 2])).unflatten()
    assert (found["total"], found["more"][0], seen) == (23, 2, [(None, None)])
    wrong = flatten({"x": x(), "total": 33}, BatchSpec(derived={"total": lambda batch: 1 // 0}))
    with pytest.raises(ZeroDivisionError) as caught:
        wrong.unflatten()
    assert "'total', declared in derived" in caught.value.__notes__[0]
