"""Ranks of a node that share a stream: who of them comes late is known."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.harness.balancer_process import running_balancer
from benchmarks.harness.ranks import run_ranks
from trainer_client import BalancedLoader, BalanceOptions, Balancer

RANKS, STEPS, LATE = 3, 30, 0.2


class Source:
    """Batches of which one rank's take long, so that it submits after the others in every step."""

    def __init__(self, rank: int, late: int) -> None:
        self._pause = LATE if rank == late else 0.0

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for _ in range(STEPS):
            time.sleep(self._pause)
            yield {"cost": torch.arange(1, 9)}


def train(rank: int, address: str, url: str, job: str, late: int, leads: bool) -> dict[str, Any]:
    # The leader holds submissions for a twentieth of `timeout`: all ranks of the node come together.
    options = BalanceOptions(timeout=timedelta(seconds=40), node_leader=leads)
    with Balancer.connect(address, job=job, options=options) as balancer:
        for _ in BalancedLoader(Source(rank, late), balancer, cost=lambda batch: batch["cost"]):
            pass
        with urllib.request.urlopen(f"{url}/v1/session?job={job}") as answer:
            return dict(json.load(answer))


@pytest.mark.parametrize("late", [0, 2])  # the leader itself, and who follows it
@pytest.mark.parametrize("leads", [True, False])
def test_the_rank_that_comes_last_is_told_of_a_shared_stream_as_of_streams_of_their_own(
    tmp_path: Path, leads: bool, late: int
) -> None:
    port = tmp_path / "port"
    with running_balancer("--metrics-port", "0", "--metrics-port-file", str(port)) as balancer:
        url = f"http://127.0.0.1:{port.read_text().strip()}"
        seen = run_ranks(RANKS, train, balancer.address, url, f"late-{late}", late, leads)[0]
    seconds = seen["ranks"]["late_seconds"]
    assert max(range(RANKS), key=lambda rank: seconds[rank]) == late
    assert seconds[late] > LATE / 2
    assert seen["session"]["wait_seconds"] > LATE / 2  # the others waited for it, wherever they did
