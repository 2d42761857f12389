"""What is written from code is as the code would have it, and lacks nothing that others name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.harness import zygote

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("writer", ["scripts.write_reference", "scripts.draw_pictures"])
def test_files_are_what_their_writer_writes(writer: str) -> None:
    done = zygote.run(writer, "--check", timeout=90)
    assert done.returncode == 0, done.stdout + done.stderr


def test_settings_of_the_documentation_are_on_the_page() -> None:
    page = (ROOT / "docs/reference/settings.md").read_text(encoding="utf-8")
    for text in [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "SECURITY.md"]:
        for service, name in re.findall(r"EVENKEEL_(BALANCER|PLANNER)_([A-Z][A-Z_]*[A-Z])", text.read_text("utf-8")):
            section = page.split(f"## {service.capitalize()}\n")[1].split("\n## ")[0]
            assert f"| `{name.lower()}` |" in section, (text.name, service, name)
