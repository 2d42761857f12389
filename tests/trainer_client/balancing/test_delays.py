"""A rank that holds the others up has a name and a kind: slow in computing, loading, the network, or its loop."""

import contextlib
import itertools
import os
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from benchmarks.harness.balancer_process import ServiceProcess, running_balancer
from evenkeel.partitioning.delays import Cause
from tests.asking import get
from tests.trainer_client.balancing.jobs import logged, run_in_turn
from trainer_client import BalancedLoader, BalanceOptions, Balancer
from trainer_client.balancing.report import RoundReport
from trainer_client.observing.measurement import StepTimer
from trainer_client.observing.metrics import RankMeasures

RANKS, SLOW, SIZE, STEPS = 3, 1, 16, 400
COMPUTES = 0.02  # seconds of a step with a mean load
BYTES = {"network": 1 << 16}  # of a sample; else 1
RATE = 4_000_000  # bytes a second of a slow link
_MAX_PACING_RATE = 47  # SO_MAX_PACING_RATE, which the module `socket` has no name for


class Served(NamedTuple):
    """A balancer, and where its page is."""

    balancer: ServiceProcess
    url: str


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    port = tmp_path_factory.mktemp("delays") / "port"
    with running_balancer("--metrics-port", "0", "--metrics-port-file", str(port)) as balancer:
        yield Served(balancer, f"http://127.0.0.1:{port.read_text().strip()}")


class Source:
    """Batches of which rank SLOW loads few heavy samples, so that it gets some of the others' in every step."""

    def __init__(self, rank: int, slow_in: str) -> None:
        self._rank, self._bytes = rank, BYTES.get(slow_in, 1)
        self._heavy, self._pause = rank != SLOW, COMPUTES if (rank, slow_in) == (SLOW, "loading") else 0.0

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for step in itertools.count():
            time.sleep(self._pause)
            costs = torch.randint(100, 200, (SIZE,), generator=torch.Generator().manual_seed(step + 1000 * self._rank))
            yield {
                "cost": costs if self._heavy else costs // 2,
                "row": torch.zeros(SIZE, self._bytes, dtype=torch.uint8),
            }


def slow_down_what_comes_to(rank: int) -> None:
    """Paces the connections of this rank to another one, as a slow link there does."""
    sockets = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            one = socket.socket(fileno=os.dup(int(name)))
            if one.family in (socket.AF_INET, socket.AF_INET6):
                sockets.append((one, one.getsockname()[:2], one.getpeername()[:2]))
    own: list[Any] = [None] * RANKS
    dist.all_gather_object(own, [local for _, local, _ in sockets])
    for one, _, peer in sockets:
        if dist.get_rank() != rank and peer in own[rank]:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)  # which waits on the way, not at its sender
            one.setsockopt(socket.SOL_SOCKET, _MAX_PACING_RATE, RATE)


def is_shown(document: dict[str, Any], report: RoundReport, slow_in: str) -> bool:
    """Whether the page and the latest round tell of the slow rank."""
    shown = rank_of(document)
    if slow_in == "compute":
        return shown["speed"] < 1 and SLOW in [slow.rank for slow in report.stragglers]
    told = [late.cause.label for late in report.delays if late.rank == SLOW]
    return (shown["delay"], told) == (slow_in, [slow_in])


def rank_of(document: dict[str, Any]) -> dict[str, Any]:
    """What the page knows of the slow rank."""
    return next(row for row in document["ranks"] if row["rank"] == SLOW)


def run_job(rank: int, address: str, url: str, slow_in: str) -> dict[str, Any]:
    lines = logged("trainer_client.balancing.learned_speeds")
    options = BalanceOptions(timeout=timedelta(seconds=20), counts="free")
    measures = RankMeasures(job=slow_in, rank=rank)
    with Balancer.connect(address, job=slow_in, options=options) as balancer:
        loader: BalancedLoader[Any] = BalancedLoader(Source(rank, slow_in), balancer, cost=lambda batch: batch["cost"])
        timer = StepTimer("cpu", loader=loader)
        document: dict[str, Any] = {}
        for step, _ in enumerate(itertools.islice(loader, STEPS)):
            timer.batch_ready()
            slowness = 2.0 if (rank, slow_in) == (SLOW, "compute") else 1.0
            time.sleep(COMPUTES * slowness * loader.report.own_load / loader.report.mean_load)
            timer.compute_done()
            shown = torch.tensor([float(bool(document) and is_shown(document, loader.report, slow_in))])
            dist.all_reduce(shown)  # as gradients are
            timer.gradients_ready()
            timer.end_step()
            if (rank, slow_in) == (SLOW, "loop"):
                time.sleep(COMPUTES)  # as a checkpoint takes, or a line of a log
            measures.batch("train", loader.report)
            if step == 1 and slow_in == "network":
                slow_down_what_comes_to(SLOW)
            if shown.item():
                break  # all ranks in the same step
            if rank == 0 and step % 5 == 4:
                document = get(f"{url}/v1/stream?job={slow_in}")[1]
    return {
        "learned": loader.report.learned, "stragglers": loader.report.stragglers, "delays": loader.report.delays,
        "shown": rank_of(document) if document else None, "lines": lines,
        "late": [
            measures.registry.get_sample_value(
                "evenkeel_trainer_late_ratio",
                {"job": slow_in, "rank": str(rank), "loader": "train", "cause": cause.label},
            )
            for cause in Cause
        ],
    }  # fmt: skip


WAYS = ("compute", "loading", "loop", "network")  # the last, as the link stays slow


@pytest.fixture(scope="module")
def jobs(served: Served) -> dict[str, Any]:
    by_way = run_in_turn(RANKS, *((run_job, served.balancer.address, served.url, slow_in) for slow_in in WAYS))
    return dict(zip(WAYS, by_way, strict=True))


@pytest.mark.parametrize("slow_in", WAYS)
def test_a_rank_that_is_slow_has_a_name_and_a_kind(jobs: dict[str, Any], slow_in: str) -> None:
    results = jobs[slow_in]
    # Of the others nothing is asserted: on a busy machine they may be slow, too.
    first, is_late = results[0], slow_in != "compute"
    assert len({result["learned"] for result in results}) == 1
    delays = [late for late in first["delays"] if late.rank == SLOW]
    assert [late.cause.label for late in delays] == ([slow_in] if is_late else [])
    assert is_late or SLOW in [slow.rank for slow in first["stragglers"]]
    shown = first["shown"]
    assert shown["delay"] == (slow_in if is_late else None)
    assert is_late or shown["speed"] < 1
    late = [cause.label for cause, share in zip(Cause, results[SLOW]["late"], strict=True) if share]
    assert late == ([slow_in] if is_late else [])
    # fmt: off
    why = {"compute": "computes", "loading": "holds the others up: it loads data too slowly",
           "network": "holds the others up: its samples come late over the network",
           "loop": "holds the others up: its loop does something else before it asks for the next batch"}[slow_in]
    # fmt: on
    for rank, result in enumerate(results):  # the lead says it
        assert any(f"rank {SLOW} on " in line and why in line for line in result["lines"]) == (rank == 0)
    if is_late:
        assert delays[0].share > 0.2
        assert shown["delay_share"] > 0.2
        assert 10 <= shown["delay_since"] < STEPS
