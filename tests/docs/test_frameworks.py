"""The code of docs/train/frameworks.md is that of the programs that it names; what they do: tests/examples/resume."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/train/frameworks.md").read_text(encoding="utf-8")
PROGRAMS = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "examples/resume").glob("*.py")}


def test_the_code_is_that_of_the_programs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.S)
    anywhere = "\n".join(PROGRAMS.values())
    assert len(blocks) > 5
    assert [block for block in blocks if not _is_in(block, anywhere) and "(Trainer)" not in block] == []


def test_the_commands_are_those_of_the_programs() -> None:
    named = set(re.findall(r"-m examples\.resume\.(\w+)", TEXT))
    assert named == {name for name, text in PROGRAMS.items() if '__name__ == "__main__"' in text}
    for name in named:
        assert f"`examples/resume/{name}.py`" in TEXT
        (command,) = re.findall(rf"\$ ((?:torchrun|python) .*examples\.resume\.{name} .*)", TEXT)
        assert command in PROGRAMS[name]


def _is_in(block: str, text: str) -> bool:
    """Whether it is, wherever it is indented and whatever lines are left blank."""
    block, text = (re.sub(r"\n\s*\n", "\n", one) for one in (block, text))
    return any(textwrap.indent(block, " " * indent) in text for indent in range(0, 28, 4))
