"""Imports all files of tests that can be imported here, for processes that are forked from one that has."""

import contextlib
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

for path in sorted(ROOT.glob("tests/**/test_*.py")):
    with contextlib.suppress(ImportError, pytest.skip.Exception):
        importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
