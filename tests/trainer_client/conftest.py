"""What tests of the trainer's side share."""

from collections.abc import Iterator

import pytest

from benchmarks.harness.balancer_process import ServiceProcess, running_balancer
from tests.trainer_client.balancing.redistribution.pool import GlooRanks


@pytest.fixture(scope="session")
def balancer() -> Iterator[ServiceProcess]:
    """A balancer in a process of its own, with its default settings, which no test stops."""
    with running_balancer() as process:
        yield process


@pytest.fixture(scope="session")
def ranks() -> Iterator[GlooRanks]:
    """Four ranks that live through all tests; groups of fewer are their first ones."""
    pool = GlooRanks(4)
    yield pool
    pool.close()
