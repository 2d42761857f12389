"""From the start of a job's processes until its first batch is trained, and until batches are balanced.

python -m benchmarks.first_batch --json benchmarks/results/first_batch.json

Real ranks over Gloo with an embedded balancer and steps of 0.1 s: with no compiled kernels anywhere (as after an
installation), with kernels that are compiled, with more ranks that share a folder without any, and where no folder can
be written. `--label before` keeps the figures of another version beside these.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

STEP = 0.1  # seconds of a step
BALANCED = 5  # balanced rounds after which a job ends
CASES = {"fresh": 2, "warm": 2, "shared by 4": 4, "no folder": 2}  # and their ranks


def _rank() -> None:
    started = float(os.environ["STARTED"])
    import numpy as np
    import torch
    import torch.distributed as dist

    from trainer_client import BalancedLoader, Balancer

    imported = time.time() - started
    dist.init_process_group("gloo")
    rng = np.random.default_rng(dist.get_rank())

    def batches() -> Iterator[dict[str, torch.Tensor]]:
        while True:
            yield {"x": torch.from_numpy(rng.lognormal(4, 1.5, 64)).reshape(64, 1)}

    steps: list[tuple[float, str]] = []
    with Balancer.embedded() as balancer:
        loader = BalancedLoader(batches(), balancer, cost=lambda batch: batch["x"][:, 0])
        for _ in loader:
            time.sleep(STEP)
            steps.append((time.time() - started, str(loader.report.mode)))
            if sum(mode == "embedded" for _, mode in steps) >= BALANCED:
                break
    longest = max(after - before for (before, _), (after, _) in pairwise(steps))
    print(json.dumps({
        "imported": imported, "first_batch": steps[0][0],
        "balanced": next(at for at, mode in steps if mode == "embedded"),
        "unbalanced_steps": sum(mode != "embedded" for _, mode in steps), "longest_step": longest,
    }))  # fmt: skip
    dist.destroy_process_group()


def run(num_ranks: int, cache: str, scratch: str) -> dict[str, float]:
    """Starts a job; the figures of its slowest rank, in seconds from the start of its processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "EVENKEEL_CACHE_DIR": cache, "NUMBA_CACHE_DIR": cache, "TMPDIR": scratch, "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(num_ranks), "STARTED": str(time.time()),
    }  # fmt: skip
    command = [sys.executable, "-m", "benchmarks.first_batch", "--rank"]
    ranks = [
        subprocess.Popen(command, env=environment | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(num_ranks)
    ]
    try:
        found: list[dict[str, float]] = [json.loads(rank.communicate(timeout=400)[0]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return {key: round(max(each[key] for each in found), 2) for key in found[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--label", default="now")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        _rank()
        return
    import numba

    results: dict[str, Any] = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    results |= {
        "command": "python -m benchmarks.first_batch",
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "versions": {"python": platform.python_version(), "numba": numba.__version__},
        "unit": "seconds from the start of the processes, of the slowest rank",
    }
    folder = Path(tempfile.mkdtemp())
    try:
        for case in options.cases:
            cache, scratch = folder / ("fresh" if case == "warm" else case), folder
            if case == "no folder":  # below a file nothing can be made
                (folder / "file").touch()
                cache, scratch = folder / "file" / "kernels", folder / "file"
            elif case == "warm" and not cache.exists():
                run(2, str(cache), str(scratch))
            load = os.getloadavg()[0]
            found = run(CASES[case], str(cache), str(scratch)) | {"ranks": CASES[case], "load_before": round(load, 1)}
            results.setdefault(case, {})[options.label] = found
            print(case, found, flush=True)
    finally:
        shutil.rmtree(folder)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
