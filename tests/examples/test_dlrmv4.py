"""The kit of DLRMv4: its stream has the published figures, and its hot rows the published skew."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from examples.dlrmv4.stream import LIKED, LONGEST, MEAN, MEDIAN, POOLS, SKEW, Scale, Stream, rows_of


def test_the_stream_has_the_published_figures() -> None:
    stream = Stream(Scale(rows=10))
    assert np.median(stream.lengths) == pytest.approx(MEDIAN, rel=0.02)
    assert stream.lengths.mean() == pytest.approx(MEAN, rel=0.02)
    assert stream.lengths.max() == LONGEST
    kinds = np.concatenate([stream.user(user)[1] for user in range(1500)])
    assert {pool: np.mean(kinds == pool) for pool in POOLS} == pytest.approx(POOLS, abs=0.02)
    batch = stream.batch(range(0, len(stream), len(stream) // 256))
    assert float(batch.num_history.float().mean()) == pytest.approx(2663, rel=0.05)
    assert float((batch.actions == LIKED).float().mean()) == pytest.approx(0.05, abs=0.01)


@pytest.mark.parametrize("table", SKEW)
@pytest.mark.parametrize("owners", [8, 32])
def test_an_owner_of_rows_has_more_than_its_share(table: str, owners: int) -> None:
    stream = Stream(Scale())
    batch = stream.batch(range(0, len(stream), len(stream) // 256))
    rows = stream.scale.rows_of(table)
    owner = rows_of(torch.cat([batch.history, batch.candidates]), table, rows) // -(-rows // owners)
    asked = torch.bincount(owner, minlength=owners).double()
    assert float(asked.max() / asked.mean()) == pytest.approx(SKEW[table], rel=0.08)
