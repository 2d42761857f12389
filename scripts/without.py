"""Takes a capability out of a copy of the tree, and checks that everything else works: `scripts/without.py windows`.

A room is the files of a capability and the lines that call it. What tests, benchmarks and examples define by its words,
or by what is so defined, goes with it; then types, imports and style of the product are checked, and the tests that are
left.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("evenkeel", "services", "trainer_client")
USERS = ("tests", "benchmarks", "examples")
PLANS = (
    "tests/evenkeel/partitioning",
    "tests/evenkeel/protocol",
    "tests/services/balancer",
    "tests/trainer_client/balancing",
)


class Room(NamedTuple):
    """What goes out.

    Attributes:
        files: Files and folders.
        lines: Of each file, regular expressions of the lines that name the room. A function that one begins goes whole.
        words: Regular expression of what definitions of tests, benchmarks and examples name that need the room.
        tests: Folders whose tests show that the rest works.
    """

    files: tuple[str, ...]
    lines: dict[str, tuple[str, ...]]
    words: str
    tests: tuple[str, ...]


_BALANCING, _EMBEDDING = "trainer_client/balancing", "trainer_client/embedding"
ROOMS = {
    "sampling": Room(
        files=(f"{_BALANCING}/sampling",),
        lines={"trainer_client/__init__.py": ("sampling", "GlobalBatchSampler", "TokenBudgetSampler")},
        words=r"GlobalBatchSampler|TokenBudgetSampler|SampleOrder",
        tests=("tests/trainer_client/balancing",),
    ),
    "adapters": Room(
        files=(f"{_BALANCING}/adapters",),
        lines={},
        words=r"balancing\.adapters",
        tests=("tests/trainer_client/balancing",),
    ),
    "windows": Room(
        files=("evenkeel/partitioning/windows.py", f"{_BALANCING}/windows.py"),
        lines={
            "evenkeel/partitioning/refinements.py": ("gather_heavy",),
            f"{_BALANCING}/stages.py": ("WindowStates",),
            f"{_BALANCING}/stream.py": ("check_window",),
        },
        words=r"partitioning\.windows|window=|def (giants|test_steps_together|draw_round)",
        tests=PLANS,
    ),
    "splits": Room(
        files=("evenkeel/partitioning/split_search.py", "evenkeel/partitioning/split_cuts.py"),
        lines={"evenkeel/partitioning/refinements.py": ("split_heavy",), f"{_BALANCING}/stages.py": ("Splitting",)},
        words=r"partitioning\.split_|SplitOptions",
        tests=PLANS,
    ),
    "users": Room(
        files=("evenkeel/partitioning/users.py",),
        lines={"evenkeel/partitioning/refinements.py": ("gather_users",)},
        words=r"rows_of\(users|users_on_ranks|def draw_round",
        tests=PLANS,
    ),
    "speeds": Room(
        files=(f"{_BALANCING}/learned_speeds.py",),
        lines={f"{_BALANCING}/stages.py": ("SpeedLearner",)},
        words=r"learn(ed)?_speeds|SpeedLearner|slow_ranks|stragglers",
        tests=("tests/trainer_client/balancing",),
    ),
    "caps": Room(
        files=("evenkeel/partitioning/memory.py",),
        lines={
            "evenkeel/partitioning/api.py": ("with_caps", "check_fits", "memory_caps is not None"),
            "evenkeel/partitioning/users.py": ("memory",),
        },
        words=r"(?<!get\(\")memory_caps?\b(?!=tuple)|partitioning\.memory",  # what round_of leaves out may stay
        tests=PLANS,
    ),
    "hot_rows": Room(
        files=(f"{_EMBEDDING}/tables/hot.py", f"{_EMBEDDING}/tables/hot_choice.py"),
        lines={
            f"{_EMBEDDING}/tables/__init__.py": ("hot_choice", "HotChoice", "HotCosts", "choose_hot_rows"),
            f"{_EMBEDDING}/tables/collection.py": ("HotRows", r"\bself\.hot\b", "_hot", "hot = "),
            f"{_EMBEDDING}/checkpoint/live.py": (r"\.hot\b",),
        },
        words=r"hold_hot_rows|choose_hot_rows",
        tests=("tests/trainer_client/embedding",),
    ),
}


def take_out(tree: Path, room: Room) -> None:
    """Deletes the room, the lines that call it, and whatever tests, benchmarks and examples define by it."""
    for name in room.files:
        path = tree / name
        if not path.exists():
            sys.exit(f"{name} is part of the room, and is not there; correct the table in scripts/without.py")
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for name, patterns in room.lines.items():
        path = tree / name
        text = path.read_text("utf-8")
        lines = text.splitlines(keepends=True)
        gone = {at for at, line in enumerate(lines, 1) if any(re.search(pattern, line) for pattern in patterns)}
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.lineno in gone:
                gone |= set(range(node.lineno, (node.end_lineno or node.lineno) + 2))  # and the blank line behind it
        kept = [line for at, line in enumerate(lines, 1) if at not in gone]
        if len(kept) == len(lines):
            sys.exit(f"{name} has no line of the room; correct the table in scripts/without.py")
        path.write_text("".join(kept), "utf-8")
    users = _Users(tree, room.words)
    while sum(users.take_out(path) for folder in USERS for path in sorted((tree / folder).rglob("*.py"))):
        pass


class _Users:
    """What tests, benchmarks and examples lose with a room: definitions that name it, and all that need these."""

    def __init__(self, tree: Path, words: str) -> None:
        self._tree, self._words = tree, words
        self._gone: set[str] = set()  # modules, and names in modules

    def take_out(self, path: Path) -> bool:
        """Deletes from a file what needs the room, as far as that is known; whether anything has."""
        text, module = path.read_text("utf-8"), self._name(path)
        lines, body = text.splitlines(keepends=True), ast.parse(text).body
        above = [self._name(folder / "conftest.py") for folder in path.parents if folder.is_relative_to(self._tree)]
        programs = ["{} import {}".format(*one.rpartition(".")[::2]) for one in self._gone]  # that other processes run
        kept, before = [], len(self._gone)
        for node in body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                kept.append(self._without_names(node, module))
                continue
            begin = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))])
            source = "".join(lines[begin - 1 : node.end_lineno])
            used = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
            used |= {one.arg for one in ast.walk(node) if isinstance(one, ast.arg)}
            needed = {f"{where}.{name}" for where in (module, *above) for name in used}
            if self._is_gone(source) or needed & self._gone or any(one in source for one in programs):
                named = [node.name] if hasattr(node, "name") else [one for one in used if _binds(node, one)]
                self._gone |= {f"{module}.{name}" for name in named}
            else:
                kept.append(source)
        if len(self._gone) == before:
            return False
        path.write_text("\n".join(kept), "utf-8")
        if path.stem.startswith("test_") and not any("def test_" in source for source in kept):
            path.unlink()
            self._gone.add(module)
        return True

    def _without_names(self, node: ast.Import | ast.ImportFrom, module: str) -> str:
        """An import of what is left."""
        begin = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        modules = {begin[:-1]} & self._gone
        gone = [
            one for one in node.names
            if modules or f"{begin}{one.name}" in self._gone or self._is_gone(f"{begin}{one.name}")
        ]  # fmt: skip
        self._gone |= {f"{module}.{one.asname or one.name}" for one in gone}
        node.names = [one for one in node.names if one not in gone]
        return f"{ast.unparse(node)}\n" if node.names else ""

    def _is_gone(self, source: str) -> bool:
        return re.search(self._words, source) is not None

    def _name(self, path: Path) -> str:
        return ".".join(path.relative_to(self._tree).with_suffix("").parts)


def _binds(node: ast.AST, name: str) -> bool:
    """Whether a statement gives a name its value."""
    return any(
        isinstance(one, ast.Name) and one.id == name and isinstance(one.ctx, ast.Store) for one in ast.walk(node)
    )


def main() -> None:
    """Takes one room out and checks the rest."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("room", choices=ROOMS)
    parser.add_argument("--no-tests", action="store_true", help="check types, imports and style alone")
    parser.add_argument("--keep", action="store_true", help="keep the copy, to look at")
    options = parser.parse_args()
    room = ROOMS[options.room]
    tree = Path(tempfile.mkdtemp(prefix=f"without-{options.room}-"))
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    for name in names:
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    take_out(tree, room)
    packages = [argument for package in PRODUCT for argument in ("-p", package)]
    checks = [
        ["ruff", "check", "--ignore", "F841,I001,RUF022", *PRODUCT],
        ["mypy", *packages],
        ["lint-imports", "--no-cache"],
    ]
    if not options.no_tests:
        checks += [["evenkeel", "warm-up"], ["pytest", "-q", "-n", "2", *room.tests]]
    environment = os.environ | {"PYTHONPATH": str(tree)}
    failed = []
    for name, *arguments in checks:
        command = [str(Path(sys.executable).with_name(name)), *arguments]
        if subprocess.run(command, cwd=tree, env=environment, check=False).returncode:
            failed.append(name)
    if options.keep:
        print(tree)
    else:
        shutil.rmtree(tree)
    if failed:
        sys.exit(f"without {options.room}, {', '.join(failed)} failed")
    print(f"without {options.room}, {'types, imports and style hold' if options.no_tests else 'everything else works'}")


if __name__ == "__main__":
    main()
