"""The command line in this process, and a file of tables."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from evenkeel.variables import KNOWN
from trainer_client.cli import app

Run = Callable[..., Result]
TABLES = """
- {name: user, rows: 4000000, dim: 64}
- {name: item, rows: 900000, dim: 64, ids_per_sample: 20, access: {kind: zipf, exponent: 0.9}}
"""


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the machine that the tests run on."""
    for name in KNOWN.keys() - {"CACHE_DIR"}:
        monkeypatch.delenv(f"EVENKEEL_{name}", raising=False)


@pytest.fixture
def run() -> Run:
    """Runs a command, which ends in an exit code and never in a traceback."""

    def invoke(*arguments: object) -> Result:
        done = CliRunner().invoke(app, [str(argument) for argument in arguments])
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        return done

    return invoke


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    path = tmp_path / "tables.yaml"
    path.write_text(TABLES)
    return path
