"""Changes single expressions of the core, and tells which changes no test notices.

    python -m scripts.mutants --rooms decide slices --count 25 --minutes 8 --json benchmarks/results/mutants.json

A mutant is one comparison, operator, condition or number that is another, or a call that is gone. It is written into a
copy of the tree, where the room's tests run until one fails, first those that are quick, then all; one that takes
several times as long as without it is noticed, too, and counted as late. With a result file, a run goes on where the
last one ended.

Some mutants answer as the code does, always: `scripts/same_mutants.json` names them by module, each with the reason.
They are tried like all others, but told apart, and are not among those of which nine of ten must be noticed, or the
exit status is 1.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis  # these are what takes long to import
import numba
import pytest
import scipy.optimize  # noqa: F401
import torch  # noqa: F401
import torchrec  # noqa: F401

from benchmarks.harness import results

ROOT = Path(__file__).parents[1]
SAME: dict[str, dict[str, str]] = json.loads(Path(__file__).with_name("same_mutants.json").read_text("utf-8"))
ROOMS: dict[str, tuple[str, str, str]] = {  # a folder, modules in it, and tests in its own folder or in another
    "partition": (
        "evenkeel/partitioning", "api minimal_move windows refinements",
        "same_everywhere refinements split_rounds api strategies minimal_move fuzz",
    ),
    "kernels": (
        "evenkeel/partitioning", "local_search lpt karmarkar_karp matching problem",
        "same_everywhere strategies minimal_move api",
    ),
    "slices": ("evenkeel/partitioning", "slices", "slices"),
    "decide": ("trainer_client/balancing", "decide", "messages stages model/protocol"),
    "contribution": ("trainer_client/balancing", "contribution", "messages stages"),
    "directive": ("trainer_client/balancing", "directive", "messages stages"),
    "routing": ("trainer_client/embedding/routing", "ownership bucketize skew", "bucketize kjt"),
    "checkpoint": ("trainer_client/embedding/checkpoint", "convert record files optimizers", "convert optimizers"),
    "solver": ("evenkeel/placement", "search trivial", "search"),
}  # fmt: skip
INTERPRETED = {"kernels", "slices"}  # whose kernels are compiled only where quick tests let a mutant live: in a minute
# whose first tests start no ranks, and run before all is imported that ranks need, which takes longer than they do
WITHOUT_RANKS = {"decide", "contribution", "directive"}
QUICK = (
    "not (shape2 or shape3 or three_ranks or beyond or "
    "keep_their_time or every_process or print_nothing or collections_that)"
)
PAIRS = [
    (ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn),
    (ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.FloorDiv, ast.Mod), (ast.BitAnd, ast.BitOr), (ast.And, ast.Or),
    (ast.LShift, ast.RShift), ("min", "max"), ("any", "all"), ("floor", "ceil"),
]  # fmt: skip
# calls that tell something, make a buffer that may as well be larger, or matter where a machine loses its power
UNSEEN = ("logger", "log.", "cast", "TypeVar", "np.empty", "os.fsync")
# arguments that say how long a search goes on, spare a copy, or assert what is so: as well otherwise
FREE = {"effort", "patience", "copy", "strict"}
ORDERED = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
SWAPPED: dict[Any, Any] = {one: other for pair in PAIRS for one, other in (pair, pair[::-1])}


class Mutant(NamedTuple):
    """A node of a module with fields that are others.

    Attributes:
        node: The node.
        change: Those fields.
        name: The function that it is in, the first line of its statement, and what that line becomes.
    """

    node: Any
    change: dict[str, Any]
    name: str


def mutants(tree: ast.Module) -> list[Mutant]:
    """All of a module.

    No `<` becomes `<=` beside a fraction: nothing is that share of another to the last bit.
    """
    fractions = {
        ast.unparse(node.targets[0]) for node in tree.body if isinstance(node, ast.Assign) and _is_fraction(node.value)
    }
    beside = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare)
        and type(node.ops[0]) in ORDERED
        and any(_is_fraction(part) or ast.unparse(part) in fractions for part in ast.walk(node))
    ]
    skipped = {id(node) for node in beside} | {
        id(inner) for node in ast.walk(tree) for part in _without_behaviour(node) for inner in ast.walk(part)
    }
    found, places = [], _places(tree, tree, "")
    for node in ast.walk(tree):
        for change in [] if id(node) in skipped else _changes(node):
            function, statement = places[id(node)]
            before, kept = _first_line(statement), dict(vars(node))
            vars(node).update(change)
            found.append(Mutant(node, change, f"{function}: {before} -> {_first_line(statement)}"))
            vars(node).update(kept)
    return found


def _places(node: ast.AST, statement: ast.AST, function: str) -> dict[int, tuple[str, ast.AST]]:
    """The function and the statement of a node and all inside it."""
    statement = node if isinstance(node, ast.stmt) else statement
    found = {id(node): (function, statement)}
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        function = f"{function}.{node.name}".lstrip(".")
    for inner in ast.iter_child_nodes(node):
        found |= _places(inner, statement, function)
    return found


def _first_line(statement: ast.AST) -> str:
    return next(line for line in ast.unparse(statement).splitlines() if not line.startswith("@"))


def _is_fraction(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, float) and node.value % 1 != 0


def _without_behaviour(node: Any) -> list[Any]:
    """Parts that change nothing, what is told, or how long is searched: annotations, decorators, messages, efforts."""
    call = node.value if isinstance(node, ast.Expr) else node
    told = isinstance(call, ast.Call) and ast.unparse(call.func).startswith(UNSEEN)
    if told or isinstance(node, ast.JoinedStr | ast.Assert | ast.Raise):
        return [node]
    if isinstance(node, ast.keyword) and node.arg in FREE:
        return [node.value]
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return [node]
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".reshape"):
        return [one for one in node.args if ast.unparse(one) == "-1"]  # any number below 0 is what is left
    parts = [getattr(node, name, None) for name in ("annotation", "returns")]
    return [*filter(None, parts), *getattr(node, "decorator_list", [])]


def _changes(node: Any) -> list[dict[str, Any]]:
    match node:
        case ast.If() | ast.IfExp():
            return [{"test": ast.Constant(value=True)}, {"test": ast.Constant(value=False)}]
        case ast.While():
            return [{"test": ast.Constant(value=False)}]
        case ast.Expr(value=ast.Call()):
            return [{"value": ast.Constant(value=None)}]
        case ast.UnaryOp(op=ast.Not()):
            return [{"operand": ast.UnaryOp(op=ast.Not(), operand=node.operand)}]
        case ast.Constant(value=bool() | int() as value):
            return [{"value": not value if isinstance(value, bool) else value + 1}]
        case ast.Compare() if type(node.ops[0]) in SWAPPED:
            return [{"ops": [SWAPPED[type(node.ops[0])](), *node.ops[1:]]}]
        case ast.BinOp() | ast.AugAssign() | ast.BoolOp() if type(node.op) in SWAPPED:
            return [{"op": SWAPPED[type(node.op)]()}]
        case ast.Name(id=name) if name in SWAPPED:
            return [{"id": SWAPPED[name]}]
        case ast.Attribute(attr=name) if name in SWAPPED:
            return [{"attr": SWAPPED[name]}]
    return []


def files_of(room: str) -> tuple[list[str], list[str]]:
    """The modules of a room, and its tests."""
    folder, modules, tests = ROOMS[room]
    split = [(test if "/" in test else f"{folder}/{test}").rpartition("/") for test in tests.split()]
    return [f"{folder}/{module}.py" for module in modules.split()], [f"tests/{a}/test_{b}.py" for a, _, b in split]


def passes(tree: Path, room: str, seconds: float, *, quick: bool) -> bool | None:
    """Whether a room's tests pass, `None` if not in time, in a process with the libraries, and nothing of ours."""
    child = os.fork()
    if not child:
        os.setsid()
        os.chdir(tree)
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        for name in [name for name in sys.modules if name.startswith("benchmarks")]:
            del sys.modules[name]
        sys.path[:] = [str(tree), *(path for path in sys.path if Path(path or ".").resolve() != ROOT)]
        os.environ |= {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
        numba.config.DISABLE_JIT = quick and room in INTERPRETED  # type: ignore[attr-defined]
        chosen, tests = ["-k", QUICK] if quick else [], files_of(room)[1]
        arguments = ["-x", "-q", "-n0", "-pno:cacheprovider"]
        if quick and room in WITHOUT_RANKS:
            hypothesis.settings.register_profile("alone", deadline=None, derandomize=True)
            hypothesis.settings.load_profile("alone")
            if first := pytest.main([*arguments, "--noconftest", tests[0]]):
                os._exit(int(first))
        os._exit(int(pytest.main([*arguments, *chosen, *tests])))
    status, ends = None, time.monotonic() + seconds
    while status is None and time.monotonic() < ends:
        ended, code = os.waitpid(child, os.WNOHANG)
        status = code if ended else None
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # and whatever the tests have started
    if status is None:
        os.waitpid(child, 0)
    return None if status is None else status == 0


def try_room(tree: Path, room: str, rooms: dict[str, Any], options: argparse.Namespace, ends: float) -> None:
    """Goes on with a room, and adds to what is known of it."""
    known = rooms.setdefault(room, {"tried": 0, "noticed": 0, "late": 0, "same": {}, "survivors": []})
    modules = {file: ast.parse((ROOT / file).read_text("utf-8")) for file in files_of(room)[0]}
    drawn = [(file, mutant) for file, module in modules.items() for mutant in mutants(module)]
    gone = {(file, name) for file in modules for name in SAME.get(file, {})} - {(file, one.name) for file, one in drawn}
    assert not gone, f"same_mutants.json names what is no mutant: {gone}"
    random.Random(options.seed).shuffle(drawn)
    for told in [*known["survivors"]]:  # of which some may have been argued away since
        file, _, name = told.partition(": ")
        if reason := SAME.get(file.partition(":")[0], {}).get(name):
            known["survivors"].remove(told)
            known["same"][told] = reason
    left = drawn[known["tried"] : options.count]
    if not left or time.monotonic() > ends:
        return
    began = time.monotonic()
    assert passes(tree, room, 600, quick=True), f"the tests of {room} fail without a mutant"
    limit = 60 + 5 * (time.monotonic() - began)
    for file, mutant in left:
        if time.monotonic() > ends:
            break
        kept = dict(vars(mutant.node))
        vars(mutant.node).update(mutant.change)
        (tree / file).write_text(ast.unparse(ast.fix_missing_locations(modules[file])), encoding="utf-8")
        vars(mutant.node).update(kept)
        told, reason = f"{file}:{mutant.node.lineno}: {mutant.name}", SAME.get(file, {}).get(mutant.name)
        passed = passes(tree, room, limit, quick=True) and passes(tree, room, 900, quick=False)
        if not passed:
            known["noticed"] += 1
            known["late"] += passed is None
            if reason:
                print(f"{told}\n  is noticed, though {reason}", flush=True)
        elif reason:
            known["same"][told] = reason
        else:
            known["survivors"].append(told)
            print(told, flush=True)
        shutil.copy(ROOT / file, tree / file)
        known["tried"] += 1
        results.write(options.json, {"seed": options.seed, **totals(rooms), "rooms": rooms})
    print(f"{room}: {totals({room: known})}", flush=True)


def totals(rooms: dict[str, Any]) -> dict[str, Any]:
    """How many mutants are tried, noticed, late of these, the same, and left; what share of the others is noticed."""
    found = {name: sum(one[name] for one in rooms.values()) for name in ("tried", "noticed", "late")}
    found["same"] = sum(len(one["same"]) for one in rooms.values())
    found["left"] = found["tried"] - found["noticed"] - found["same"]
    return found | {"share": round(found["noticed"] / max(found["tried"] - found["same"], 1), 4)}


def main() -> int:
    """Tries mutants of each room."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rooms", choices=ROOMS, nargs="+", default=list(ROOMS), help="what is changed")
    parser.add_argument("--count", type=int, default=25, help="mutants of each room, drawn at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=1e9, help="after which no further mutant is tried")
    parser.add_argument("--json", type=Path, help="the result file")
    options = parser.parse_args()
    known = options.json and options.json.exists()
    rooms: dict[str, Any] = json.loads(options.json.read_text())["rooms"] if known else {}
    ends = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv*", ".hypothesis", "results", "out"))
        for room in options.rooms:
            try_room(tree, room, rooms, options, ends)
    results.write(options.json, {"seed": options.seed, **totals(rooms), "rooms": rooms})
    print(f"all: {totals(rooms)}")
    return int(totals(rooms)["share"] < 0.9)


if __name__ == "__main__":
    sys.exit(main())
