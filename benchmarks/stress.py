"""Many steps of balanced training in each kind of training loop: nothing hangs, no sample is lost or trained twice.

    python -m benchmarks.stress --ranks 2 --steps 10000 --json benchmarks/results/stress_2xh200.json
    python -m benchmarks.stress --ranks 2 --steps 200                        # on a CPU, over Gloo

It starts its ranks by torchrun, with NCCL where there are GPUs and Gloo otherwise. More ranks than GPUs share them, as
if they were on several hosts (then times say nothing). Loops:

- `ddp`, `fsdp2`: plain loops under `DistributedDataParallel` and `fully_shard`, batches of all sizes;
- `torchrec_base`, `torchrec_sparse_dist`, `torchrec_prefetch`: TorchRec's pipelines over `DistributedModelParallel`
  with row-wise and table-wise tables, FUSED and (on GPUs) FUSED_UVM_CACHING.

Every sample has an id and the sum of its values, and every trained batch is entered into a ledger on the device: which
ids, in which step, whether the values are those that were loaded. Odd ranks' data ends a step early. When no step ends
for `--hang-seconds`, every rank writes the stacks of all threads and ends; that counts as a hang, and the next loop
goes on in fresh processes. The exit status is 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.stress_loops import LOOPS
from services.operations.launch import running_service

BAD = ("hangs", "lost", "doubled", "unknown", "in_another_step", "batches_with_other_values", "fell_back")


def main() -> None:
    options = parse_arguments()
    console = Console(width=150)
    results: dict[str, Any] = {"command": "python -m benchmarks.stress " + " ".join(sys.argv[1:]), "loops": {}}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        address = ""
        if options.balancer == "grpc":
            address = stack.enter_context(running_service("services.balancer")).address
        remaining = list(options.loops)
        while remaining:
            found = run_ranks(remaining, options, Path(folder), address)
            results = found | results | {"loops": results["loops"] | found["loops"]}
            remaining = [loop for loop in remaining if loop not in results["loops"]]
            if options.json:
                options.json.parent.mkdir(parents=True, exist_ok=True)
                options.json.write_text(json.dumps(results, indent=1) + "\n")
    show(results, console)
    if any(is_wrong(entry) for entry in results["loops"].values()):
        sys.exit(1)


def run_ranks(loops: list[str], options: argparse.Namespace, folder: Path, address: str) -> dict[str, Any]:
    """Runs loops until all are done or one goes wrong; returns those that were run, at least one of them."""
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(options.ranks),
        "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0",
        "-m", "benchmarks.stress_rank", "--result", str(result), "--address", address, "--loops", *loops,
    ]  # fmt: skip
    for flag in PASSED_ON:
        value = getattr(options, flag)
        if value is not None:
            command += [f"--{flag.replace('_', '-')}", str(value)]
    ended = subprocess.run(command, check=False, env=os.environ | {"OMP_NUM_THREADS": str(options.threads)})
    if not result.exists():
        sys.exit(f"the ranks ended with status {ended.returncode} before the first loop")
    found: dict[str, Any] = json.loads(result.read_text())
    for entry in found["loops"].values():
        if entry.pop("running", False):
            stacks = {path.stem: path.read_text() for path in sorted(folder.glob("stacks_*.txt"))}
            hung = any("Timeout" in text for text in stacks.values())
            entry |= {"hangs": int(hung), "error": "" if hung else f"status {ended.returncode}", "stacks": stacks}
            for name, text in stacks.items():
                print(f"{name}:\n{text}", file=sys.stderr)
    return found


def is_wrong(entry: dict[str, Any]) -> bool:
    """Whether anything happened that must not."""
    if "left_out" in entry:
        return False
    flags = ("replicas_differ", "ranks_disagree", "error")
    return any(entry.get(key) for key in (*BAD, *flags)) or not entry.get("loss_is_finite", False)


def show(results: dict[str, Any], console: Console) -> None:
    """Prints a line per loop."""
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items() if version)
    machine = f"{results['gpus']} × {results['machine']}" if results["gpus"] else results["machine"]
    table = Table(title=f"{results['ranks']} ranks on {machine}, {results['backend']}; {versions}")
    names = ("steps", "seconds", "samples", *BAD)
    table.add_column("loop")
    for name in names:
        table.add_column(name.replace("_", " "), justify="right")
    for loop, entry in results["loops"].items():
        if "left_out" not in entry:
            table.add_row(loop, *(str(entry.get(name, "")) for name in names))
    console.print(table)
    for loop, entry in results["loops"].items():
        if "left_out" in entry:
            console.print(f"{loop} left out: {entry['left_out']}", highlight=False)
        elif is_wrong(entry):
            console.print(f"[red]{loop}: something went wrong[/red] {entry.get('error', '')}", highlight=False)


PASSED_ON = ("steps", "batch_size", "window", "balancer", "hang_seconds", "stall_step", "device", "seed")


def add_workload(parser: argparse.ArgumentParser) -> None:
    """The flags that ranks take too."""
    parser.add_argument("--loops", nargs="+", choices=LOOPS, default=list(LOOPS))
    parser.add_argument("--steps", type=int, default=10_000, help="of each loop")
    parser.add_argument("--batch-size", type=int, default=8, help="samples per rank")
    parser.add_argument("--window", type=int, default=1, help="batches that are balanced together")
    parser.add_argument("--balancer", choices=("embedded", "grpc"), default="embedded")
    parser.add_argument("--hang-seconds", type=float, default=90.0, help="without a step, after which it is a hang")
    parser.add_argument("--stall-step", type=int, help="the last rank stops there: proves that a hang is noticed")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: GPUs if there are any")
    parser.add_argument("--seed", type=int, default=0)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes, one GPU each as far as there are")
    add_workload(parser)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each rank")
    parser.add_argument("--json", type=Path, help="where to write the results")
    return parser.parse_args()


if __name__ == "__main__":
    main()
