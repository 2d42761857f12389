import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from evenkeel.partitioning import registry, warm_up
from services.balancer.server import BalancerServer
from services.balancer.settings import Settings
from tests.services.balancer.strategies import FOLDER, INSTALLED, start_zygote

StartServer = Callable[..., Awaitable[BalancerServer]]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Compiles before any test's time counts: on a machine without numba's cache that takes minutes."""
    if not session.config.option.collectonly and any(
        Path(__file__).parent in item.path.parents for item in session.items
    ):
        warm_up()


@pytest_asyncio.fixture
async def start_server() -> AsyncIterator[StartServer]:
    """Starts real servers on free ports; stops them after the test."""
    started: list[BalancerServer] = []

    async def start(**settings: Any) -> BalancerServer:
        defaults: dict[str, Any] = {"port": 0, "drain_seconds": 0.2, "grace_seconds": 1.0, "workers": 1}
        server = BalancerServer(Settings(**{**defaults, **settings}), zygote=start_zygote())
        await server.start()
        started.append(server)
        return server

    yield start
    await asyncio.gather(*(server.stop() for server in started if not server.stopped))


@pytest.fixture
def hostile_strategies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Has the servers of the test know `INSTALLED`; returns the folder of `hold`."""
    monkeypatch.setattr(registry.STRATEGIES, "installed", INSTALLED)
    monkeypatch.setenv(FOLDER, str(tmp_path))
    return tmp_path
