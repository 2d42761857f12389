"""Ranks that live through all tests of tables and checkpoints."""

from collections.abc import Iterator

import pytest

from tests.trainer_client.balancing.redistribution.pool import GlooRanks
from tests.trainer_client.embedding.keys import OnRanks


@pytest.fixture(scope="package")
def two() -> Iterator[OnRanks]:
    """Runs a function, given its rank and further arguments, on two ranks that are all there are."""
    pool = GlooRanks(2)
    yield lambda function, *args: pool.call(function, [(rank, *args) for rank in range(2)])
    pool.close()
