"""What a flattened batch tells: schema, lengths, sizes, padding, and what lists and tuples hold."""

from __future__ import annotations

import math
import pickle
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from benchmarks.references.redistribution import gather_samples, select_samples
from tests.trainer_client.balancing.batches.helpers import OnDevice, select, x
from tests.trainer_client.nests import DTYPES, as_bytes, random_bits
from trainer_client.balancing.batches import BatchError, BatchSpec, MaxLength, Padded, flatten, read_lengths
from trainer_client.balancing.batches.contents import OBJECTS
from trainer_client.balancing.batches.schema import describe, digest


class Pair(NamedTuple):
    left: torch.Tensor
    right: list[Any]


def keyed(weights: bool = True) -> KeyedJaggedTensor:
    """Keys out of order: z holds 1, 2, 0 values, a holds 0, 1, 3."""
    lengths = torch.tensor([1, 2, 0, 0, 1, 3], dtype=torch.int32)
    return KeyedJaggedTensor(["z", "a"], torch.arange(7), torch.arange(7) / 2 if weights else None, lengths=lengths)


@settings(max_examples=50, deadline=None)
@given(
    rows=st.lists(st.lists(st.lists(st.integers(0, 8), max_size=3), min_size=1, max_size=4), min_size=2, max_size=2),
    samples=st.lists(st.lists(st.integers(0, 99), min_size=2, max_size=2), min_size=1, max_size=5),
    weighted=st.booleans(),
    data=st.data(),
)
def test_deduplicated_samples_are_embedded_as_before(
    rows: list[list[list[int]]], samples: list[list[int]], weighted: bool, data: st.DataObject
) -> None:
    positions = [[sample[key] % len(rows[key]) for sample in samples] for key in (1, 0)]
    values = torch.tensor([value for row in rows[0] + rows[1] for value in row], dtype=torch.int64)
    batch = KeyedJaggedTensor(
        ["z", "a"],
        values,
        torch.rand(len(values)) if weighted else None,
        lengths=torch.tensor([len(row) for row in rows[0] + rows[1]]),
        # of as many rows in each key, TorchRec wants no strides
        stride_per_key_per_rank=None if len(rows[0]) == len(rows[1]) else [[len(rows[0])], [len(rows[1])]],
        inverse_indices=(["a", "z"], torch.tensor(positions)),
    )
    pooling = PoolingType.SUM if weighted else PoolingType.MEAN
    tables = [
        EmbeddingBagConfig(name=key, embedding_dim=4, num_embeddings=9, feature_names=[key], pooling=pooling)
        for key in "az"
    ]
    embed = EmbeddingBagCollection(tables, is_weighted=weighted)
    wanted = data.draw(st.permutations(range(len(samples))))
    found = select_samples(flatten(batch), np.array(wanted)).unflatten()
    assert found.inverse_indices_or_none() is None
    assert embed(found).values().equal(embed(batch).values()[wanted])
    for index, key in enumerate(batch.keys()):
        lengths = [len(rows[index][sample[index] % len(rows[index])]) for sample in samples]
        assert read_lengths({"ids": batch}, f"ids.{key}").tolist() == lengths


def test_sizes_are_the_bytes_of_each_sample() -> None:
    flat = flatten({"items": keyed(), "x": torch.zeros(3, 5, dtype=torch.int16)})
    # 8 bytes a value, 4 a weight, 10 of x, and 4 for the length of each of the two keys.
    assert flat.sizes.tolist() == [12 * 1 + 18, 12 * 3 + 18, 12 * 3 + 18]
    padded = {"tokens": torch.tensor([[1, 2, 3], [4, 0, 0]]), "n": torch.tensor([3, 1])}
    assert flatten(padded, BatchSpec(padded={"tokens": "n"})).sizes.tolist() == [3 * 8 + 8 + 4, 8 + 8 + 4]


def test_shared_values_are_those_of_each_batch() -> None:
    spec = BatchSpec(shared=["meta", "ra*"])
    first, other = (flatten({"x": x(), "meta": {"names": ["a"]}, "rate": rate}, spec) for rate in (0.5, 0.7))
    assert first.empty().unflatten()["meta"] == {"names": ["a"]}
    assert other.to("cpu").unflatten()["rate"] == 0.7
    assert first.schema.lines == ("meta: shared", "rate: shared", "x: int64[], 1 rows per sample")
    assert first.structure is other.structure
    assert dict(first.describe_shared())["rate"] != dict(other.describe_shared())["rate"]


