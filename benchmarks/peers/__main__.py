"""Peers' own code beside ours, out of checkouts that you give; nothing of theirs is part of Evenkeel.

    python -m benchmarks.peers --recsys-examples PATH --json FILE

Each part (`--parts` chooses) says whose code ran:

- `shuffle`: the batch shuffler of NVIDIA recsys-examples in both of its modes, beside ours, in one loop over the same
  batches with the same model, on the GPUs of this host. On CPU ranks the batches are compared, and no times are told.
- `decisions`: its Karmarkar-Karp beside our search, for 2 to 256 ranks, on one core.

Planners of embedding tables are compared by `benchmarks.placement_gpu`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from benchmarks.harness.results import provenance, write
from benchmarks.peers.cases import add_shuffle_flags
from benchmarks.peers.checkouts import CheckoutError

MODULES = {  # each imported when it runs: they need different packages
    "shuffle": "benchmarks.peers.shuffling",
    "decisions": "benchmarks.peers.decisions",
}


def main() -> None:
    options = parse_arguments()
    console = Console(width=150)
    results: dict[str, Any] = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    for part in options.parts:
        try:
            found = importlib.import_module(MODULES[part]).compare(options, console)
        except CheckoutError as error:
            fail(f"{part}: {error}")
        except subprocess.CalledProcessError:
            fail(f"{part}: its ranks failed; what they said is above")
        results[part] = {"provenance": provenance(), **found}
        write(options.json, results)  # after each part, so that a run that is stopped leaves what it has


def fail(what: str) -> NoReturn:
    """Ends with a sentence."""
    print(f"peers: {what}", file=sys.stderr)
    sys.exit(2)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(MODULES), default=list(MODULES))
    parser.add_argument("--ranks", type=int, default=2, help="processes of `shuffle`, one GPU each")
    parser.add_argument("--skip", type=int, default=6, help="first steps of each block that are not counted")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of each rank")
    parser.add_argument("--quick", action="store_true", help="small cases only, for `decisions`")
    parser.add_argument("--master-port", type=int, default=29521)
    parser.add_argument("--json", type=Path, help="where to write the results; other parts in it are kept")
    add_shuffle_flags(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
