"""Docstrings speak one dialect: Google's sections with sentences, `If` in each `Raises`, single backticks."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("evenkeel", "services", "trainer_client", "benchmarks", "examples", "tests", "deploy", "scripts")
MARKUP = re.compile(r"(?<!`)``(?!`)|:\w+:`")
UNCAPITALISED = re.compile(r"\*{0,2}\w+: [a-z]")
ERROR = re.compile(r"(?:[a-z_]+\.)*[A-Z]\w*: ")


def _texts(path: Path) -> list[tuple[int, str]]:
    """Docstrings and marked-up comments of a file, with their lines."""
    source = path.read_text(encoding="utf-8")
    found = [
        (node.lineno, node.value.value)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    if not MARKUP.search(source):
        return found  # comments are not looked at: tokens take long
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return found + [(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]


def _entries(text: str, title: str) -> Iterator[str]:
    """The entries of a section of a docstring."""
    section = re.search(rf"^( *){title}:\n((?:\1 +.*\n)+)", text + "\n", re.M)
    entries = section[2].splitlines() if section else []
    indent = min((len(line) - len(line.lstrip()) for line in entries), default=0)
    return (line.strip() for line in entries if len(line) - len(line.lstrip()) == indent)


def _complaints(path: Path) -> Iterator[str]:
    for line, text in _texts(path):
        if MARKUP.search(text):
            yield f"{path}:{line}: double backticks or a role; single backticks mark code"
        for entry in (*_entries(text, "Args"), *_entries(text, "Attributes")):
            if UNCAPITALISED.match(entry):
                yield f"{path}:{line}: '{entry}' begins in lower case"
        for entry in _entries(text, "Raises"):
            if not ERROR.match(entry) or not entry.split(": ", 1)[1].startswith("If "):
                yield f"{path}:{line}: 'Raises' lists '{entry}'; write 'ValueError: If …'"


def test_one_dialect() -> None:
    files = [
        path
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if not path.name.endswith(("_pb2.py", "_pb2_grpc.py"))
    ]
    assert len(files) > 500
    assert [complaint for path in files for complaint in _complaints(path)] == []


@pytest.mark.parametrize(
    "source",
    [
        '"""A ``word``."""',
        "x = 1  # see ``x``",
        '"""Of :func:`x`."""',
        'def f(x):\n    """F.\n\n    Args:\n        x: of it.\n    """',
        'def f():\n    """F.\n\n    Raises:\n        ValueError: Always.\n    """',
    ],
)
def test_what_it_complains_about(source: str, tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(source + "\n")
    assert len(list(_complaints(tmp_path / "module.py"))) == 1
