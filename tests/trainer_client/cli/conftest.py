"""The command that plans, and a file of tables."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from trainer_client.cli.plan import plan_command

TABLES = """
- {name: user, rows: 4000000, dim: 64}
- {name: item, rows: 900000, dim: 64, ids_per_sample: 20, access: {kind: zipf, exponent: 0.9}}
"""


@pytest.fixture
def command() -> typer.Typer:
    app = typer.Typer()
    app.command("plan")(plan_command)
    return app


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    path = tmp_path / "tables.yaml"
    path.write_text(TABLES)
    return path
