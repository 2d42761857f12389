"""Worker processes of a balancer that runs as operators run it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.harness.balancer_process import ServiceProcess, running_balancer
from evenkeel.protocol import balancer_pb2 as pb
from tests.services.balancer.conftest import StartServer
from tests.services.balancer.ranks import Rank

SECONDS = 30.0


@pytest.fixture
def balancer() -> Iterator[ServiceProcess]:
    with running_balancer("--workers", "1", "--drain-seconds", "0.2", "--grace-seconds", "2") as process:
        yield process


def processes_of(balancer: ServiceProcess) -> list[int]:
    """The zygote, and the workers."""
    assert balancer.process is not None
    (zygote,) = children(balancer.process.pid)
    until(lambda: len(children(zygote)) == 2)
    return [zygote, *children(zygote)]


def children(pid: int) -> list[int]:
    text = "".join(path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children"))
    return [int(child) for child in text.split()]


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_process_outlives_the_balancer(balancer: ServiceProcess, number: signal.Signals) -> None:
    processes = processes_of(balancer)
    for pid in processes[1:]:  # also those that do not listen
        os.kill(pid, signal.SIGSTOP)
    balancer.signal(number)
    assert balancer.process is not None
    assert balancer.process.wait(SECONDS) == (0 if number is signal.SIGTERM else -signal.SIGKILL)
    until(lambda: all(map(gone, processes)))


def test_a_signal_to_all_processes_drains_like_one_to_the_service(balancer: ServiceProcess) -> None:
    """As a terminal, a service manager or a container's runtime may send it."""
    processes = processes_of(balancer)

    async def job() -> pb.Answer:
        async with Rank(balancer.port, 0) as waiting:
            await waiting.submit(0, [1], timeout_ms=60_000)
            await asyncio.sleep(0.1)
            for pid in processes:
                os.kill(pid, signal.SIGTERM)
                os.kill(pid, signal.SIGINT)
            await asyncio.sleep(0.1)
            assert not any(map(gone, processes))
            balancer.signal(signal.SIGTERM)
            assert (await waiting.receive()).leaving == pb.Leaving()
            return await waiting.answer()

    assert asyncio.run(job()).decision.reason == pb.Decision.REASON_DRAINING
    assert balancer.process is not None
    assert balancer.process.wait(SECONDS) == 0
    until(lambda: all(map(gone, processes)))


def test_workers_leave_no_file_and_hold_no_port(balancer: ServiceProcess) -> None:
    for pid in processes_of(balancer):
        files = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
        # those of torch are of the test's own processes: a balancer has no torch
        assert not [file for file in files if file.startswith("/dev/shm") and "/torch_" not in file]
    balancer.kill()
    balancer.start()  # at the same port, at once
    assert balancer.stop() == 0


@pytest.mark.usefixtures("hostile_strategies")
async def test_an_honest_job_misses_no_round_beside_one_that_ends_its_workers(start_server: StartServer) -> None:
    server = await start_server(partition_timeout_seconds=2.5)
    stop = asyncio.Event()
    reasons: set[str] = set()
    wanted = {"REASON_WORKER_DIED", "REASON_WORKER_STUCK", "REASON_QUARANTINED"}

    async def hostile(strategy: str) -> None:
        job = {"world_size": 2, "job": strategy, "options": pb.PartitionOptions(strategy=strategy)}
        async with Rank(server.port, 0, **job) as first, Rank(server.port, 1, **job) as second:  # type: ignore[arg-type]
            number = 0
            while not stop.is_set():
                answers = await asyncio.gather(first.round(number, [1, 2]), second.round(number, [1]))
                reasons.add(pb.Decision.Reason.Name(answers[0].decision.reason))
                number += 1
                await asyncio.sleep(0.02)

    others = [asyncio.create_task(hostile(strategy)) for strategy in ("segfault", "spin", "gorge")]
    outcomes = []
    async with Rank(server.port, 0) as first, Rank(server.port, 1) as second:
        end = time.monotonic() + SECONDS
        number = 0
        while time.monotonic() < end and not (number > 100 and wanted <= reasons):
            answers = await asyncio.gather(
                first.round(number, [3, 1], timeout_ms=20_000), second.round(number, [1], timeout_ms=20_000)
            )
            outcomes += [answer.decision.outcome for answer in answers]
            if number == 20:
                for pid in server._pool.pids:  # an operator's mistake on top
                    os.kill(pid, signal.SIGKILL)
                await asyncio.sleep(0.2)
            number += 1
    stop.set()
    await asyncio.gather(*others)
    assert number > 20
    assert set(outcomes) == {pb.Decision.OUTCOME_BALANCED}
    assert wanted <= reasons
