from collections.abc import Iterator

import pytest

from benchmarks.harness.balancer_process import ServiceProcess, running_balancer
from benchmarks.harness.crew import Crew
from benchmarks.harness.proxy import TcpProxy
from benchmarks.harness.relay import Relay


@pytest.fixture(scope="session")
def _crews() -> Iterator[list[Crew]]:
    crews: list[Crew] = []
    yield crews
    for crew in crews:
        crew.close()


@pytest.fixture
def crew(_crews: list[Crew]) -> Crew:
    """Three ranks that wait for a job; others when a test has broken them."""
    if not _crews or not _crews[-1].is_idle:
        _crews.append(Crew(3))
    return _crews[-1]


@pytest.fixture(scope="session")
def _one_balancer() -> Iterator[ServiceProcess]:
    with running_balancer("--log-level", "debug") as process:
        yield process


@pytest.fixture
def balancer(_one_balancer: ServiceProcess) -> ServiceProcess:
    """A balancer that runs, whatever the test before did with it."""
    process = _one_balancer.process
    if process is None or process.poll() is not None:
        _one_balancer.start()
    return _one_balancer


@pytest.fixture
def relay(balancer: ServiceProcess) -> Iterator[Relay]:
    with Relay(balancer.port) as server:
        yield server


@pytest.fixture
def proxy(balancer: ServiceProcess) -> Iterator[TcpProxy]:
    with TcpProxy(balancer.port) as server:
        yield server
