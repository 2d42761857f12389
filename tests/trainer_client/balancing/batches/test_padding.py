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


@settings(max_examples=150, deadline=None)
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
    samples, flats = [], []
    for width in widths:
        lengths = rng.integers(0, width + 1, rng.integers(0, 4)) if counted else np.full(rng.integers(0, 4), width)
        tensor = random_tensor(rng, len(lengths) * width, shape, dtype).reshape(len(lengths), width, *shape)
        own = [
            row[width - length :] if side == "left" else row[:length]
            for row, length in zip(tensor, lengths.tolist(), strict=True)
        ]
        for row, length in zip(tensor, lengths.tolist(), strict=True):
            cut = row[: width - length] if side == "left" else row[length:]
            cut.copy_(torch.ones(shape).to(dtype).expand(cut.shape))
        samples.append(own)
        flats.append(flatten({"n": torch.from_numpy(lengths), "v": tensor, "longest": 77}, spec))
    picks = [(batch, sample) for batch, own in enumerate(samples) for sample in range(len(own)) if rng.random() < 0.6]
    found = gather_samples(flats, picks).unflatten()
    chosen = [samples[batch][sample] for batch, sample in picks]
    longest = max((len(one) for one in chosen), default=0)
    width = -(-longest // multiple) * multiple
    expected = torch.ones((len(chosen), width, *shape)).to(dtype)
    for row, one in zip(expected, chosen, strict=True):
        if len(one):
            raw = row[width - len(one) :] if side == "left" else row[: len(one)]
            raw.view(torch.uint8).copy_(
                one.clone(memory_format=torch.contiguous_format).view(torch.uint8)
            ) if one.dim() else raw.copy_(one)
    assert found["v"].shape == expected.shape
    assert as_bytes(found["v"]) == as_bytes(expected)
    assert found["longest"] == longest


def test_widths_do_not_belong_to_the_schema() -> None:
    spec = BatchSpec(padded={"t": Padded(value=-1)})
    one, other = (flatten({"t": torch.full((2, width), width)}, spec) for width in (2, 3))
    assert one.schema.hash == other.schema.hash
    found = gather_samples([one, other], [(0, 0), (1, 0)]).unflatten()["t"]
    assert found.tolist() == [[2, 2, -1], [3, 3, 3]]
