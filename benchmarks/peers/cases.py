"""Which settings are run, over which batches."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.end_to_end import add_blocks, add_workload
from examples.datasets import DISTRIBUTIONS

SETTINGS = (
    "off", "theirs_all_gather", "theirs_all_to_all", "evenkeel", "evenkeel_window", "evenkeel_drop_in",
)  # fmt: skip
CASES = ("equal", "lognormal", "zipf")
SHUFFLE_FLAGS = (
    "recsys_examples", "settings", "cases", "steps", "batch_size", "max_length", "mean", "layers", "width", "heads",
    "head_dim", "items", "kernel", "no_compile", "device", "seed", "window", "warm_up", "blocks",
)  # fmt: skip


def add_shuffle_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that ranks take too."""
    add_workload(parser, SETTINGS)
    add_blocks(parser)
    parser.set_defaults(warm_up=8, mean=1000.0)
    parser.add_argument("--recsys-examples", type=Path, required=True, help="checkout of NVIDIA recsys-examples")
    parser.add_argument("--cases", nargs="+", choices=DISTRIBUTIONS, default=list(CASES), help="lengths")
