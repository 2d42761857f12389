"""All compiled kernels under bounds checks, on random instances at the ends of what they may be given.

python -m benchmarks.kernels_fuzz --instances 200000 --json benchmarks/results/kernels_fuzz.json

Partitions, windows, slices, sorting, exchanges, gathers and bucketize, each answer held against what must be true of it
and small ones against every assignment there is. Instances run in a process of its own, with NUMBA_BOUNDSCHECK=1 and
its own folder for compiled kernels: an index out of bounds raises there, and a crash or a hang is told by its instance.
An instance is a function of (seed, number): `--seed 1 --first 77 --instances 1` runs one again. With `--seconds` a run
ends early; run again with the same file, it goes on where it ended.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

KINDS = ("partition", "window", "slices", "moves", "gathers", "bucketize", "order", "splits")
SHARES = (0.56, 0.05, 0.08, 0.10, 0.06, 0.09, 0.02, 0.04)
PATIENCE = 120.0  # seconds after which an instance counts as hanging
MOST = 2500  # instances of one process, where there are several
COMPILING = 1800.0  # before the first instance is done


def _checks() -> dict[str, Callable[[Any], str]]:
    from benchmarks import kernels_fuzz_moves as moves
    from benchmarks import kernels_fuzz_partitions as partitions
    from benchmarks import kernels_fuzz_splits as splits
    from evenkeel.partitioning import fitting

    fitting.PLACEMENTS = 20_000  # more than any instance needs that is held against all assignments
    return dict(
        zip(
            KINDS,
            (
                partitions.check_partition, partitions.check_window, partitions.check_slices, moves.check_moves,
                moves.check_gathers, moves.check_bucketize, moves.check_order, splits.check_split,
            ),
            strict=True,
        )
    )  # fmt: skip


def instance(seed: int, number: int, checks: dict[str, Callable[[Any], str]]) -> tuple[str, str]:
    """Runs one instance; its kind and what it came to.

    Raises:
        AssertionError: If an answer is wrong.
        IndexError: If a kernel reads or writes beyond an array.
    """
    import numpy as np

    rng = np.random.default_rng([seed, number])
    kind = str(rng.choice(KINDS, p=SHARES))
    return kind, checks[kind](rng)


def _run_here(seed: int, first: int, instances: int, seconds: float, progress: Path, outcome: Path) -> None:
    """In the process under bounds checks: writes the number of the instance at hand before it begins."""
    import numba

    assert numba.config.BOUNDSCHECK == 1  # type: ignore[attr-defined]
    checks, found, failures, done = _checks(), Counter[str](), [], 0
    with progress.open("r+b") as file, mmap.mmap(file.fileno(), 16) as place:
        started = None
        for number in range(first, first + instances):
            place[:16] = struct.pack("<qd", number, time.time())
            try:
                kind, result = instance(seed, number, checks)
                found[f"{kind}: {result}"] += 1
            except Exception as error:
                failures.append({"number": number, "error": f"{type(error).__name__}: {error}"})
            done += 1
            started = started or time.monotonic()  # the first one compiles
            if time.monotonic() - started > seconds:
                break
    outcome.write_text(json.dumps({"done": done, "found": found, "failures": failures}))


def run(seed: int, first: int, instances: int, seconds: float, cache: Path) -> dict[str, Any]:
    """Runs instances in a process of its own, watched.

    Returns:
        How many were done, what they came to, and the failures; one that ended the process is the last.
    """
    environment = os.environ | {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        progress, outcome = Path(folder) / "progress", Path(folder) / "outcome"
        progress.write_bytes(bytes(16))
        command = [sys.executable, "-m", "benchmarks.kernels_fuzz", "--child", folder, "--seed", str(seed)]
        command += ["--first", str(first), "--instances", str(instances), "--seconds", str(seconds)]
        child = subprocess.Popen(command, env=environment)
        began = time.time()
        while True:
            try:
                child.wait(1.0)
                break
            except subprocess.TimeoutExpired:
                number, since = struct.unpack("<qd", progress.read_bytes())
                compiling = number == first or not since
                if time.time() - (since or began) > (COMPILING if compiling else PATIENCE):
                    child.send_signal(signal.SIGKILL)
        if outcome.exists():
            result: dict[str, Any] = json.loads(outcome.read_text())
            return result
        number, _ = struct.unpack("<qd", progress.read_bytes())
        how = f"ended with {child.returncode}; repeat with --seed {seed} --first {number} --instances 1"
        return {"done": number + 1 - first, "found": {}, "failures": [{"number": number, "error": how}]}


def run_all(seed: int, first: int, instances: int, seconds: float, cache: Path, jobs: int) -> dict[str, Any]:
    """As `run`, with several processes at a time for consecutive parts, of which none begins after so many seconds."""
    share = instances if jobs == 1 else min(-(-instances // jobs), MOST)
    until = time.monotonic() + seconds

    def part(begin: int) -> dict[str, Any]:
        if time.monotonic() > until:
            return {"done": 0, "found": {}, "failures": []}
        return run(seed, first + begin, min(share, instances - begin), seconds if jobs == 1 else 1e9, cache)

    with ThreadPoolExecutor(jobs) as pool:
        results = list(pool.map(part, range(0, instances, share)))
    whole = next((number for number, one in enumerate(results) if one["done"] < share), len(results) - 1)
    kept = results[: whole + 1]  # the next run goes on where this one has a gap
    return {
        "done": sum(one["done"] for one in kept),
        "found": sum((Counter(one["found"]) for one in kept), Counter()),
        "failures": [failure for one in results for failure in one["failures"]],
    }


def _versions() -> dict[str, str]:
    import numba
    import numpy as np
    import torch

    return {
        "python": platform.python_version(), "numpy": np.__version__, "numba": numba.__version__,
        "torch": torch.__version__,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=20_000, help="in all, those of the file included")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first instance, without a file")
    parser.add_argument("--seconds", type=float, default=1e9, help="after which this run ends, compiling not counted")
    parser.add_argument("--jobs", type=int, default=1, help="processes, each with a part of the instances")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / f"evenkeel-bounds-{os.getuid()}")
    parser.add_argument("--json", type=Path, help="result file; a run goes on with what it has")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        _run_here(
            options.seed, options.first, options.instances, options.seconds,
            options.child / "progress", options.child / "outcome",
        )  # fmt: skip
        return
    known: dict[str, Any] = {"instances": 0, "seconds": 0.0, "outcomes": {}, "failures": []}
    if options.json is not None and options.json.exists():
        known |= json.loads(options.json.read_text())
        assert known["seed"] == options.seed, "the file is of another seed"
    first = known["instances"] or options.first
    started = time.monotonic()
    result = run_all(
        options.seed, first, options.instances - known["instances"], options.seconds, options.cache, options.jobs
    )
    known |= {
        "command": f"python -m benchmarks.kernels_fuzz --instances {options.instances} --seed {options.seed}",
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "versions": _versions(),
        "seed": options.seed,
        "instances": known["instances"] + result["done"],
        "seconds": round(known["seconds"] + time.monotonic() - started, 1),
        "outcomes": dict(sorted((Counter(known["outcomes"]) + Counter(result["found"])).items())),
        "failures": known["failures"] + result["failures"],
    }
    if options.json is not None:
        options.json.write_text(json.dumps(known, indent=1) + "\n")
    print(json.dumps(known, indent=1))
    sys.exit(1 if known["failures"] else 0)


if __name__ == "__main__":
    main()
