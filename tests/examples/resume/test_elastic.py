"""Two torchrun agents; one and all its ranks are killed, as when a machine is gone, and the job goes on with the other.

Real agents, a real rendezvous and a real service, which the restarted ranks meet again at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from benchmarks.harness.balancer_process import ServiceProcess, running_balancer
from benchmarks.harness.zygote import Program
from tests.examples.resume.launching import SECONDS, ledger, users

RANKS = (2, 1)  # of each agent
RENDEZVOUS = "torch.rendezvous.job"  # the key of its state in the store
ARGUMENTS = ("--users", "96", "--save-every", "2", "--pause", "0.3")


class Agent:
    """`torchrun` as on one of several machines."""

    def __init__(self, number: int, port: int, folder: Path, address: str, last_call: int, python: Path) -> None:
        conf = {
            "is_host": "false", "join_timeout": 150, "last_call_timeout": last_call,
            "keep_alive_interval": 1, "keep_alive_max_attempt": 10,
        }  # fmt: skip
        self.output = folder / f"agent-{number}.out"
        self.program = Program(
            "torch.distributed.run", "--nnodes=1:2", f"--nproc-per-node={RANKS[number]}", "--max-restarts=3",
            "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=job", "--local-addr=127.0.0.1",
            "--rdzv-conf=" + ",".join(f"{name}={value}" for name, value in conf.items()), "--monitor-interval=0.1",
            "-m", "examples.resume.ddp", "--folder", str(folder), *ARGUMENTS, output=self.output,
            TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1", OMP_NUM_THREADS="1", EVENKEEL_BALANCER=address,
            PYTHON_EXEC=str(python),  # of its ranks
        )  # fmt: skip

    def kill(self) -> None:
        """With all its ranks, at once."""
        children = Path(f"/proc/{self.program.pid}/task/{self.program.pid}/children")
        ranks = children.read_text().split() if self.program.poll() is None else []
        for pid in (self.program.pid, *map(int, ranks)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def agents(tmp_path: Path, balancer: ServiceProcess, forked_python: Path) -> Iterator[list[Agent]]:
    # Kept by neither agent: one that looks for the other's before it is there comes back late.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    goes = Agent(1, store.port, tmp_path, balancer.address, last_call=int(SECONDS), python=forked_python)
    started = [goes]
    try:
        deadline = time.monotonic() + SECONDS
        while not store.check([RENDEZVOUS]):  # its last call holds for both, however late the other one is
            assert time.monotonic() < deadline, goes.output.read_text()
            time.sleep(0.02)
        started.insert(0, Agent(0, store.port, tmp_path, balancer.address, last_call=1, python=forked_python))
        yield started
    finally:
        for agent in started:
            agent.kill()


@pytest.fixture
def balancer() -> Iterator[ServiceProcess]:
    with running_balancer("--log-level", "debug") as process:
        yield process


@pytest.mark.timeout(900)
def test_the_job_goes_on_without_the_machine_that_is_gone(
    agents: list[Agent], tmp_path: Path, balancer: ServiceProcess
) -> None:
    stays, goes = agents

    def until(what: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SECONDS
        while not what():
            assert stays.program.poll() is None, stays.output.read_text() + goes.output.read_text()
            assert time.monotonic() < deadline, stays.output.read_text() + goes.output.read_text()
            time.sleep(0.02)

    def trained(ranks: int) -> list[int]:
        lines = ledger(tmp_path)
        return [line["step"] for line in lines if sum(line["step"] == other["step"] for other in lines) == ranks]

    until(lambda: any(step >= 3 for step in trained(sum(RANKS))))
    goes.kill()
    assert goes.program.wait(SECONDS) == -signal.SIGKILL
    assert stays.program.wait(SECONDS) == 0, stays.output.read_text()
    lines = ledger(tmp_path)
    with_all = {line["step"] for line in lines if line["rank"] == sum(RANKS) - 1}
    assert with_all == set(range(1, max(with_all) + 1))  # and the rest with two ranks
    assert {line["rank"] for line in lines if line["step"] > max(with_all)} == {0, 1}
    assert max(with_all) >= 2
    assert [users(tmp_path, epoch) for epoch in range(2)] == [list(range(96))] * 2
    assert "epoch 1: 96 of 96 users trained, 0 of them more than once" in stays.output.read_text()
    assert balancer.log.count('"outcome": "BALANCED"') >= 12  # with all ranks, then with those that are left
