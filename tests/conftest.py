"""Settings of all tests."""

import os
import sys

import pytest
from hypothesis import HealthCheck, settings

# As in the Makefile: ranks are forked from a process that must have no threads, and share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Examples run kernels that are compiled at first use and real processes: time says nothing about correctness.
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# The same examples on every machine, so that only a change fails a test; HYPOTHESIS_PROFILE=explore makes new ones.
settings.register_profile("repeat", settings.get_profile("explore"), derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeat"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Imports and compiles before any test's time counts: on a machine without numba's cache that takes minutes."""
    if session.items and not session.config.option.collectonly and "tests.zygote" in sys.modules:
        sys.modules["tests.zygote"].warm()
