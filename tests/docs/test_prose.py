"""Texts are readable as they are: no line of prose is wider than the code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WIDTH = 120


def _wide(text: str) -> Iterator[int]:
    """Lines that are too wide; those of tables, and those that are one link or address, may be."""
    for number, line in enumerate(text.splitlines(), 1):
        words = re.findall(r"(?:`[^`]*`|\[[^\]]*\]\([^)]*\)|\S)+", line.strip())
        if len(line) > WIDTH and not line.lstrip().startswith(("|", "<!--")) and len(words) > 1:
            yield number


def _texts() -> list[Path]:
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def test_no_line_of_prose_is_too_wide() -> None:
    assert len(_texts()) > 15
    wide = [f"{path.relative_to(ROOT)}:{line}" for path in _texts() for line in _wide(path.read_text(encoding="utf-8"))]
    assert wide == []


@pytest.mark.parametrize(("line", "found"), [("word " * 30, 1), ("| cell " * 30, 0), ("x" * 130, 0), ("word " * 20, 0)])
def test_what_is_too_wide(line: str, found: int) -> None:
    assert len(list(_wide(line))) == found


def test_files_that_texts_name_exist() -> None:
    named = [
        (path.name, name)
        for path in _texts()
        for name in re.findall(
            r"`((?:[\w-]+/)+(?:[\w.-]+\.(?:py|md|sh|yml|yaml|proto|json|cu))?)`", path.read_text("utf-8")
        )
    ]
    named.remove(("deployment.md", "deploy/prometheus/alertmanagers/mine.json"))  # the reader writes it
    assert len(named) > 30
    lacking = [
        (text, name) for text, name in named if not any((ROOT / base / name).exists() for base in ("", "benchmarks"))
    ]
    assert lacking == []
