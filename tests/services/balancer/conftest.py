from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.harness.balancer_process import ServiceProcess, running_balancer

STRATEGIES = """
import ctypes, time
from evenkeel.partitioning.lpt import lpt

def crash(problem):
    ctypes.string_at(0)

def spin(problem):
    while True:
        pass

def slow(problem):
    time.sleep(0.5)
    return lpt(problem)

def slower(problem):
    time.sleep(1.5)
    return lpt(problem)

def fail(problem):
    raise RuntimeError("injected")
"""


@pytest.fixture(scope="package")
def balancer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    """A balancer with limits that tests can meet, and an installed package of strategies that misbehave."""
    folder = tmp_path_factory.mktemp("strategies")
    (folder / "hostile.py").write_text(STRATEGIES)
    (folder / "hostile-1.dist-info").mkdir()
    (folder / "hostile-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: hostile\nVersion: 1\n")
    names = "".join(f"{name} = hostile:{name}\n" for name in ("crash", "spin", "slow", "slower", "fail"))
    (folder / "hostile-1.dist-info" / "entry_points.txt").write_text(f"[evenkeel.strategies]\n{names}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{folder}:{Path.cwd()}")
        with running_balancer(
            "--workers", "2", "--partition-timeout-seconds", "4", "--max-ranks", "1024", "--max-samples", "131072",
            "--max-batches", "4", "--max-message-bytes", "2000000", "--max-calls", "8", "--reflection", "true",
            interpreter=True,
        ) as process:  # fmt: skip
            yield process
