from pathlib import Path

import numba
import pytest

from evenkeel.partitioning import warm_up


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Compile before any test's timeout runs."""
    compiled = not (config.option.collectonly or numba.config.DISABLE_JIT)
    if compiled and any(Path(__file__).parent in item.path.parents for item in items):
        warm_up()
