"""A batch like one before is flattened as if it were the first; whatever differs is noticed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.trainer_client.random_batches import build_batch, plans, spec_for
from trainer_client.balancing.batches import BatchSpec, FlatBatch, flatten


@dataclass
class Pair:
    left: Any
    right: Any = None


def outcome(batch: Any, spec: BatchSpec) -> Any:
    """Everything that flattening tells, or its error."""
    try:
        flat = flatten(batch, spec)
    except ValueError as error:
        return str(error)
    return flat.structure, [id(tensor) for tensor in flat.tensors], flat.num_samples, flat.totals.tolist(), (
        flat.lengths.tolist(), flat.lengths.dtype, flat.lengths.flags.c_contiguous,
    )  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(fields=plans, sizes=st.tuples(st.integers(0, 6), st.integers(0, 6)), seed=st.integers(0, 2**32 - 2))
def test_the_second_batch_is_flattened_like_the_first(fields: Any, sizes: tuple[int, int], seed: int) -> None:
    spec = spec_for(fields)
    outcome(build_batch(fields, sizes[0], seed), spec)
    second = build_batch(fields, sizes[1], seed + 1)
    assert outcome(second, spec) == outcome(second, replace(spec))


def keyed(keys: list[str], lengths: list[int], **options: Any) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(keys, torch.arange(sum(lengths)), lengths=torch.tensor(lengths), **options)


SPEC = BatchSpec(rows_per_sample={"v": "n", "twice": 2}, batch_size=("size",), shared=("temperature",))


def make(samples: int = 3, **changes: Any) -> dict[str, Any]:
    counts = torch.arange(samples)
    batch = {
        "n": counts, "v": torch.arange(int(counts.sum())), "twice": torch.zeros(2 * samples, 4), "size": samples,
        "nothing": None, "temperature": None, "list": [counts], "pair": Pair(left=counts > 1),
        "keys": keyed(["a", "b"], [1] * 2 * samples), "default": defaultdict(list, x=torch.ones(samples)),
    } | changes  # fmt: skip
    return {name: value for name, value in batch.items() if value is not ...}


CHANGES: dict[str, Callable[[], dict[str, Any]]] = {
    "more samples": lambda: make(5),
    "no samples": lambda: make(0),
    "another dtype": lambda: make(twice=torch.zeros(6, 4, dtype=torch.float64)),
    "other rows": lambda: make(twice=torch.zeros(6, 5)),
    "another rank": lambda: make(twice=torch.zeros(6)),
    "too many rows": lambda: make(twice=torch.zeros(8, 4)),
    "rows that two do not divide": lambda: make(twice=torch.zeros(7, 4)),
    "more values": lambda: make(v=torch.arange(4)),
    "negative counts": lambda: make(n=torch.tensor([4, -1, 0])),
    "counts of another type": lambda: make(n=torch.tensor([0, 1, 2], dtype=torch.int32)),
    "another key": lambda: make(more=torch.ones(3)),
    "a key less": lambda: make(**{"list": ...}),
    "another order": lambda: dict(reversed(make().items())),
    "a tensor for nothing": lambda: make(nothing=torch.ones(3)),
    "nothing for a tensor": lambda: make(twice=None),
    "a shared value": lambda: make(temperature=0.5),
    "a size that is a tensor": lambda: make(size=torch.tensor(3)),
    "a size that is none": lambda: make(size=True),
    "a longer list": lambda: make(list=[torch.ones(3)] * 2),
    "a tuple for a list": lambda: make(list=(torch.ones(3),)),
    "more in a dataclass": lambda: make(pair=Pair(left=torch.ones(3, dtype=torch.bool), right=torch.ones(3))),
    "a gradient": lambda: make(twice=torch.zeros(6, 4, requires_grad=True)),
    "a sparse tensor": lambda: make(twice=torch.zeros(6, 4).to_sparse()),
    "a number": lambda: make(twice=4.0),
    "other keys": lambda: make(keys=keyed(["a", "c"], [1] * 6)),
    "one key": lambda: make(keys=keyed(["a"], [1] * 3)),
    "another length per key": lambda: make(keys=keyed(["a", "b"], [1] * 8)),
    "weights": lambda: make(keys=keyed(["a", "b"], [1] * 6, weights=torch.ones(6))),
    "another factory": lambda: make(default=defaultdict(dict, x=torch.ones(3))),
    "a variable batch per key": lambda: make(keys=keyed(["a", "b"], [1] * 5, stride_per_key_per_rank=[[2], [3]])),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_differs_from_the_batch_before_is_noticed(change: str) -> None:
    spec, batch = replace(SPEC), CHANGES[change]()
    first = outcome(make(), spec)
    assert outcome(batch, spec) == outcome(batch, replace(SPEC))
    assert outcome(make(), spec)[0] == first[0]


def test_like_batches_are_recalled_and_their_sizes_are_their_own() -> None:
    spec = replace(SPEC)
    flatten(make(3), spec)
    with mock.patch("trainer_client.balancing.batches.flatten.Plan", side_effect=AssertionError):
        flat = flatten(make(4), spec)
        assert isinstance(flat, FlatBatch)
        assert flat.num_samples == 4
        assert np.array_equal(flat.lengths, np.stack([np.ones(4), np.ones(4), np.arange(4)], axis=1))
        assert flat.unflatten()["size"] == 4
        with pytest.raises(ValueError, match="'v' holds 6 values, but its lengths add up to 10"):
            flatten(make(4) | {"n": torch.arange(4) + 1}, spec)
