"""Settings of all tests."""

import gc
import os
import shutil
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.lanes import give_way, lane, turn

# As in the Makefile: ranks are forked from a process that must have no threads, and share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Where a test does not say how long a partition may take, a starved machine may let it wait for its turn.
os.environ.setdefault("EVENKEEL_BALANCER_PARTITION_TIMEOUT_SECONDS", "20")

# Folders of tests are short-lived: where there is memory for them, no test waits for a disk.
_MEMORY = "/dev/shm"
if (
    os.path.isdir(_MEMORY)
    and shutil.disk_usage(_MEMORY).free > 8 << 30
    and not os.statvfs(_MEMORY).f_flag & os.ST_NOEXEC
):
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", _MEMORY)

# Examples run kernels that are compiled at first use and real processes: time says nothing about correctness.
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# The same examples on every machine, so that only a change fails a test; HYPOTHESIS_PROFILE=explore makes new ones.
settings.register_profile("repeat", settings.get_profile("explore"), derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeat"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Orders the tests for their lanes; files stay whole."""
    items.sort(key=lambda item: turn(item.nodeid))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Leaves torch and all test files out of all collections of garbage, each of which would take half a second."""
    gc.disable()
    result = yield
    gc.collect()
    gc.freeze()
    gc.enable()
    return result


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Imports and compiles before any test's time counts: on a machine without numba's cache that takes minutes."""
    give_way(item.nodeid)
    zygote = sys.modules.get("benchmarks.harness.zygote")
    if zygote is not None and not zygote.is_warm():
        zygote.warm("tests.preloaded")
    return (yield)


@pytest.fixture(scope="session")
def forked_python() -> Iterator[Path]:
    """A command like `python`, whose processes need no start of an interpreter."""
    from benchmarks.harness import forked_python

    with forked_python.forked_python() as command:
        yield command


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Of several workers, as in `make test`, each gets a lane."""
    from xdist.scheduler import LoadScopeScheduling

    class Lanes(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return lane(nodeid)

    config.option.loadscopereorder = False  # in the order of `turn`, not by the number of tests
    return Lanes(config, log)
