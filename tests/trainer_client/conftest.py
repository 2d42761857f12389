"""What tests of the trainer's side share."""

from collections.abc import Iterator

import pytest

from benchmarks.harness.balancer_process import ServiceProcess, running_balancer


@pytest.fixture(scope="module")
def balancer() -> Iterator[ServiceProcess]:
    """A balancer in a process of its own, with its default settings."""
    with running_balancer() as process:
        yield process
