"""Imports all files of tests that can be imported here, for processes that are forked from one that has."""

import contextlib
import gc
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

gc.disable()  # while there is no garbage
for path in [ROOT / "tests" / "preloaded.py", *sorted(ROOT.glob("tests/**/test_*.py"))]:
    with contextlib.suppress(ImportError, pytest.skip.Exception):
        importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
gc.freeze()
gc.enable()
