"""Peers' own code beside ours, out of checkouts that you give; nothing of theirs is part of Evenkeel.

    python -m benchmarks.peers --recsys-examples PATH --torcheasyrec PATH --json FILE

Each part runs where its peer's checkout is given (`--parts` chooses among them), and says whose code ran:

- `shuffle` (recsys-examples): its batch shuffler in both of its modes, beside ours, in one loop over the same batches
  with the same model, on the GPUs of this host. On CPU ranks the batches are compared, and no times are told.
- `decisions` (recsys-examples): its Karmarkar-Karp beside our search, for 2 to 256 ranks, on one core.
- `planners` (TorchEasyRec, and the TorchRec that is installed): plans of the same tables and budgets.
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
from benchmarks.peers.cases import add_shuffle_flags, check_shuffle_flags
from benchmarks.peers.checkouts import CheckoutError

NEEDS = {
    "shuffle": "recsys_examples",
    "decisions": "recsys_examples",
    "planners": "torcheasyrec",
}
MODULES = {  # each imported when it runs: they need different packages
    "shuffle": "benchmarks.peers.shuffling",
    "decisions": "benchmarks.peers.decisions",
    "planners": "benchmarks.peers.planners",
}


def main() -> None:
    options = parse_arguments()
    console = Console(width=150)
    parts = options.parts or [part for part, peer in NEEDS.items() if getattr(options, peer) is not None]
    if not parts:
        fail("nothing to compare with: give --recsys-examples or --torcheasyrec, each a checkout's path")
    for part in parts:
        if getattr(options, NEEDS[part]) is None:
            fail(f"the part {part} needs --{NEEDS[part].replace('_', '-')}")
    try:
        check_shuffle_flags(options)
    except ValueError as error:
        fail(str(error))
    results: dict[str, Any] = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    for part in parts:
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
    parser.add_argument("--parts", nargs="+", choices=list(NEEDS), help="default: all whose peer is given")
    parser.add_argument("--torcheasyrec", type=Path, help="checkout of TorchEasyRec, its protocol buffers generated")
    parser.add_argument("--ranks", type=int, default=2, help="processes of `shuffle`, one GPU each")
    parser.add_argument("--skip", type=int, default=6, help="first steps of each block that are not counted")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of each rank")
    parser.add_argument("--quick", action="store_true", help="small cases only, for `decisions` and `planners`")
    parser.add_argument("--master-port", type=int, default=29521)
    parser.add_argument("--raw", type=Path, help="where to keep what every rank of `shuffle` measured, case by case")
    parser.add_argument("--from-raw", type=Path, help="`shuffle` runs nothing; figures from what --raw kept")
    parser.add_argument("--json", type=Path, help="where to write the results; other parts in it are kept")
    add_shuffle_flags(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
