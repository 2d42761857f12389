"""Peers' modules out of checkouts that the user gives: nothing of theirs is copied, built or changed."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import subprocess
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class CheckoutError(ValueError):
    """A checkout cannot be used; the message names what is missing, and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkout:
    """Whose code ran.

    Attributes:
        name: The project.
        commit: Of the checkout: git's, or what its file `COMMIT` says; `unknown` where there is neither.
        compiled: What is used of the parts that the project compiles.
        skipped: Packages whose `__init__` was not run, since it imports what is not installed.
    """

    name: str
    commit: str
    compiled: str
    skipped: tuple[str, ...] = ()

    def __str__(self) -> str:
        skipped = f", without running the __init__ of {', '.join(self.skipped)}" if self.skipped else ""
        return f"{self.name} at {self.commit} ({self.compiled}{skipped})"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecsysExamples:
    """NVIDIA recsys-examples: its batch shuffler.

    Attributes:
        checkout: Whose code it is.
        shuffler: Module with `BaseTaskBalancedBatchShuffler`.
        batch: Module with `BaseBatch`.
    """

    checkout: Checkout
    shuffler: Any
    batch: Any


def load_recsys_examples(path: Path) -> RecsysExamples:
    """Imports the shuffler of a checkout of NVIDIA recsys-examples.

    Raises:
        CheckoutError: If it is none, or what the shuffler imports is missing.
    """
    root = path / "examples"
    if not (root / "commons" / "distributed" / "batch_shuffler.py").is_file():
        raise CheckoutError(f"{path} has no examples/commons/distributed/batch_shuffler.py; give a checkout's root")
    names = ("distributed.batch_shuffler", "sequence_batch.batch", "perf_model.partitioner")
    skipped = _import_from(root, "commons", ("commons.utils",), names)
    shuffler, batch, partitioner = (importlib.import_module(f"commons.{name}") for name in names)
    compiled = (
        "its compiled Karmarkar-Karp"
        if partitioner._kk_cpu_ops is not None
        else "its Karmarkar-Karp in Python: kk_cpu_ops is not built; in examples/commons run "
        "`BUILD_EXT_ONLY=kk_cpu_ops python setup.py build_ext --inplace`"
    )
    checkout = Checkout(name="NVIDIA recsys-examples", commit=commit_of(path), compiled=compiled, skipped=skipped)
    return RecsysExamples(checkout=checkout, shuffler=shuffler, batch=batch)


def load_torcheasyrec(path: Path) -> Any:
    """The planner of a checkout of TorchEasyRec: its module with `DynamicProgrammingProposer`.

    Raises:
        CheckoutError: If it is none, or its protocol buffers are not generated.
    """
    if not (path / "tzrec" / "utils" / "plan_util.py").is_file():
        raise CheckoutError(f"{path} has no tzrec/utils/plan_util.py; give a checkout's root")
    if not (path / "tzrec" / "protos" / "feature_pb2.py").is_file():
        raise CheckoutError(f"{path} has no tzrec/protos/feature_pb2.py; run its scripts/gen_proto.sh")
    _import_from(path, "tzrec", ("tzrec", "tzrec.utils"), ("utils.plan_util",))
    return importlib.import_module("tzrec.utils.plan_util")


def commit_of(path: Path) -> str:
    """The commit of a checkout: git's, if it is the root of a working tree, else what its file `COMMIT` holds."""
    noted = path / "COMMIT"
    if noted.is_file():
        return noted.read_text().strip()[:12]
    asked = subprocess.run(
        ["git", "-C", str(path), "rev-parse", "--show-toplevel", "HEAD"], capture_output=True, text=True, check=False
    )
    top, _, commit = asked.stdout.strip().partition("\n")
    return commit[:12] if asked.returncode == 0 and Path(top).resolve() == path.resolve() else "unknown"


def _import_from(root: Path, package: str, heavy: tuple[str, ...], names: tuple[str, ...]) -> tuple[str, ...]:
    """Imports modules of a package under `root`; where that needs what is not installed, without its heavy `__init__`.

    Returns:
        The packages whose `__init__` was not run.
    """
    if package in sys.modules:
        raise CheckoutError(f"a package {package!r} is imported already; load each checkout once, in its own process")
    sys.path.append(str(root))  # behind everything, so that nothing of theirs hides a package of the environment
    try:
        for name in names:
            importlib.import_module(f"{package}.{name}")
    except Exception:  # theirs run more than imports
        for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
            del sys.modules[name]
    else:
        return ()
    for name in heavy:
        hollow = types.ModuleType(name)
        hollow.__path__ = [str(root / name.replace(".", "/"))]
        sys.modules[name] = hollow
    try:
        for name in names:
            importlib.import_module(f"{package}.{name}")
    except ImportError as error:
        raise CheckoutError(f"{root}: {error}; install what it names") from error
    return heavy
