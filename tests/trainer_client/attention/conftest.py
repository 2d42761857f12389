from collections.abc import Iterator

import pytest

from tests.trainer_client.balancing.redistribution.pool import GlooRanks


@pytest.fixture(scope="package")
def ranks() -> Iterator[GlooRanks]:
    """Four ranks; groups of fewer are their first ones."""
    pool = GlooRanks(4)
    yield pool
    pool.close()
