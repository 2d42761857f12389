import importlib
import pkgutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numba.core.dispatcher import Dispatcher

import evenkeel.partitioning
from evenkeel.partitioning import PartitionError, partition, plan_digest, slice_plan, strategies, warm_up
from evenkeel.partitioning.kernel_cache import digest_of_kernels

SOURCES = digest_of_kernels(Path(evenkeel.partitioning.__file__).parent)


def _kernels() -> dict[str, Any]:
    found = {}
    for module in pkgutil.iter_modules(evenkeel.partitioning.__path__, "evenkeel.partitioning."):
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
        plan_digest(np.arange(60) % 5, np.full(5, 12), lengths)
    assert {name: len(dispatcher.signatures) for name, dispatcher in _kernels().items()} == before


def test_nothing_compiles_after_warm_up() -> None:
    """In a process of its own: here, other tests have called the kernels already."""
    program = "from tests.evenkeel.partitioning.test_compile import exercise_everything as e; e()"
    root = Path(__file__).parents[3]
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, cwd=root)
    assert result.returncode == 0, result.stderr


def test_kernels_work_where_no_folder_can_be_written() -> None:
    program = (
        "from evenkeel.partitioning import kernel_cache\n"
        "kernel_cache.roots = lambda: iter(())\n"
        "import numpy as np\n"
        "from evenkeel.partitioning.sorting import ascending_order\n"
        "print(ascending_order(np.array([3, 1, 2])).tolist())\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert result.stdout.strip() == "[1, 2, 0]", result.stderr


def test_cached_kernels_are_stamped_with_all_sources() -> None:
    """A kernel that calls another one, in another file, must not outlive a change of that file."""
    for name, dispatcher in _kernels().items():
        assert dispatcher._cache._cache_file._source_stamp == SOURCES, name


def test_kernels_of_another_folder_are_stamped_with_its_sources_too(tmp_path: Path) -> None:
    from trainer_client.balancing.redistribution import moves

    stamps = {value._cache._cache_file._source_stamp for value in vars(moves).values() if isinstance(value, Dispatcher)}
    assert stamps == {digest_of_kernels(Path(moves.__file__).parent)}
    (tmp_path / "adding.py").write_text("@kernel\ndef add(a, b):\n    return a + b\n")
    (tmp_path / "other.py").write_text("nothing compiled")
    digest = digest_of_kernels.__wrapped__
    before = digest(tmp_path)
    (tmp_path / "other.py").write_text("nothing compiled either")
    assert digest(tmp_path) == before
    (tmp_path / "adding.py").write_text("@kernel\ndef add(a, b):\n    return a - b\n")
    assert digest(tmp_path) != before != SOURCES
