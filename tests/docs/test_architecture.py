"""The walks and the drawing of ARCHITECTURE.md: each step exists, and the floors are those that the linter checks."""

from __future__ import annotations

import functools
import importlib
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")


def test_the_steps_of_walks_exist() -> None:
    steps = re.findall(r"^\d+\. `([\w.]+):([\w.]+)`", TEXT, re.M)
    assert len(steps) > 20
    for module, name in steps:
        assert callable(functools.reduce(getattr, name.split("."), importlib.import_module(module)))


def test_the_drawing_shows_what_the_linter_checks() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    checked = {
        contract["containers"][0]: [set(layer.split(" | ")) for layer in contract["layers"]]
        for contract in settings["tool"]["importlinter"]["contracts"]
        if "containers" in contract
    }
    drawn = {}
    for floor in re.split(r"^─+$", TEXT.split("```")[1], flags=re.M)[1:]:
        for column in zip(*(f"{line}│".split("│")[:2] for line in floor.strip("\n").split("\n")), strict=True):
            rows = [row.split() for row in column if row.strip()]
            if rows:
                drawn[rows[0][0]] = [set(row) for row in rows[1:]]
    assert drawn == checked
