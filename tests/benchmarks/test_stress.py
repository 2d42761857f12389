"""The stress run's ledger finds what it looks for, and a short run of real loops is clean."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness.ranks import run_ranks
from benchmarks.stress import is_wrong
from benchmarks.stress_data import Ledger, Workload
from benchmarks.stress_rank import stress

CPU = torch.device("cpu")
CLEAN = {"lost": 0, "doubled": 0, "unknown": 0, "in_another_step": 0, "batches_with_other_values": 0}


def _enter(rank: int, fault: str) -> dict[str, Any]:
    """Enters all batches as loaded, but for one fault on rank 0 in step 2."""
    workload = Workload(steps=4, world=dist.get_world_size(), batch_size=4, features=1, uneven=True)
    ledger = Ledger(workload, CPU)
    batches = list(workload.batches(rank, CPU, keyed=False))
    if rank == 0 and fault == "swapped":
        batches[1], batches[2] = batches[2], batches[1]
    for step, batch in enumerate(batches):
        ids, values, checks = batch["id"], batch["values"], batch["check"]
        if rank == 0 and step == 2:
            match fault:
                case "lost":
                    ids = ids[1:]
                case "doubled":
                    ids = torch.cat([ids, ids[:1]])
                case "unknown":
                    ids = torch.cat([ids, ids[-1:] + 1])
                case "corrupted":
                    values = values + torch.eye(1, len(values), dtype=torch.int64)[0]
        ledger.note(ids, values, checks, torch.tensor(1.0))
    return ledger.close()


class _NoWatchdog:
    """The ranks' own time limit stands in for it."""

    warm_at = 0.0

    def arm(self) -> None:
        """Nothing."""

    def beat(self, step: int) -> None:
        """Nothing."""


def _run(rank: int) -> dict[str, Any]:
    faults = ("none", "lost", "doubled", "unknown", "swapped", "corrupted")
    options = argparse.Namespace(steps=12, batch_size=4, window=1, seed=0, balancer="embedded")
    return {fault: _enter(rank, fault) for fault in faults} | {
        loop: stress(loop, options, CPU, _NoWatchdog()) for loop in ("ddp", "fsdp2")
    }


def test_the_ledger_finds_what_it_looks_for_and_plain_loops_are_clean() -> None:
    for results in run_ranks(2, _run):
        loops = {loop: results.pop(loop) for loop in ("ddp", "fsdp2")}
        found = {fault: {key: entry[key] for key in CLEAN} for fault, entry in results.items()}
        assert found["none"] == CLEAN
        assert found["lost"] == CLEAN | {"lost": 1}
        assert found["doubled"] == CLEAN | {"doubled": 1}
        assert found["unknown"] == CLEAN | {"unknown": 1}
        assert found["corrupted"] == CLEAN | {"batches_with_other_values": 1}
        assert found["swapped"]["in_another_step"] > 0
        assert not any(found["swapped"][key] for key in ("lost", "doubled", "unknown"))
        for fault, entry in results.items():
            assert is_wrong(entry | {"hangs": 0, "fell_back": 0}) == (fault != "none")
        for loop, entry in loops.items():
            assert not is_wrong(entry), (loop, entry)
            assert entry["steps"] == 12
            assert entry["rounds"] == {"embedded/no_service": 12}
