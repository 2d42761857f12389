from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenkeel.placement import InvalidInputError, PlanRequest, Runtime, Step, Table, Topology, Zipf
from evenkeel.placement.hot_rows import with_hot_rows

LOOKUPS = 3_000


def _request(ranks: int, per_host: int, exponent: float = 1.0, **changes: object) -> PlanRequest:
    tables = [
        Table(name=name, rows=rows, dim=64, ids_per_sample=LOOKUPS / 100, access=Zipf(exponent=exponent))
        for name, rows in (("small", 500), ("large", 50_000))
    ]
    topology = Topology(ranks=ranks, ranks_per_host=per_host, hbm_bytes=1 << 34, hbm_reserved_bytes=7)
    return PlanRequest(tables=tuple(tables), topology=topology, step=Step(samples_per_rank=100), **changes)  # type: ignore[arg-type]


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([(8, 8), (16, 8), (64, 8)]), st.floats(0, 1.6), st.sampled_from([0, 10_000, 1 << 20, 1 << 30]))
def test_hot_rows_are_those_that_lower_the_bytes_of_a_link(
    machines: tuple[int, int], exponent: float, most: int
) -> None:
    (ranks, per_host), width = machines, 2 * 64 * 4
    request = _request(ranks, per_host, exponent)
    reserved, hot = with_hot_rows(request, most)
    assert reserved.topology.hbm_reserved_bytes == 7 + sum(each.hbm_bytes for each in hot) <= 7 + most
    share = np.arange(1, 50_001) ** -exponent
    wanted = 1 - (1 - share / share.sum()) ** LOOKUPS
    for each in hot:
        assert each.hbm_bytes == each.rows * width
        assert each.all_to_all_bytes < each.without_bytes
    large = next((each for each in hot if each.table == "large"), None)
    if large is None or most < 1 << 30:
        return
    hosts = ranks // per_host
    sent = (ranks - 1) / ranks * (width + 8)
    assert large.without_bytes == pytest.approx(wanted.sum() * sent, rel=0.02)
    assert large.all_to_all_bytes == pytest.approx(wanted[large.rows :].sum() * sent, rel=0.03, abs=20 * width)

    def link(rows: int) -> float:
        """Bytes through the link of a rank, or of a host, with so many of the most popular rows hot."""
        at_owner = wanted[rows:].sum() * (width + 8) * (ranks - 1 if hosts == 1 else ranks - per_host)
        return at_owner / (ranks if hosts == 1 else hosts) + rows * width * (ranks - 1) / ranks

    assert link(large.rows) <= min(link(rows) for rows in range(0, 50_000, 50)) * 1.01


def test_torchrec_has_none() -> None:
    with pytest.raises(InvalidInputError, match="runtime: has no hot rows"):
        with_hot_rows(_request(8, 8, runtime=Runtime.TORCHREC), 1 << 20)
