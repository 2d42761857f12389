"""Takes a capability out of a copy of the tree, and checks that everything else works: `scripts/without.py windows`.

A room is the files of a capability and the lines that call it. Tests, benchmarks and examples that name its words, or
use files that do, go with it; then types, imports and style of the product are checked, and the tests that are left.
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


class Room(NamedTuple):
    """What goes out.

    Attributes:
        files: Files and folders.
        lines: Of each file, regular expressions of the lines that name the room. A function that one begins goes whole.
        words: Regular expression of what tests, benchmarks and examples of the room name.
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
        words=r"partitioning\.windows|window=",
        tests=("tests/evenkeel/partitioning", "tests/trainer_client/balancing"),
    ),
    "splits": Room(
        files=("evenkeel/partitioning/split_search.py", "evenkeel/partitioning/split_cuts.py"),
        lines={"evenkeel/partitioning/refinements.py": ("split_heavy",), f"{_BALANCING}/stages.py": ("Splitting",)},
        words=r"partitioning\.split|SplitOptions",
        tests=("tests/evenkeel/partitioning", "tests/trainer_client/balancing"),
    ),
    "users": Room(
        files=("evenkeel/partitioning/users.py",),
        lines={"evenkeel/partitioning/refinements.py": ("gather_users",)},
        words=r"rows_of\(users|users_on_ranks",
        tests=("tests/evenkeel/partitioning", "tests/trainer_client/balancing"),
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
            "evenkeel/partitioning/api.py": ("with_caps", "check_fits", "if memory_caps is not None"),
            "evenkeel/partitioning/split_search.py": ("with_caps", "check_fits", "_placements"),
            "evenkeel/partitioning/users.py": ("memory",),
        },
        words=r"memory_caps?\b|partitioning\.memory",
        tests=("tests/evenkeel/partitioning", "tests/trainer_client/balancing"),
    ),
    "hot_rows": Room(
        files=(f"{_EMBEDDING}/tables/hot.py", f"{_EMBEDDING}/tables/hot_choice.py"),
        lines={
            f"{_EMBEDDING}/tables/__init__.py": ("hot_choice", "HotChoice", "HotCosts", "choose_hot_rows"),
            f"{_EMBEDDING}/tables/collection.py": ("HotRows", r"\bself\.hot\b", "_hot", "hot = ", "import functional"),
            f"{_EMBEDDING}/checkpoint/live.py": (r"\.hot\b",),
        },
        words=r"hold_hot_rows|choose_hot_rows",
        tests=("tests/trainer_client/embedding",),
    ),
}


def take_out(tree: Path, room: Room) -> None:
    """Deletes the room, the lines that call it, and whatever in tests, benchmarks and examples needs it."""
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
    found, words = True, re.compile(room.words)
    while found:
        files = [
            path for folder in USERS for path in (tree / folder).rglob("*.py") if words.search(path.read_text("utf-8"))
        ]
        modules = [".".join(path.relative_to(tree).with_suffix("").parts) for path in files if path.stem != "conftest"]
        for path in files:
            path.unlink()
        found = bool(modules)
        words = re.compile(r"\b(" + "|".join(map(re.escape, modules)) + r")\b") if modules else words


def main() -> None:
    """Takes one room out and checks the rest."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("room", choices=ROOMS)
    parser.add_argument("--no-tests", action="store_true", help="check types, imports and style alone")
    parser.add_argument("--keep", action="store_true", help="keep the copy, to look at")
    options = parser.parse_args()
    room = ROOMS[options.room]
    tree = Path(tempfile.mkdtemp(prefix=f"without-{options.room}-"))
    names = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
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
