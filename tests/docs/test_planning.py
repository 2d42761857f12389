"""The pages about planning: commands print what is shown, code is that of the examples."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.docs.test_tutorial import printed_by_ranks
from trainer_client.cli import app
from trainer_client.planning import load_sharding_plan

ROOT = Path(__file__).parents[2]
TEXT = "".join((ROOT / f"docs/place/{page}.md").read_text(encoding="utf-8") for page in ("planning", "planner"))
SHOWN = re.findall(r"```console\n(.*?)```", TEXT, re.S)
(TABLES,) = re.findall(r"```yaml\n(.*?)```", TEXT, re.S)
(JOB,) = re.findall(r"```json\n(.*?)```", TEXT, re.S)
PLANNED = [block for block in SHOWN if block.startswith("$ evenkeel plan") and "--sharding-plan" not in block]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the page's reader stands, with the page's files."""
    (tmp_path / "tables.yaml").write_text(TABLES, encoding="utf-8")
    (tmp_path / "job.json").write_text(JOB, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


def _check(printed: str, shown: str) -> None:
    """Compares line by line; `…` stands for the rest."""
    got, wanted = [[line.rstrip() for line in text.splitlines()] for text in (printed, shown)]
    if wanted[-1] == "…":
        del wanted[-1], got[len(wanted) :]
    assert got == wanted


def test_the_commands_print_what_the_page_shows(folder: Path) -> None:
    assert len(PLANNED) == 4
    for block in PLANNED:
        command, _, shown = block.partition("\n")
        result = CliRunner().invoke(app, shlex.split(command)[2:])
        assert result.exit_code == (3 if "Nothing fits" in shown else 0), result.output
        _check(result.output, shown)


def test_the_code_is_that_of_the_example_and_prints_what_the_page_shows(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = (ROOT / "examples/plan_tables.py").read_text(encoding="utf-8")
    _, *blocks = re.findall(r"```python\n(.*?)```", TEXT, re.S)
    loading = next(block for block in blocks if "load_" in block)
    blocks.remove(loading)
    assert len(blocks) == 3
    assert [block for block in blocks if block not in program] == []
    (shown,) = (block.partition("\n")[2] for block in SHOWN if "examples.plan_tables" in block)
    _check(printed_by_ranks("examples.plan_tables", folder), shown)
    found: dict[str, Any] = {"load_sharding_plan": load_sharding_plan}
    exec(loading, found)
    (exported,) = (block for block in SHOWN if "--sharding-plan" in block)
    command, code, printed = exported.splitlines()
    *words, into, file = shlex.split(command)[2:]
    replanned = CliRunner().invoke(app, words)
    assert (replanned.exit_code, into, file) == (0, ">", "replanned.json"), replanned.output
    assert json.loads(replanned.stdout)["plan"]
    monkeypatch.syspath_prepend(folder)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(shlex.split(code)[-1])
    assert output.getvalue() == f"{found['plan'].plan['tables']['item'].ranks}\n" == f"{printed}\n"
    del sys.modules["sharding"]


def test_models_of_strangers_are_planned_and_trained_as_the_page_shows(folder: Path) -> None:
    program = (ROOT / "examples/plan_dlrm.py").read_text(encoding="utf-8")
    block = re.findall(r"```python\n(.*?)```", TEXT, re.S)[0]
    assert textwrap.indent(block, "    ") in program
    (shown,) = (block.partition("\n")[2] for block in SHOWN if "examples.plan_dlrm" in block)
    _check(printed_by_ranks("examples.plan_dlrm", folder), shown)
