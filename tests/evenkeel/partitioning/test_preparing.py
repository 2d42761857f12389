"""Kernels that are compiled in the background of a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SLOW = """
import os, time
from pathlib import Path
HERE = Path(__file__).parent
def note(name):
    (HERE / f"{name}.new").write_text(str(os.getpid()))
    (HERE / f"{name}.new").rename(HERE / name)
def part():
    note("began")
    time.sleep(600)
def load():
    note("loaded")
"""
MAIN = """
import time
from pathlib import Path
import slow
from evenkeel.partitioning.preparing import KernelSet, Preparation
preparation = Preparation([KernelSet(sources=slow.HERE, load="slow:load", parts=("slow:part",))])
while not any((slow.HERE / name).exists() for name in ("began", "loaded")):
    time.sleep(0.01)
"""


def test_a_process_that_ends_leaves_no_compiler_behind(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    environment = os.environ | {"PYTHONPATH": path, "EVENKEEL_CACHE_DIR": str(tmp_path / "cache")}
    subprocess.run([sys.executable, "-c", MAIN], env=environment, check=True, timeout=100)
    assert not (tmp_path / "loaded").exists()  # by a thread that the process would end under
    compiler = int((tmp_path / "began").read_text())
    assert not Path(f"/proc/{compiler}").exists()
