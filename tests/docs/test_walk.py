"""The walk of a batch in ARCHITECTURE.md is the one that it takes, through no more files than it should."""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from benchmarks.harness.ranks import run_ranks
from trainer_client import BalancedLoader, Balancer, BatchSpec

ROOT = Path(__file__).parents[2]
MOST_FILES = 30
WARM = 4  # batches after which everything is open
PRODUCT = ("evenkeel", "trainer_client")
ELSEWHERE = ("asking", "services", "users")  # steps of rounds that are served, and of those with users


def walk(rank: int) -> tuple[set[str], set[str]]:
    """In a rank: the functions of the product that a loop calls, and the files of those between two late batches."""
    draw = torch.Generator().manual_seed(rank)
    data = []
    for _ in range(3 * WARM):
        lengths = torch.randint(1, 300, (16,), generator=draw)
        data.append({"n": lengths, "h": torch.zeros(int(lengths.sum()))})
    functions: set[str] = set()
    files: set[str] = set()
    is_warm = False

    def called(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in PRODUCT:
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            functions.add(f"{name}:{frame.f_code.co_qualname}")
            files.update({name} if is_warm else ())

    threading.setprofile(called)
    sys.setprofile(called)
    try:
        with Balancer.embedded() as balancer:
            spec = BatchSpec(rows_per_sample={"h": "n"})
            loader = BalancedLoader(data, balancer, cost=lambda batch: batch["n"] ** 2, spec=spec)
            for number, _ in enumerate(loader):
                is_warm = WARM <= number < 2 * WARM
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return functions, files


def test_a_batch_takes_the_walk_that_is_told() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    section = text.partition("### From costs to moved samples")[2].partition("\n### ")[0]
    steps = set(re.findall(r"^\d+\. `([\w.]+:[\w.]+)`", section, re.M))
    functions, files = run_ranks(2, walk)[0]
    told = {step for step in steps if not any(word in step.partition(":")[0].split(".") for word in ELSEWHERE)}
    assert len(told) > 15
    assert told <= functions, f"not called: {sorted(told - functions)}"
    assert len(files) <= MOST_FILES, sorted(files)
