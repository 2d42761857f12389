"""Kernels: compiled once, kept in Numba's cache, exact; and what is there until they are."""

import importlib
import os
import pkgutil
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba.core.dispatcher import Dispatcher

import evenkeel.partitioning
from evenkeel.partitioning import PartitionError, partition, slice_plan, strategies, warm_up
from evenkeel.partitioning import compile as compiling

SMALL = """
import os, time
from pathlib import Path
import numpy as np
from evenkeel.partitioning.compile import Preparation, kernel, step
@step
def of_no_kernel(a):
    return a
@kernel
def add(a, b):
    return a + b
def load():
    if os.environ.get("SLOW"):
        Path(__file__).with_name("began").touch()
        time.sleep(600)
    assert add(1, 2) == 3
def state():
    begun = Preparation(load)
    early = begun.ready
    assert begun.wait(100)
    return early, sum(add.stats.cache_hits.values()), sum(add.stats.cache_misses.values())
"""


def run(program: str, folder: Path, **environment: str) -> str:
    (folder / "package").mkdir(exist_ok=True)
    (folder / "package" / "__init__.py").write_text("")
    (folder / "package" / "small.py").write_text(SMALL)
    path = os.pathsep.join([str(folder), *filter(None, sys.path)])
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=200,
        env=os.environ | {"PYTHONPATH": path, "EVENKEEL_CACHE_DIR": str(folder / "cache")} | environment,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_what_is_compiled_once_is_loaded_before_the_first_round(tmp_path: Path) -> None:
    """Also from a folder that is read-only by then, as that of an image."""
    program = "from package.small import state; print(*state())"
    assert run(program, tmp_path) == "False 1 0"  # another process has compiled it
    read_only = (
        "import os\ndef refuse(path, *_, **__):\n    raise OSError(30, 'read-only', path)\nos.makedirs = refuse\n"
    )
    assert run(read_only + program, tmp_path) == "True 1 0"
    for file in (tmp_path / "cache").rglob("*.nb?"):
        file.write_bytes(b"damaged")
    assert run(program, tmp_path) == "False 1 0"


def test_a_process_that_ends_does_not_wait_for_its_compiler(tmp_path: Path) -> None:
    program = (
        "import time\nfrom pathlib import Path\nfrom package import small\n"
        "from evenkeel.partitioning.compile import Preparation\n"
        "process = []\nimport subprocess\nmade = subprocess.Popen\n"
        "subprocess.Popen = lambda *a, **k: process.append(made(*a, **k)) or process[0]\n"
        "preparation = Preparation(small.load)\n"
        "while not Path(small.__file__).with_name('began').exists(): time.sleep(0.01)\n"
        "assert not preparation.ready\nprocess[0].kill()\n"
    )
    run(program, tmp_path, SLOW="1")


def _kernels() -> dict[str, Any]:
    found = {}
    for module in pkgutil.walk_packages(evenkeel.partitioning.__path__, "evenkeel.partitioning."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, Dispatcher):
                found[f"{value.py_func.__module__}.{value.py_func.__name__}"] = value
    return found


def test_kernels_release_the_gil_and_keep_arithmetic_exact() -> None:
    kernels = _kernels()
    assert len(kernels) > 20
    for name, dispatcher in kernels.items():
        assert dispatcher.targetoptions.get("nogil"), name
        assert not dispatcher.targetoptions.get("fastmath"), name
        assert not dispatcher.targetoptions.get("parallel"), name


def exercise_everything() -> None:
    warm_up()
    before = {name: len(dispatcher.signatures) for name, dispatcher in _kernels().items()}
    rng = np.random.default_rng(0)
    for costs in (rng.integers(0, 99, 60), rng.random(60), np.frombuffer(rng.random(60).tobytes())):
        for homes in (np.arange(60) // 12, np.zeros(60, np.int32), np.frombuffer(bytes(240), np.int32)):
            for strategy in strategies():
                for counts in ("equal", "free"):
                    partition(costs, homes, 5, strategy=strategy, counts=counts)
                    options: dict[str, Any] = {"speeds": [1, 2, 3, 4, 5], "nodes": [0, 0, 1, 1, 2]}
                    partition(costs[::-1], homes, 5, strategy=strategy, counts=counts, sizes=np.ones(60), **options)
                    for caps in (13, 20, 30):
                        limited = {"memory": rng.integers(1, 3, 60), "memory_caps": np.full(5, caps)}
                        with suppress(PartitionError):
                            partition(costs, homes, 5, strategy=strategy, counts=counts, **limited)
    for seed in range(60):
        memory = np.random.default_rng(seed).integers(1, 4000, 8)
        with suppress(PartitionError):
            partition(memory, [0] * 4 + [1] * 4, 2, memory=memory, memory_caps=np.full(2, memory.sum() // 2))
    for dtype in (np.int16, np.int32, np.uint32, np.int64):
        lengths = np.frombuffer(np.ones((60, 3), dtype).tobytes(), dtype).reshape(60, 3)
        slice_plan(np.arange(60) % 5, np.full(5, 12), lengths)
    assert {name: len(dispatcher.signatures) for name, dispatcher in _kernels().items()} == before


def test_nothing_compiles_after_warm_up() -> None:
    """In a process of its own: here, other tests have called the kernels already."""
    program = "from tests.evenkeel.partitioning.test_compile import exercise_everything as e; e()"
    root = Path(__file__).parents[3]
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, cwd=root)
    assert result.returncode == 0, result.stderr


def test_a_kernel_is_compiled_again_when_one_that_it_calls_has_changed(tmp_path: Path) -> None:
    (tmp_path / "adding.py").write_text("import numba\n@kernel\ndef add(a, b):\n    return a + b\n")
    (tmp_path / "other.py").write_text("nothing compiled")
    digest = compiling._digest.__wrapped__
    before = digest(tmp_path)
    (tmp_path / "other.py").write_text("nothing compiled either")
    assert digest(tmp_path) == before
    (tmp_path / "adding.py").write_text("import numba\n@kernel\ndef add(a, b):\n    return a - b\n")
    assert digest(tmp_path) != before
    for dispatcher in _kernels().values():
        file = Path(dispatcher.py_func.__code__.co_filename)
        assert re.search(rb"^(@|\w+ = )(kernel|step)\b", file.read_bytes(), re.MULTILINE), f"{file} is in no digest"
        folder = file.parent
        assert dispatcher._cache._cache_file._source_stamp == compiling._digest(folder)


@pytest.mark.parametrize("name", ["kernel", "step"])
def test_kernels_work_where_no_folder_can_be_written(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("no locator available")

    monkeypatch.setattr(compiling, "_Cache", refuse)
    assert getattr(compiling, name)(lambda a: a + 1)(1) == 2
