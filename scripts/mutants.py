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
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import hypothesis  # noqa: F401  # these are what takes long to import
import numba  # noqa: F401
import pytest
import scipy.optimize  # noqa: F401
import torch  # noqa: F401

ROOT = Path(__file__).parents[1]
BALANCING, EMBEDDING, PARTITIONING = "trainer_client/balancing", "trainer_client/embedding", "evenkeel/partitioning"
AREAS: dict[str, tuple[str, str, str]] = {  # a folder, modules in it, and their tests, the quickest first
    "decide": (BALANCING, "decide", f"{BALANCING}/test_messages {BALANCING}/test_stages model/test_protocol"),
    "contribution": (BALANCING, "contribution", f"{BALANCING}/test_messages model/test_protocol"),
    "directive": (BALANCING, "directive", f"{BALANCING}/test_messages model/test_protocol"),
    "slices": (PARTITIONING, "slices", f"{PARTITIONING}/test_slices {PARTITIONING}/test_windows"),
    "partition": (
        PARTITIONING, "api minimal_move matching windows stages",
        " ".join(f"{PARTITIONING}/test_{name}" for name in ("api", "strategies", "minimal_move", "windows", "memory")),
    ),
    "routing": (
        f"{EMBEDDING}/routing", "ownership bucketize skew",
        f"{EMBEDDING}/routing/test_ownership {EMBEDDING}/routing/test_bucketize {EMBEDDING}/routing/test_kjt",
    ),
    "checkpoint": (
        f"{EMBEDDING}/checkpoint", "convert record files optimizers",
        f"{EMBEDDING}/checkpoint/test_convert {EMBEDDING}/checkpoint/test_optimizers",
    ),
    "hot": (
        f"{EMBEDDING}/tables", "hot hot_choice",
        f"{EMBEDDING}/tables/test_hot_choice {EMBEDDING}/tables/test_hot",
    ),
    "solver": (
        "evenkeel/placement", "search program trivial",
        " ".join(f"evenkeel/placement/test_{name}" for name in ("bounds", "search", "planner")),
    ),
}  # fmt: skip
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


def run(tree: Path, tests: list[str], seconds: float) -> bool:
    """Whether all tests pass in time, in a process that has the libraries already, and nothing of ours."""
    child = os.fork()
    if not child:
        os.setsid()
        os.chdir(tree)
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        sys.path[:] = [str(tree), *(path for path in sys.path if Path(path or ".").resolve() != ROOT)]
        os.environ |= {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
        os._exit(int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests])))
    status, ends = None, time.monotonic() + seconds
    while status is None and time.monotonic() < ends:
        ended, code = os.waitpid(child, os.WNOHANG)
        status = code if ended else None
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # and whatever the tests have started
    if status is None:
        os.waitpid(child, 0)
    return status == 0


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
            place, modules, names = AREAS[area]
            files = [f"{place}/{module}.py" for module in modules.split()]
            tests = [f"tests/{name}.py" for name in names.split()]
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
