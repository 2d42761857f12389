"""What pages and scripts point to exists; what is written from code is as the code would have it."""

from __future__ import annotations

import functools
import importlib
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.harness import zygote
from scripts.mutants import ROOMS, files_of

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
MADE_BY_READERS = {"deploy/prometheus/alertmanagers/mine.json"}


def _anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", title.replace("`", "").lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_points_to_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target, anchor in re.findall(r"\]\(((?!https?:)[^)#]*)(?:#([^)]*))?\)", text):
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), target
        assert not anchor or "reference" in target or anchor in _anchors(file), f"{target}#{anchor}"
    for name in re.findall(r"`((?:[\w-]+/)+[\w.-]+\.(?:py|md|sh|yml|yaml|proto|json|cu))`", text):
        assert name in MADE_BY_READERS or (ROOT / name).exists(), name
    for module in re.findall(r"-m ((?:benchmarks|examples|scripts|services)(?:\.\w+)+)", text):
        assert find_spec(module) is not None, module


def test_the_steps_of_the_walks_exist() -> None:
    steps = re.findall(r"^\d+\. `([\w.]+):([\w.]+)`", (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8"), re.M)
    assert len(steps) > 20
    for module, name in steps:
        assert callable(functools.reduce(getattr, name.split("."), importlib.import_module(module)))


def test_modules_that_scripts_use_exist() -> None:
    for script in [*ROOT.glob("scripts/*.py"), ROOT / "scripts" / "gpu_checks.sh"]:
        for module in re.findall(r"\b((?:benchmarks|tests)(?:\.\w+)+)(?=\s)", script.read_text(encoding="utf-8")):
            assert find_spec(module) is not None, (script.name, module)
    for path in (path for room in ROOMS for paths in files_of(room) for path in paths):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("writer", ["scripts.write_reference", "scripts.draw_pictures"])
def test_files_are_what_their_writer_writes(writer: str) -> None:
    done = zygote.run(writer, "--check", timeout=90)
    assert done.returncode == 0, done.stdout + done.stderr
