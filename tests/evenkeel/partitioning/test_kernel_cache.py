"""Where kernels are kept, and how they get there; with a small kernel of the test's own."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from evenkeel.partitioning import kernel_cache
from evenkeel.partitioning.kernel_cache import KernelFolder
from evenkeel.partitioning.preparing import KernelSet, Preparation

ROOT = Path(__file__).parents[3]
SOURCE = """
from pathlib import Path
from evenkeel.partitioning.compile import kernel
from evenkeel.partitioning.preparing import KernelSet

@kernel
def double(x):
    return 2 * x

def load():
    assert double(21) == 42

KERNELS = KernelSet(sources=Path(__file__).parent, load="smallest:load", parts=("smallest:load", "smallest:load"))
"""
PROGRAM = """
import json, sys
import smallest
from evenkeel.partitioning.preparing import ready
before = smallest.KERNELS.complete
ready([smallest.KERNELS])
stats = smallest.double.stats
print(json.dumps([before, sum(stats.cache_hits.values()), sum(stats.cache_misses.values()),
                  str(smallest.KERNELS.folder.path), smallest.KERNELS.complete]))
"""


def start(tmp_path: Path, cache: Path, **variables: str) -> subprocess.Popen[str]:
    package = tmp_path / "package"
    package.mkdir(exist_ok=True)
    (package / "smallest.py").write_text(SOURCE)
    paths = os.pathsep.join([str(package), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": paths, "EVENKEEL_CACHE_DIR": str(cache), **variables}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen[str]) -> tuple[bool, int, int, Path, bool]:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    before, hits, misses, path, after = json.loads(out)
    return before, hits, misses, Path(path), after


def test_kernels_are_compiled_once_for_all_processes_and_damage_is_mended(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    together = [finish(process) for process in [start(tmp_path, cache) for _ in range(3)]]
    for _, _, _, path, complete in together:
        assert complete
        assert path.parent == cache
    folder = together[0][3]
    assert len(list(folder.glob("*.nbc"))) == 1
    assert finish(start(tmp_path, cache))[:3] == (True, 1, 0)
    for file in folder.glob("*.nbc"):
        file.write_bytes(file.read_bytes()[:100])
    assert finish(start(tmp_path, cache))[1:3] == (0, 1)
    assert finish(start(tmp_path, cache))[1:3] == (1, 0)


def test_processors_and_bounds_checks_have_folders_of_their_own(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    plain, generic, checked = (
        finish(process)[3].name
        for process in (
            start(tmp_path, cache),
            start(tmp_path, cache, NUMBA_CPU_NAME="generic"),
            start(tmp_path, cache, NUMBA_BOUNDSCHECK="1"),
        )
    )
    assert len({plain, generic, checked}) == 3


def test_a_complete_folder_is_used_wherever_it_is_else_the_first_that_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources, file = tmp_path / "sources", tmp_path / "file"
    sources.mkdir()
    file.touch()
    closed, shared, own = file / "below", tmp_path / "shared", tmp_path / "own"  # nothing can be made below a file
    monkeypatch.setattr(kernel_cache, "roots", lambda: iter([closed, own, shared]))
    first = KernelFolder(sources)
    assert first.path == own / first.name
    assert not first.complete
    complete = shared / first.name
    complete.mkdir(parents=True)
    (complete / "complete.json").write_text("{}")
    second = KernelFolder(sources)
    assert (second.path, second.complete) == (complete, True)
    monkeypatch.setattr(kernel_cache, "roots", lambda: iter([closed]))
    assert KernelFolder(sources).path is None


def test_nobody_elses_temporary_folder_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    last = list(kernel_cache.roots())[-1]
    assert last.parent == tmp_path
    assert last.stat().st_mode & 0o777 == 0o700
    last.chmod(0o755)
    assert last not in kernel_cache.roots()


def test_old_folders_of_other_versions_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cache, "roots", lambda: iter([tmp_path / "cache"]))
    (tmp_path / "sources").mkdir()
    folder = KernelFolder(tmp_path / "sources")
    assert folder.path is not None
    stale, recent = folder.path.with_name("kernels-sources-1"), folder.path.with_name("kernels-sources-2")
    for other in (stale, recent):
        other.mkdir()
        (other / "complete.json").touch()
    os.utime(stale / "complete.json", (0, 0))
    folder.mark_complete()
    assert folder.complete
    assert not stale.exists()
    assert recent.exists()


def test_a_preparation_that_has_all_kernels_is_ready_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cache, "roots", lambda: iter([tmp_path / "cache"]))
    kernel_cache.kernel_folder.cache_clear()
    (tmp_path / "sources").mkdir()
    kernels = KernelSet(tmp_path / "sources", f"{__name__}:_nothing", (f"{__name__}:_nothing",))
    try:
        preparation = Preparation([kernels])
        assert preparation.wait(60)
        assert kernels.complete
        assert Preparation([kernels]).ready
    finally:
        kernel_cache.kernel_folder.cache_clear()


def _nothing() -> None:
    """Loads no kernel."""


SLOW = """
import os, sys, threading, time
from pathlib import Path
from evenkeel.partitioning.preparing import KernelSet, ready

