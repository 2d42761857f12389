from __future__ import annotations

import numpy as np
import pytest

from evenkeel.placement import Mode, Optimizer, Table
from evenkeel.placement.storage import dynamicemb_footprint, index_bytes, row_bytes, torchrec_footprint

MIB = 1 << 20
SMALL = 1 << 15
NONE, HALF = np.array([0.0]), np.array([0.5])


def _table(**fields: object) -> Table:
    return Table(name="t", **{"rows": 8_000_000, "dim": 128, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [(Optimizer.SGD, 512), (Optimizer.ADAM, 1536), (Optimizer.ADAGRAD, 1024), (Optimizer.ROWWISE_ADAGRAD, 528)],
)
def test_a_row_carries_its_optimizer_state(optimizer: Optimizer, expected: int) -> None:
    assert row_bytes(_table(optimizer=optimizer), training=True) == expected
    assert row_bytes(_table(optimizer=optimizer), training=False) == 512


def test_the_index_counts_keys_digests_scores_references_and_buckets() -> None:
    assert int(index_bytes(256, 1)) == 256 * 21 + 2 * 4
    assert int(index_bytes(256, 2)) == 256 * 29 + 2 * 4


def test_hbm_only_is_values_and_index_of_the_fullest_rank() -> None:
    # ceil(8e6 / 3) = 2,666,667 rows, in whole buckets of 128: 2,666,752.
    got = dynamicemb_footprint(_table(), Mode.HBM_ONLY, np.array([1.0]), 3, training=True)
    values, index = 2_666_752 * 1536, 2_666_752 * 21 + 2_666_752 // 128 * 4
    assert int(got[0][0]) == -(-values // (2 * MIB)) * 2 * MIB + -(-index // (2 * MIB)) * 2 * MIB
    assert int(got[1][0]) == 0


def test_a_cache_pays_for_overflow_rows_and_an_index_of_its_own() -> None:
    cached = dynamicemb_footprint(_table(), Mode.CACHING, HALF, 1, training=True)
    hybrid = dynamicemb_footprint(_table(), Mode.HYBRID, HALF, 1, training=True)
    assert int(cached[1][0]) == 8_000_000 * 1536
    assert int(hybrid[1][0]) == 4_000_000 * 1536
    assert int(cached[2][0]) == 4_000_768
    extra = 3072 * 1536 + 4_000_768 * 21 + 4_000_768 // 128 * 4
    assert int(cached[0][0] - hybrid[0][0]) == pytest.approx(extra, abs=6 * MIB)


def test_host_only_keeps_the_index_in_hbm() -> None:
    got = dynamicemb_footprint(_table(), Mode.HOST_ONLY, NONE, 1, training=True)
    assert 0 < int(got[0][0]) == -(-(8_000_000 * 21 + 62_500 * 4) // (2 * MIB)) * 2 * MIB


def test_an_admission_counter_takes_hbm() -> None:
    plain = dynamicemb_footprint(_table(), Mode.HBM_ONLY, np.array([1.0]), 1, training=True)
    counted = dynamicemb_footprint(_table(admission_rows=10_000_000), Mode.HBM_ONLY, np.array([1.0]), 1, training=True)
    assert int(counted[0][0] - plain[0][0]) >= 10_000_000 * 21


def test_torchrec_keeps_rowwise_state_and_the_table_map_in_hbm() -> None:
    table = _table(optimizer=Optimizer.ROWWISE_ADAGRAD)
    uvm = torchrec_footprint(table, Mode.HOST_ONLY, NONE, 1_000_000, 128, training=True)
    cached = torchrec_footprint(table, Mode.CACHING, np.array([0.1]), 1_000_000, 128, training=True)
    assert 4_000_000 <= int(uvm[0][0]) <= 4_000_000 + SMALL
    assert int(uvm[1][0]) == 512_000_000
    assert int(cached[0][0]) >= 100_000 * (512 + 16) + 4_000_000 + 4_000_000


def test_torchrec_keeps_adam_state_with_the_weights() -> None:
    uvm = torchrec_footprint(_table(), Mode.HOST_ONLY, NONE, 1_000_000, 128, training=True)
    assert int(uvm[0][0]) <= SMALL
    assert int(uvm[1][0]) == 3 * 512_000_000
