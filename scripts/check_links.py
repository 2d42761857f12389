"""Tells what pages and scripts point to and is not there: `python -m scripts.check_links`."""

from __future__ import annotations

import functools
import importlib
import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from scripts.mutants import ROOMS, files_of

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
MADE_BY_READERS = {"deploy/prometheus/alertmanagers/mine.json"}


def _anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", title.replace("`", "").lower()).strip().replace(" ", "-") for title in titles}


def _of_page(page: Path) -> Iterator[str]:
    text = page.read_text(encoding="utf-8")
    for target, anchor in re.findall(r"\]\(((?!https?:)[^)#]*)(?:#([^)]*))?\)", text):
        file = (page.parent / target).resolve() if target else page
        if not file.exists():
            yield target
        elif anchor and "reference" not in target and anchor not in _anchors(file):
            yield f"{target}#{anchor}"
    for name in re.findall(r"`((?:[\w-]+/)+[\w.-]+\.(?:py|md|sh|yml|yaml|proto|json|cu))`", text):
        if name not in MADE_BY_READERS and not (ROOT / name).exists():
            yield name
    for module in re.findall(r"-m ((?:benchmarks|examples|scripts|services)(?:\.\w+)+)", text):
        if find_spec(module) is None:
            yield module


def _of_walks() -> Iterator[str]:
    """Steps of the ways of a request that nothing can be called by."""
    steps = re.findall(r"^\d+\. `([\w.]+):([\w.]+)`", (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8"), re.M)
    assert len(steps) > 20, "the walks are written in another way"
    for module, name in steps:
        try:
            found = functools.reduce(getattr, name.split("."), importlib.import_module(module))
        except (ImportError, AttributeError):
            found = None
        if not callable(found):
            yield f"{module}:{name}"


def _of_scripts() -> Iterator[str]:
    for script in [*ROOT.glob("scripts/*.py"), ROOT / "scripts" / "gpu_checks.sh"]:
        for module in re.findall(r"\b((?:benchmarks|tests)(?:\.\w+)+)(?=\s)", script.read_text(encoding="utf-8")):
            if find_spec(module) is None:
                yield f"{script.name}: {module}"
    yield from (path for room in ROOMS for paths in files_of(room) for path in paths if not (ROOT / path).exists())


def main() -> int:
    """Looks at all of them; the exit status is 1 if something is not there."""
    lost = [f"{page.relative_to(ROOT)}: {target}" for page in PAGES for target in _of_page(page)]
    lost += [f"ARCHITECTURE.md: {step}" for step in _of_walks()] + [*_of_scripts()]
    print(*(f"{each} is not there" for each in lost), sep="\n", file=sys.stderr, end="\n" if lost else "")
    return int(bool(lost))


if __name__ == "__main__":
    sys.exit(main())
