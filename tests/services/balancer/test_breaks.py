"""Streams that break are not streams that end: the session stays for the ranks that come back."""

from __future__ import annotations

import time

import grpc

from benchmarks.harness.balancer_process import running_balancer
from benchmarks.harness.proxy import TcpProxy
from evenkeel.protocol import balancer_pb2 as pb
from evenkeel.protocol import balancer_pb2_grpc as pb_grpc
from tests.services.security.jobs import RunningJob

SECONDS = 60.0


def test_a_session_whose_connections_all_break_keeps_its_name_and_its_decisions() -> None:
    with running_balancer("--abandoned-expiry-seconds", "300") as balancer, TcpProxy(balancer.port) as proxy:

        def sessions() -> dict[str, tuple[int, int]]:
            """Ranks that are connected and the last round, by job."""
            with grpc.insecure_channel(balancer.address) as channel:
                stub = pb_grpc.BalancerServiceStub(channel)
                found = stub.GetSessionStats(pb.GetSessionStatsRequest(), timeout=SECONDS).sessions
            return {one.job: (one.joined_ranks, one.last_round) for one in found}

        with RunningJob(lambda: grpc.insecure_channel(proxy.address), job="broken") as job:
            assert sessions()["broken"][0] == 2
            assert proxy.reset() >= 1
            deadline = time.monotonic() + SECONDS
            while sessions().get("broken", (0, 0))[0]:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            joined, last = sessions()["broken"]  # still there, for whoever asks again
            assert (joined, last >= min(job.balanced) - 2) == (0, True)
        with RunningJob(lambda: grpc.insecure_channel(balancer.address), job="ended"):
            assert sessions()["ended"][0] == 2
        deadline = time.monotonic() + SECONDS
        while "ended" in sessions():  # in order: its name is free
            assert time.monotonic() < deadline
            time.sleep(0.02)
