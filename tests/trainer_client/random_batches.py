"""Batches of random structure, for property tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from trainer_client.balancing.batches import BatchSpec, FlatBatch, flatten

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
SHAPES = [(), (), (1,), (3,), (2, 5), (0,), (7, 1)]


class FieldPlan(NamedTuple):
    """What one field of all ranks' batches looks like."""

    kind: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    rows: int
    weighted: bool


@dataclass(frozen=True, slots=True)
class Case:
    """Batches of some ranks and where their samples go."""

    batches: list[FlatBatch]
    counts: list[int]
    destinations: np.ndarray


def random_tensor(rng: np.random.Generator, rows: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random bits, NaNs and all; sometimes not contiguous."""
    copies = 2 if rng.random() < 0.3 else 1
    count = rows * copies * int(np.prod(shape, dtype=int))
    if dtype is torch.bool:
        flat = torch.from_numpy(rng.integers(0, 2, count).astype(bool))
    else:
        flat = torch.empty(count, dtype=dtype)
        if count:
            flat.view(torch.uint8).numpy()[:] = rng.integers(0, 256, count * dtype.itemsize)
    return flat.view(rows, copies, *shape)[:, 0]


def random_lengths(rng: np.random.Generator, n: int) -> torch.Tensor:
    lengths = np.minimum(rng.zipf(1.5, n), 40) * (rng.random(n) > 0.3)
    return torch.from_numpy(lengths.astype(np.int64 if rng.random() < 0.5 else np.int32))


def build_batch(plans: list[FieldPlan], n: int, seed: int) -> dict[str, Any]:
    """A batch of n samples; its spec is `SPEC`."""
    rng = np.random.default_rng(seed)
    batch: dict[str, Any] = {"always": torch.from_numpy(rng.integers(0, 2**40, n)), "size": n}
    for index, plan in enumerate(plans):
        lengths = random_lengths(rng, n)
        total = int(lengths.sum())
        if plan.kind == "dense":
            batch[f"dense{plan.rows}_{index}"] = random_tensor(rng, n * plan.rows, plan.shape, plan.dtype)
        elif plan.kind == "counted":
            batch[f"counted_{index}"] = {
                "counts": lengths.to(torch.int64),
                "values": random_tensor(rng, total, plan.shape, plan.dtype),
            }
        elif plan.kind == "jagged":
            weights = random_tensor(rng, total, (), torch.float32) if plan.weighted else None
            values = random_tensor(rng, total, plan.shape, plan.dtype)
            offsets = torch.nn.functional.pad(torch.cumsum(lengths, 0), (1, 0))
            batch[f"jagged_{index}"] = [JaggedTensor(values, weights=weights, offsets=offsets), None]
        else:
            keys = ["z", "b", "k"][: plan.rows]
            table = torch.cat([lengths, *(random_lengths(rng, n).to(lengths.dtype) for _ in keys[1:])])
            total = int(table.sum())
            weights = random_tensor(rng, total, (), torch.float32) if plan.weighted else None
            values = random_tensor(rng, total, plan.shape, plan.dtype)
            batch[f"keyed_{index}"] = (KeyedJaggedTensor(keys, values, weights, lengths=table, stride=n),)
    return batch


def spec_for(plans: list[FieldPlan]) -> BatchSpec:
    rows: dict[str, int | str] = {"dense2_*": 2, "dense3_*": 3}
    for index, plan in enumerate(plans):
        if plan.kind == "counted":
            rows[f"counted_{index}.values"] = f"counted_{index}.counts"
    return BatchSpec(rows_per_sample=rows, batch_size=("size",))


plans = st.lists(
    st.builds(
        FieldPlan,
        kind=st.sampled_from(["dense", "counted", "jagged", "keyed"]),
        dtype=st.sampled_from(DTYPES),
        shape=st.sampled_from(SHAPES),
        rows=st.integers(1, 3),
        weighted=st.booleans(),
    ),
    max_size=5,
)


@st.composite
def cases(draw: st.DrawFn, min_ranks: int = 1, max_ranks: int = 4) -> Case:
    """Batches of a random schema on some ranks, and random destinations; some ranks hold or get nothing."""
    fields = draw(plans)
    world_size = draw(st.integers(min_ranks, max_ranks))
    counts = draw(st.lists(st.integers(0, 9), min_size=world_size, max_size=world_size))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    homes = np.repeat(np.arange(world_size), counts)
    moving = rng.random(homes.size) < draw(st.sampled_from([0.0, 0.2, 1.0]))
    destinations = np.where(moving, rng.integers(0, world_size, homes.size), homes).astype(np.int32)
    spec = spec_for(fields)
    batches = [flatten(build_batch(fields, n, seed + rank), spec) for rank, n in enumerate(counts)]
    return Case(batches=batches, counts=counts, destinations=destinations)


def as_bytes(tensor: torch.Tensor) -> bytes:
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def assert_same(found: FlatBatch, expected: FlatBatch) -> None:
    """Two batches of one schema agree in every bit."""
    assert found.schema == expected.schema
    assert found.num_samples == expected.num_samples
    np.testing.assert_array_equal(found.lengths, expected.lengths)
    np.testing.assert_array_equal(found.lengths_tensor.numpy(), expected.lengths.T)
    np.testing.assert_array_equal(found.totals, expected.totals)
    for leaf, tensor, other in zip(found.structure.leaves, found.tensors, expected.tensors, strict=True):
        assert tensor.dtype == other.dtype, leaf.path
        assert tensor.shape == other.shape, leaf.path
        assert as_bytes(tensor) == as_bytes(other), leaf.path
