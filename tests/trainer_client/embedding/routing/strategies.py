"""Batches for property tests."""

import torch
from hypothesis import strategies as st

from tests.trainer_client.embedding.routing.batches import MODES, Batch, make_batch
from trainer_client.embedding.routing import Routing


@st.composite
def batches(draw: st.DrawFn, *, modes: tuple[Routing, ...] = MODES, negative: bool | None = None) -> Batch:
    num_features = draw(st.integers(0, 5))
    index_dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    return make_batch(
        draw(st.integers(0, 2**32)),
        num_features=num_features,
        max_rows=draw(st.sampled_from([0, 1, 7, 40])),
        max_length=draw(st.sampled_from([0, 1, 5, 70])),
        world_size=draw(st.sampled_from([1, 2, 3, 4, 7, 8, 16, 63, 64, 255, 256, 1000, 4096])),
        routings=draw(st.lists(st.sampled_from(modes), min_size=num_features, max_size=num_features)),
        index_dtype=index_dtype,
        length_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
        weight_dtype=draw(st.sampled_from([None, torch.float32, torch.float64])),
        variable=draw(st.booleans()),
        negative=draw(st.booleans()) if negative is None else negative and index_dtype == torch.int64,
        giant=draw(st.integers(0, 9)) == 0,
    )