EQUAL_VALUES = [
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}), (1, 1.0), ((1, 2), [1, 2]), (float("nan"), float("nan")),
    (torch.arange(6).view(2, 3).t(), torch.arange(6).view(2, 3).t().contiguous()), (object(), object()),
]  # fmt: skip
OTHER_VALUES = [
    (0.5, 0.7), (None, 0), ("a", "b"), ([1, 2], [2, 1]), ("x" * 100 + "a", "x" * 100 + "b"), (True, 1),
    (2**60, 2**60 + 1), (torch.ones(2), torch.zeros(2)), (torch.ones(2), torch.ones(3)), (np.ones(2), np.zeros(2)),
    ({"a": 1}, {"a": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("one", "other"), EQUAL_VALUES)
def test_equal_values_are_described_alike(one: Any, other: Any) -> None:
    assert digest(describe([("v", one)])) == digest(describe([("v", other)])) != 0


@pytest.mark.parametrize(("one", "other"), OTHER_VALUES)
def test_other_values_are_told_apart(one: Any, other: Any) -> None:
    assert digest(describe([("v", one)])) != digest(describe([("v", other)]))
    spec = BatchSpec(shared=["v"])
    assert (
        flatten({"x": torch.ones(2), "v": one}, spec).describe_shared()
        != flatten({"x": torch.ones(2), "v": other}, spec).describe_shared()
    )


def test_schemas_that_differ_say_how_and_the_order_of_keys_is_no_difference() -> None:
    batch = {f"k{index}": torch.zeros(2, index) for index in range(6)}
    assert flatten(batch).schema.hash == flatten(dict(reversed(batch.items()))).schema.hash
    one = flatten({"x": torch.zeros(3), "w": keyed(weights=False)["z"]})
    other = flatten({"x": torch.zeros(3, dtype=torch.float64), "y": torch.zeros(3), "w": keyed(weights=False)["z"]})
    assert one.schema.hash != other.schema.hash
    assert one.schema.diff(other.schema, own="rank 0", others="rank 3").split("\n") == [
        "rank 0 has x: float32[], 1 rows per sample; rank 3 has x: float64[], 1 rows per sample",
        "rank 0 has no y; rank 3 has y: float32[], 1 rows per sample",
    ]
    assert one.schema.diff(one.schema) == ""


def test_lengths_on_a_device_are_not_waited_for_unless_allowed() -> None:
    on_device = JaggedTensor(torch.arange(3), lengths=torch.tensor([1, 2]).as_subclass(OnDevice))
    with pytest.raises(BatchError, match=r"lengths of 'v' are only on .*allow_sync=True"):
        flatten({"v": on_device})
    assert flatten({"v": on_device}, allow_sync=True).lengths.tolist() == [[1], [2]]
    assert flatten({"v": on_device}, lengths=np.array([[1], [2]])).lengths.tolist() == [[1], [2]]
    with pytest.raises(BatchError, match=r"lengths has shape \(1, 1\); the batch has 2 samples"):
        flatten({"v": on_device}, lengths=np.array([[3]]))


def test_lengths_known_only_to_a_device_say_so() -> None:
    flat = flatten({"v": keyed()["a"]})
    moved = flat.rebuild(flat.tensors, totals=flat.totals, lengths_tensor=flat.lengths_tensor)
    with pytest.raises(BatchError, match="only on its device"):
        _ = moved.lengths
    assert moved.unflatten()["v"].lengths().tolist() == [0, 1, 3]
    assert pickle.loads(pickle.dumps(moved)).lengths.tolist() == [[0], [1], [3]]


@dataclass
class Scaled:
    """A field that `__init__` leaves to the class."""

    x: torch.Tensor
    scale: object = field(init=False, default=2.0)


def test_what_a_class_leaves_to_its_default_is_part_of_a_batch() -> None:
    with pytest.raises(BatchError, match="'scale' is a float"):
        flatten(Scaled(x(3)))
    assert flatten(Scaled(x(3)), spec=BatchSpec(shared={"scale"})).unflatten().scale == 2.0


def test_lengths_by_path() -> None:
    batch = {"deep": Pair(x(3), [keyed(), TensorDict({"n": x(3)}, [3])]), "array": np.arange(3), "texts": ["a"] * 3}
    for source in (batch, flatten(batch)):
        assert read_lengths(source, "deep.right.0.a").tolist() == [0, 1, 3]
        assert read_lengths(source, "deep.left").tolist() == [10, 11, 12]
        assert read_lengths(source, "deep.right.1.n").tolist() == [10, 11, 12]
        assert read_lengths(source, "array").tolist() == [0, 1, 2]
        with pytest.raises(BatchError, match=r"'deep.right.0' "):  # which key?
            read_lengths(source, "deep.right.0")
        with pytest.raises(BatchError, match="'texts' is a list"):  # of pickles, whose lengths mean nothing
            read_lengths(source, "texts")
    with pytest.raises(BatchError, match=r"the batch has no 'deep.right.1.m': .* in a dict of n"):
        read_lengths(batch, "deep.right.1.m")
    with pytest.raises(BatchError, match="'x' is no jagged field nor an integer per sample"):
        flatten({"x": torch.zeros(2)}).lengths_of("x")


@settings(max_examples=100, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.sampled_from([(), (3,), (2, 2), (0,)]),
    widths=st.lists(st.integers(0, 6), min_size=1, max_size=3),
    side=st.sampled_from(["right", "left"]),
    counted=st.booleans(),
    multiple=st.integers(1, 4),
    seed=st.integers(0, 2**32 - 1),
)
def test_samples_are_padded_to_their_own_longest(
    dtype: torch.dtype, shape: tuple[int, ...], widths: list[int], side: Any, counted: bool, multiple: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    padded = Padded(lengths="n" if counted else None, value=1, side=side, multiple=multiple)
    spec = BatchSpec(padded={"v": padded}, derived={"longest": MaxLength("n" if counted else "v")})
    samples: list[list[torch.Tensor]] = []
    flats = []
    for width in widths:
        lengths = rng.integers(0, width + 1, rng.integers(0, 4)) if counted else np.full(rng.integers(0, 4), width)
        drawn = rng.integers(0, 2**32, len(lengths) * width).tolist()
        tensor = random_bits(drawn, shape, dtype).reshape(len(lengths), width, *shape)
        samples.append([])
        for row, length in zip(tensor, lengths.tolist(), strict=True):
            own, padding = row.split([length, width - length])
            if side == "left":
                padding, own = row.split([width - length, length])
            padding.copy_(torch.ones(shape).to(dtype).expand(padding.shape))
            samples[-1].append(own)
        flats.append(flatten({"n": torch.from_numpy(lengths), "v": tensor, "longest": 77}, spec))
    picks = [(batch, sample) for batch, own in enumerate(samples) for sample in range(len(own)) if rng.random() < 0.6]
    found = gather_samples(flats, picks).unflatten()
    chosen = [samples[batch][sample] for batch, sample in picks]
    longest = max((len(one) for one in chosen), default=0)
    width = -(-longest // multiple) * multiple
    assert found["v"].shape == (len(chosen), width, *shape)
    for row, one in zip(found["v"], chosen, strict=True):
        padding = as_bytes(torch.ones((width - len(one), *shape)).to(dtype))
        assert as_bytes(row) == (padding + as_bytes(one) if side == "left" else as_bytes(one) + padding)
    assert found["longest"] == longest


@settings(max_examples=200, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    value=st.sampled_from([0, 1, math.nan]),
    side=st.sampled_from(["right", "left"]),
    lengths=st.lists(st.integers(0, 3), min_size=1, max_size=3),
    depth=st.integers(0, 2),
    others=st.sets(st.integers(0, 17), max_size=2),
)
def test_what_padding_cuts_off_is_what_it_fills_in(
    dtype: torch.dtype, value: float, side: Any, lengths: list[int], depth: int, others: set[int]
) -> None:
    assume(not math.isnan(value) or dtype.is_floating_point or dtype.is_complex)
    counts, values = torch.tensor(lengths), torch.full((len(lengths), 3, depth), float(value))
    is_value = (torch.arange(3) if side == "right" else torch.arange(2, -1, -1)) < counts[:, None]
    values[is_value] = 1
    others &= set(range(values.numel()))
    values.view(-1)[list(others)] = 0 if math.isnan(value) else 1 - value
    batch = {"n": counts, "v": values.to(dtype)}
    spec = BatchSpec(padded={"v": Padded(lengths="n", value=value, side=side)})
    if any(not is_value.flatten()[other // depth] for other in others):
        with pytest.raises(BatchError, match=r"padded\['v'\] would cut values off: .*, value=.*name the lengths"):
            flatten(batch, spec)
        return
    found = flatten(batch, spec).unflatten()["v"]
    width, wide = found.shape[1], torch.complex128 if dtype.is_complex else torch.float64
    kept = batch["v"][:, :width] if side == "right" else batch["v"][:, 3 - width :]
    torch.testing.assert_close(found.to(wide), kept.to(wide), rtol=0, atol=0, equal_nan=True)


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
        assert {leaf.path for leaf in flatten(batch).structure.leaves if leaf.declared_in == OBJECTS} == {"w.1"}
    with pytest.raises(BatchError, match=r"'m.0.id' is a int \(1\).*; if 'm' holds one entry .* declare it in objects"):
        flatten({"x": x(), "m": [{"id": 1, "image": torch.zeros(2)}] * 3})
    assert select({"x": x(), "pair": (None, None)}, 1, spec=BatchSpec(rows_per_sample={"pair.0": 1}))["pair"] == (
        None, None,
    )  # fmt: skip
