"""Calls of a balancer, as a lead makes them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc
import pytest

from benchmarks.harness.authorities import channel
from benchmarks.harness.balancer_process import ServiceProcess
from evenkeel.partitioning.rounds import RoundPlan
from evenkeel.protocol import balancer_pb2 as pb
from evenkeel.protocol.plan_round import read_response
from tests.evenkeel.protocol.rounds import Round, request_of
from tests.waiting import until

SECONDS = 30.0  # a starved machine is no failure
SERVICE = "evenkeel.balancer.v2.BalancerService"


class Lead:
    """One that asks for plans over a channel."""

    def __init__(self, opened: grpc.Channel) -> None:
        self._call = opened.unary_unary(f"/{SERVICE}/PlanRound")
        self._info = opened.unary_unary(
            f"/{SERVICE}/GetServerInfo", pb.GetServerInfoRequest.SerializeToString, pb.GetServerInfoResponse.FromString
        )

    def plan(self, one: Round, timeout: float | None = SECONDS) -> RoundPlan:
        return read_response(self.send(request_of(one), one.names.job, timeout), one.samples)

    def send(self, data: bytes, job: str | None = "job", timeout: float | None = SECONDS) -> bytes:
        return bytes(self._call(data, timeout=timeout, metadata=_metadata(job)))

    def future(self, one: Round, timeout: float | None = SECONDS) -> Any:
        return self._call.future(request_of(one), timeout=timeout, metadata=_metadata(one.names.job))

    def info(self, timeout: float | None = SECONDS) -> Any:
        return self._info(pb.GetServerInfoRequest(), timeout=timeout)


def _metadata(job: str | None) -> list[tuple[str, str]]:
    return [] if job is None else [("evenkeel-job", quote(job))]


@contextmanager
def lead_of(address: str) -> Iterator[Lead]:
    with channel(address, None) as opened:
        yield Lead(opened)


@contextmanager
def refused(code: str, *texts: str) -> Iterator[None]:
    """The block's call fails with this status, whose message has these texts."""
    with pytest.raises(grpc.RpcError) as caught:
        yield
    assert caught.value.code().name == code, caught.value
    for text in texts:
        assert text in caught.value.details()


def workers_of(balancer: ServiceProcess) -> list[int]:
    """Process ids of the workers: what has been forked by the balancer's fork server."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z":
            parents[int(path.parent.name)] = int(fields[1])
    children = {pid for pid, parent in parents.items() if parent == balancer.running.pid}
    return [pid for pid, parent in parents.items() if parent in children]


def wait_for_workers(balancer: ServiceProcess) -> list[int]:
    """Process ids of both workers, which are ready."""

    def ready() -> list[int]:
        pids, log = workers_of(balancer), balancer.log
        return pids if len(pids) == 2 and all(f'"pid": {pid},' in log for pid in pids) else []

    return until(ready, SECONDS)
