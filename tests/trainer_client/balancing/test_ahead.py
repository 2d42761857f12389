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


EPOCHS, STEPS, EVALUATED = 4, (6, 4, 5), (3, 1, 0)


def train_and_evaluate(rank: int, address: str, url: str, window: int) -> dict[str, Any]:
    """Epochs, each with an evaluation in its midst and one at its end; the ranks have unequal data."""

    def batches(count: int) -> list[dict[str, torch.Tensor]]:
        return [{"cost": torch.randint(1, 1000, (16,))} for _ in range(count)]

    rounds: dict[str, set[int]] = {"train": set(), "eval": set()}
    options = BalanceOptions(timeout=timedelta(seconds=300), depth=DEPTH, window=window)
    with Balancer.connect(address, job=f"epochs-{window}", options=options) as balancer:
        train, evaluate = (
            BalancedLoader(batches(counts[rank]), balancer, cost=lambda batch: batch["cost"], name=name)
            for name, counts in (("train", STEPS), ("eval", EVALUATED))
        )

        def evaluation() -> None:
            rounds["eval"].update(evaluate.report.round for _ in evaluate)

        for _ in range(EPOCHS):
            for step, _ in enumerate(train):
                rounds["train"].add(train.report.round)
                if step == STEPS[1] - 2:
                    evaluation()
            evaluation()

        def document(loader: str) -> dict[str, Any]:
            with urllib.request.urlopen(f"{url}/v1/session?job=epochs-{window}&loader={loader}") as answer:
                return dict(json.load(answer))

        documents = {}
        if rank == 0:
            for name, mine in rounds.items():  # the last loop's rounds are told when it ends
                documents[name] = until(lambda n=name, m=mine: (d := document(n))["rounds"]["round"] == sorted(m) and d)
        torch.distributed.barrier()
        return {
            "rounds": rounds, "documents": documents,
            "changes": train.counters.breaker_changes + evaluate.counters.breaker_changes,
        }  # fmt: skip


@pytest.mark.parametrize("window", [1, 3])
def test_between_epochs_and_evaluations_there_are_no_rounds_nor_openings_of_the_breaker(
    tmp_path: Path, window: int
) -> None:
    port = tmp_path / "port"
    with running_balancer("--metrics-port", "0", "--metrics-port-file", str(port)) as balancer:
        url = f"http://127.0.0.1:{port.read_text().strip()}"
        results = run_ranks(RANKS, train_and_evaluate, balancer.address, url, window)
    assert [result["changes"] for result in results] == [0] * RANKS
    loops = {"train": (EPOCHS, max(STEPS)), "eval": (2 * EPOCHS, max(EVALUATED))}
    for name, (passes, steps) in loops.items():
        seen, row = results[0]["documents"][name], results[0]["documents"][name]["session"]
        assert row["rounds_balanced"] == passes * -(-steps // window) == len(results[0]["rounds"][name])
        assert row["rounds_identity"] == {}
        assert (row["rounds_elsewhere"], row["breaker_openings"], row["rounds_by_ranks"]) == (0, 0, 0)
        assert (seen["gaps"], seen["fallbacks"]) == ([], [])
        assert set(seen["ranks"]["missed"]) == {0}
