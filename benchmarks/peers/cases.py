"""What is swept: which settings, and over which batches."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from benchmarks.end_to_end import add_blocks, add_workload
from benchmarks.peers.batches import PAYLOADS, Payload
from examples.datasets import DISTRIBUTIONS

SETTINGS = (
    "off", "theirs_all_gather", "theirs_all_to_all", "evenkeel", "evenkeel_window", "evenkeel_drop_in",
)  # fmt: skip
CASES = ("equal", "lognormal", "zipf", "zipf/features20", "zipf/embeddings", "zipf/incomplete")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Batches: `LENGTHS[/PAYLOAD][/incomplete]`.

    Attributes:
        lengths: A distribution, or `equal`: all of the same length.
        payload: What travels beside the sequences.
        incomplete: Whether each rank has half to all of a batch's samples in each step, at random.
    """

    lengths: str
    payload: Payload = "ids"
    incomplete: bool = False

    @classmethod
    def parse(cls, text: str) -> Case:
        """A case by its name.

        Raises:
            ValueError: If a part of it is not known.
        """
        lengths, *rest = text.split("/")
        payload: Payload = next((one for one in PAYLOADS if one in rest), "ids")
        unknown = set(rest) - {*PAYLOADS, "incomplete"}
        if unknown or lengths not in (*DISTRIBUTIONS, "equal"):
            raise ValueError(
                f"the case is {text!r}; use LENGTHS[/PAYLOAD][/incomplete] of equal, {', '.join(DISTRIBUTIONS)} "
                f"and {', '.join(PAYLOADS)}"
            )
        return cls(lengths=lengths, payload=payload, incomplete="incomplete" in rest)

    def __str__(self) -> str:
        parts = [self.lengths, *([self.payload] if self.payload != "ids" else [])]
        return "/".join([*parts, "incomplete"] if self.incomplete else parts)


SHUFFLE_FLAGS = (
    "recsys_examples", "settings", "cases", "steps", "batch_size", "max_length", "mean", "layers", "width", "heads",
    "head_dim", "items", "kernel", "no_compile", "device", "seed", "window", "warm_up", "blocks", "equal",
)  # fmt: skip


def add_shuffle_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that ranks take too."""
    add_workload(parser, SETTINGS)
    add_blocks(parser)
    parser.set_defaults(warm_up=8, mean=1000.0)
    parser.add_argument("--recsys-examples", type=Path, help="checkout of NVIDIA recsys-examples")
    parser.add_argument("--cases", nargs="+", default=list(CASES), help="LENGTHS[/PAYLOAD][/incomplete]")
    parser.add_argument(
        "--equal", type=int, help="length of the sequences in the case `equal`; default: 1000, or --max-length if less"
    )


def check_shuffle_flags(options: argparse.Namespace) -> None:
    """Refuses what ranks could not run, and sets the default of `--equal`.

    Raises:
        ValueError: If a case is not known, or its sequences are longer than the model takes.
    """
    if options.equal is None:
        options.equal = min(1000, options.max_length)
    for case in map(Case.parse, options.cases):
        if case.lengths == "equal" and not 1 <= options.equal <= options.max_length:
            raise ValueError(f"--equal is {options.equal}; use 1 to {options.max_length}, as --max-length says")
