"""What a balancer shows of rounds that were submitted ahead of the end of a loop, which nobody trains."""

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

RANKS, DEPTH, FIRST, SECONDS = 3, 4, 6, 60.0


class Source:
    """Endless batches; a file tells how many of them have been read."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for count in range(10_000):
            self._file.write_bytes(b"." * (count + 1))
            yield {"cost": torch.randint(1, 1000, (16,))}


def until(what: Any) -> Any:
    deadline = time.monotonic() + SECONDS
    while not (found := what()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def wait_for(files: list[Path], count: int) -> None:
    """Waits until so many batches have been read everywhere."""
    until(lambda: all(file.stat().st_size >= count for file in files))


def train(rank: int, address: str, url: str, job: str, folder: Path, leaver: int) -> dict[str, Any]:
    """One rank leaves its loop while the others wait for it, as many rounds ahead of it as they may be."""
    files = [folder / str(one) for one in range(RANKS)]

    def seen() -> dict[str, Any]:
        with urllib.request.urlopen(f"{url}/v1/session?job={job}") as answer:
            return dict(json.load(answer))

    # So long that no round is decided because of it.
    options = BalanceOptions(timeout=timedelta(seconds=300), depth=DEPTH, node_leader=False)
    with Balancer.connect(address, job=job, options=options) as balancer:
        loader: BalancedLoader[Any] = BalancedLoader(Source(files[rank]), balancer, cost=lambda batch: batch["cost"])
        for step, _ in enumerate(loader):
            if rank == leaver and step == FIRST:
                newest = files[rank].stat().st_size + DEPTH - 2
                wait_for([file for file in files if file is not files[rank]], newest + 2)  # so it was submitted
                (folder / "newest").write_text(f"{newest}")
                break
        newest = int((folder / "newest").read_text())
        first = until(lambda: (one := seen())["session"]["round"] >= newest and one) if rank == 0 else {}
        if rank == 0:
            (folder / "over").touch()
        until((folder / "over").exists)
        for step, _ in enumerate(loader):  # all of them leave in the same step
            if step == FIRST:
                break
        second = until(lambda: (one := seen())["session"]["rounds_balanced"] >= 2 * FIRST and one) if rank == 0 else {}
        if rank == 0:
            (folder / "done").touch()
        until((folder / "done").exists)
    return {"first": first, "second": second}


@pytest.mark.parametrize("leaver", [0, 1])
def test_rounds_that_others_submitted_ahead_of_a_rank_that_leaves_are_closed_and_are_none(
    tmp_path: Path, leaver: int
) -> None:
    port = tmp_path / "port"
    with running_balancer("--metrics-port", "0", "--metrics-port-file", str(port)) as balancer:
        url = f"http://127.0.0.1:{port.read_text().strip()}"
        results = run_ranks(RANKS, train, balancer.address, url, "ahead", tmp_path, leaver)
    for name in ("first", "second"):
        seen = results[0][name]
        assert seen["session"]["rounds_identity"] == {}
        assert (seen["fallbacks"], seen["gaps"]) == ([], [])
        assert set(seen["ranks"]["missed"]) == {0}
        assert set(seen["rounds"]["reason"]) == {""}
