"""Padded tensors travel without their padding, and are padded to the longest sample of the batch that is trained."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.references.redistribution import gather_samples
from tests.trainer_client.random_batches import DTYPES, as_bytes, random_tensor
from trainer_client.balancing.batches import BatchSpec, MaxLength, Padded, flatten


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
        tensor = random_tensor(rng, len(lengths) * width, shape, dtype).reshape(len(lengths), width, *shape)
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


def test_widths_do_not_belong_to_the_schema() -> None:
    spec = BatchSpec(padded={"t": Padded(value=-1)})
    one, other = (flatten({"t": torch.full((2, width), width)}, spec) for width in (2, 3))
    assert one.schema.hash == other.schema.hash
    found = gather_samples([one, other], [(0, 0), (1, 0)]).unflatten()["t"]
    assert found.tolist() == [[2, 2, -1], [3, 3, 3]]