LOG = Path(os.environ["TEST_LOG"])

def note(what):
    with LOG.open("a") as file:
        file.write(f"{what}\\n")

def part():
    note("begin")
    end = time.monotonic() + 60
    while not LOG.with_name("go").exists() and time.monotonic() < end:
        time.sleep(0.01)
    note("end")

def load():
    note("load")

KERNELS = KernelSet(sources=Path(__file__).parent, load="slow:load", parts=("slow:part", "slow:part"))

if __name__ == "__main__":
    if sys.argv[1] == "die":
        threading.Thread(target=ready, args=([KERNELS],), daemon=True).start()
        while not LOG.exists():
            time.sleep(0.01)
        os._exit(0)
    if sys.argv[1] == "fork":
        threading.Thread(target=ready, args=([KERNELS],)).start()
        while not LOG.exists():
            time.sleep(0.01)
        if os.fork() == 0:
            sys.stdin.read()
            os._exit(0)
    else:
        ready([KERNELS])
"""


def start_slow(tmp_path: Path, what: str, log: str) -> subprocess.Popen[bytes]:
    package = tmp_path / "package"
    package.mkdir(exist_ok=True)
    (package / "slow.py").write_text(SLOW)
    paths = os.pathsep.join([str(package), str(ROOT)])
    variables = {"PYTHONPATH": paths, "EVENKEEL_CACHE_DIR": str(tmp_path / "cache"), "TEST_LOG": str(tmp_path / log)}
    command = [sys.executable, str(package / "slow.py"), what]
    return subprocess.Popen(command, env={**os.environ, **variables}, stdin=subprocess.PIPE)


def test_a_job_that_ends_while_its_kernels_are_compiled_leaves_no_second_compilation_to_the_next(
    tmp_path: Path,
) -> None:
    log = tmp_path / "log"
    assert start_slow(tmp_path, "die", log.name).wait(60) == 0
    (lock,) = (tmp_path / "cache").glob("*/lock")
    with lock.open("wb") as file, pytest.raises(BlockingIOError):  # by what it has begun
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    following = start_slow(tmp_path, "ready", log.name)
    (tmp_path / "go").touch()
    assert following.wait(60) == 0
    lines = log.read_text().split()
    assert lines[-1] == "load"
    running = [sum({"begin": 1, "end": -1}.get(line, 0) for line in lines[: end + 1]) for end in range(len(lines))]
    assert max(running) <= min(2, os.cpu_count() or 1)


def test_processes_forked_while_kernels_are_compiled_do_not_hold_the_lock(tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    forked = start_slow(tmp_path, "fork", "log")
    try:
        assert forked.wait(60) == 0  # its child is still there
        for file in (tmp_path / "cache").glob("*/complete.json"):
            file.unlink()
        assert start_slow(tmp_path, "ready", "second").wait(20) == 0
    finally:
        assert forked.stdin is not None
        forked.stdin.close()
