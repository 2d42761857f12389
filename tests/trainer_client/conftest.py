"""What tests of the trainer's side share."""

from collections.abc import Iterator

import pytest

from benchmarks.harness.balancer_process import ServiceProcess, running_balancer


@pytest.fixture(scope="session")
def balancer() -> Iterator[ServiceProcess]:
    """A balancer in a process of its own, with its default settings, which no test stops."""
    with running_balancer() as process:
        yield process
