"""`make bench`: each benchmark that it runs takes the options that it passes."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
from typer.main import get_command_from_info
from typer.models import CommandInfo

ROOT = Path(__file__).parents[2]
(NAMES,) = re.findall(r"^for name in (.*); do$", (ROOT / "scripts/run_benchmarks.sh").read_text(), re.M)
(OPTIONS,) = re.findall(r"^\tscripts/run_benchmarks.sh (.*)$", (ROOT / "Makefile").read_text(), re.M)


@pytest.mark.parametrize("name", NAMES.split())
def test_takes_the_options_of_make_bench(name: str) -> None:
    main = importlib.import_module(f"benchmarks.{name}").main
    command = get_command_from_info(CommandInfo(callback=main), pretty_exceptions_short=True, rich_markup_mode=None)
    context = command.make_context(name, OPTIONS.split())
    assert context.params["quick"] is True
    assert context.params["json_path"] is None
