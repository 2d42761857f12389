"""Changes single expressions of the core, and tells which changes no test notices.

    python -m scripts.mutants --area decide --count 25 --minutes 8

A mutant is one comparison, operator, condition, number or check that is another. It is written into a copy of the
tree, where the area's tests run until one fails; one that takes several times as long as without it has failed too.
The exit status is 1 if less than nine of ten are noticed.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BALANCING, EMBEDDING, PARTITIONING, PLACEMENT = (
    "trainer_client/balancing", "trainer_client/embedding", "evenkeel/partitioning", "evenkeel/placement",
)  # fmt: skip
AREAS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # files, and their tests, the quickest first
    "decide": (
        (f"{BALANCING}/decide.py",),
        ("tests/model/test_protocol.py", f"tests/{BALANCING}/test_stages.py", "tests/model/test_leaving.py"),
    ),
    "contribution": ((f"{BALANCING}/contribution.py",), (f"tests/{BALANCING}/test_messages.py", "tests/model")),
    "directive": ((f"{BALANCING}/directive.py",), (f"tests/{BALANCING}/test_messages.py", "tests/model")),
    "slices": (
        (f"{PARTITIONING}/slices.py",),
        (f"tests/{PARTITIONING}/test_slices.py", f"tests/{PARTITIONING}/test_windows.py"),
    ),
    "partition": (
        tuple(f"{PARTITIONING}/{name}.py" for name in ("api", "minimal_move", "matching", "windows", "stages")),
        tuple(
            f"tests/{PARTITIONING}/test_{name}.py"
            for name in ("api", "matching", "minimal_move", "windows", "fitting", "extremes")
        ),
    ),
    "routing": (
        tuple(f"{EMBEDDING}/routing/{name}.py" for name in ("ownership", "bucketize", "skew")),
        tuple(f"tests/{EMBEDDING}/routing/test_{name}.py" for name in ("ownership", "bucketize", "kjt")),
    ),
    "checkpoint": (
        tuple(f"{EMBEDDING}/checkpoint/{name}.py" for name in ("convert", "record", "files", "optimizers")),
        tuple(f"tests/{EMBEDDING}/checkpoint/test_{name}.py" for name in ("convert", "optimizers")),
    ),
    "solver": (
        tuple(f"{PLACEMENT}/{name}.py" for name in ("search", "dual", "bounds", "knapsack", "trivial")),
        tuple(f"tests/{PLACEMENT}/test_{name}.py" for name in ("knapsack", "bounds", "search", "milp", "planner")),
    ),
}
COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult, ast.Mod: ast.Add,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "floor": "ceil", "ceil": "floor"}


def mutants(text: str) -> list[tuple[int, int, str]]:
    """Number of the node, variant and what is changed, of every mutant of a module."""
    tree = ast.parse(text)
    skipped = {id(inner) for node in ast.walk(tree) for part in _without_behaviour(node) for inner in ast.walk(part)}
    found = []
    for number, node in enumerate(ast.walk(tree)):
        for variant in range(2) if id(node) not in skipped else ():
            if told := _change(copy.copy(node), variant):
                found.append((number, variant, f"{node.lineno} {ast.unparse(node)[:70]!r}: {told}"))  # type: ignore[attr-defined]
    return found


def mutated(text: str, number: int, variant: int) -> str:
    """The module with a change."""
    tree = ast.parse(text)
    _change(list(ast.walk(tree))[number], variant)
    return ast.unparse(ast.fix_missing_locations(tree))


def _without_behaviour(node: ast.AST) -> list[ast.AST]:
    """Parts that change nothing or only what is told: annotations, messages, decorators, logs."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        arguments = [each.annotation for each in ast.walk(node.args) if isinstance(each, ast.arg)]
        return [*node.decorator_list, *filter(None, [node.returns, *arguments])]
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return [node]
    if isinstance(node, ast.ClassDef):
        return list(node.decorator_list)
    if isinstance(node, ast.AnnAssign):
        return [node.annotation]
    if isinstance(node, ast.Raise):
        return [node.exc] if node.exc else []
    if isinstance(node, ast.Call) and ast.unparse(node.func).startswith(
        ("logger", "_logger", "log.", "cast", "TypeVar")
    ):
        return [node]
    return [node] if isinstance(node, ast.JoinedStr | ast.Import | ast.ImportFrom | ast.Assert) else []


def _change(node: Any, variant: int) -> str:
    """Makes the node another; what was done, nothing where it cannot be."""
    match node:
        case ast.If() | ast.While() if not (variant and isinstance(node, ast.While)):
            node.test = ast.Constant(value=bool(variant))
            return f"condition is {bool(variant)}"
    if variant:
        return ""
    match node:
        case ast.Compare() if type(node.ops[0]) in COMPARED:
            node.ops = [COMPARED[type(node.ops[0])](), *node.ops[1:]]
        case ast.BinOp() | ast.AugAssign() if type(node.op) in COMPUTED and not ast.unparse(node)[0].isupper():
            node.op = COMPUTED[type(node.op)]()
        case ast.BoolOp():
            node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        case ast.UnaryOp(op=ast.Not()):
            node.op, node.operand = ast.Not(), ast.UnaryOp(op=ast.Not(), operand=node.operand)
        case ast.IfExp():
            node.body, node.orelse = node.orelse, node.body
        case ast.Constant(value=bool() | int()):
            node.value = (not node.value) if isinstance(node.value, bool) else node.value + 1
        case ast.Name() if node.id in NAMES:
            node.id = NAMES[node.id]
        case ast.Attribute() if node.attr in NAMES:
            node.attr = NAMES[node.attr]
        case ast.Raise():
            node.__class__ = ast.Pass
        case _:
            return ""
    return "is another"


def run(tree: Path, tests: tuple[str, ...], seconds: float) -> bool:
    """Whether all tests pass in time."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        command, cwd=tree, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        return process.wait(seconds) == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)  # and whatever the tests have started
        process.wait()


def main() -> int:
    """Tries mutants of each area."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--area", choices=AREAS, nargs="+", default=list(AREAS), help="what is changed")
    parser.add_argument("--count", type=int, default=25, help="mutants of each area, drawn at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=1e9, help="after which no further mutant is tried")
    options = parser.parse_args()
    ends, noticed, tried = time.monotonic() + 60 * options.minutes, 0, 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv*", ".hypothesis", "results", "out"))
        for area in options.area:
            files, tests = AREAS[area]
            began = time.monotonic()
            assert run(tree, tests, 600), f"the tests of {area} fail without a mutant"
            limit = 30 + 5 * (time.monotonic() - began)
            drawn = [(file, *one) for file in files for one in mutants((ROOT / file).read_text("utf-8"))]
            random.Random(options.seed).shuffle(drawn)
            for file, number, variant, told in drawn[: options.count]:
                if time.monotonic() > ends:
                    break
                (tree / file).write_text(mutated((ROOT / file).read_text("utf-8"), number, variant), encoding="utf-8")
                survived = run(tree, tests, limit)
                shutil.copy(ROOT / file, tree / file)
                tried, noticed = tried + 1, noticed + (not survived)
                if survived:
                    print(f"{area}: not noticed: {file}:{told}", flush=True)
            print(f"{area}: {noticed} of {tried} noticed so far", flush=True)
    return int(noticed < 0.9 * tried)


if __name__ == "__main__":
    sys.exit(main())
