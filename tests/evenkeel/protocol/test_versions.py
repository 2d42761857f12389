"""Older and newer clients and servers: they work together, or refuse each other with both versions named."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import grpc
import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.harness.authorities import channel as new_channel
from benchmarks.harness.balancer_process import ServiceProcess, running_balancer
from benchmarks.harness.ranks import run_ranks
from evenkeel.protocol import balancer_pb2 as pb
from evenkeel.protocol import balancer_pb2_grpc as pb_grpc
from tests.evenkeel.protocol.relay import old_server
from tests.evenkeel.protocol.wire_v1 import Stub, enum_value, handler, message
from tests.services.security.jobs import RunningJob, join
from tests.trainer_client.balancing.jobs import Job, check_complete, run_job
from trainer_client.balancing.service import Connection
from trainer_client.cli import app

SECONDS = 30.0
BALANCED = enum_value("Decision.Outcome", "OUTCOME_BALANCED")


@pytest.fixture(scope="module")
def balancer() -> Iterator[ServiceProcess]:
    with running_balancer() as running:
        yield running


@pytest.fixture
def channel(balancer: ServiceProcess) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(balancer.address, options=[("grpc.use_local_subchannel_pool", 1)]) as opened:
        yield opened


def old_join(job: str, rank: int, world_size: int, **changes: Any) -> Any:
    field = message("Field")(path="x", dtype="int64", kind=enum_value("Field.Kind", "KIND_JAGGED"))
    parts = {
        "protocol_versions": [1], "job": job, "group": "default", "loader": "train", "run_id": "run",
        "world_size": world_size, "rank": rank, "node": f"node-{rank // 2}",
        "schema": message("Schema")(hash=b"12345678", fields=[field]),
    }  # fmt: skip
    return message("Join")(**{**parts, **changes})


def old_submit(round_number: int, rank: int, samples: int = 16) -> Any:
    lengths = np.random.default_rng([rank, round_number]).integers(1, 500, samples)
    return message("Submit")(
        round=round_number, num_samples=samples, costs_i64=lengths.astype("<i8").tobytes(), rank=rank,
        lengths=lengths.astype("<u4").tobytes(), timeout_ms=20_000,
    )  # fmt: skip


class OldStream:
    """A stream of a client that knows nothing but the frozen version."""

    def __init__(self, channel: grpc.Channel, joining: Any) -> None:
        self._outbox: SimpleQueue[Any] = SimpleQueue()
        self.send(join=joining)
        self._responses = Stub(channel).Balance(iter(self._outbox.get, None), timeout=SECONDS)
        self.first = next(self._responses)

    def send(self, **parts: Any) -> None:
        self._outbox.put(message("BalanceRequest")(**parts))

    def receive(self) -> Any:
        return next(self._responses)

    def end(self) -> None:
        self._outbox.put(None)
        assert list(self._responses) == []


class NewStream(OldStream):
    """A stream of today's client."""

    def __init__(self, channel: grpc.Channel, joining: Any) -> None:
        self._outbox = SimpleQueue()
        self.send(join=pb.Join.FromString(joining.SerializeToString()))
        self._responses = pb_grpc.BalancerServiceStub(channel).Balance(iter(self._outbox.get, None), timeout=SECONDS)
        self.first = next(self._responses)

    def send(self, **parts: Any) -> None:
        self._outbox.put(pb.BalanceRequest(**parts))


def check_fit(decisions: list[Any], samples: int) -> None:
    """All ranks have one plan, and everything that is sent is received."""
    assert {decision.outcome for decision in decisions} == {BALANCED}
    assert len({(decision.instance, decision.digest) for decision in decisions}) == 1
    sent = np.zeros((len(decisions), len(decisions)), int)
    received = np.zeros_like(sent)
    for rank, decision in enumerate(decisions):
        np.add.at(sent[rank], np.frombuffer(decision.destinations, "<i4"), 1)
        sources = np.frombuffer(decision.sources, "<i4")
        received[sources, rank] = np.frombuffer(decision.source_counts, "<i4")
    assert (sent == received).all()
    assert sent.sum() == samples


def test_an_old_client_goes_through_rounds(channel: grpc.Channel) -> None:
    streams = [OldStream(channel, old_join("old", rank, 2)) for rank in range(2)]
    assert {stream.first.joined.protocol_version for stream in streams} == {1}
    for number in range(5):
        for rank, stream in enumerate(streams):
            stream.send(submit=old_submit(number, rank))
        answers = [stream.receive().answer for stream in streams]
        assert {answer.round for answer in answers} == {number}
        check_fit([answer.decision for answer in answers], 32)
    call = Stub(channel)
    (statistics,) = call.GetSessionStats(message("GetSessionStatsRequest")(job="old"), timeout=SECONDS).sessions
    assert (statistics.rounds_balanced, statistics.joined_ranks, statistics.last_round) == (5, 2, 4)
    assert statistics.last_balance.samples == 32
    assert 1 in call.GetServerInfo(message("GetServerInfoRequest")(), timeout=SECONDS).protocol_versions
    for stream in streams:
        stream.end()


@pytest.mark.parametrize("newer", [0, 1])
def test_a_rank_that_tells_of_speeds_beside_one_that_does_not(channel: grpc.Channel, newer: int) -> None:
    options = message("PartitionOptions")(counts=enum_value("Counts", "COUNTS_FREE"))
    streams = [
        (NewStream if rank == newer else OldStream)(channel, old_join(f"speeds-{newer}", rank, 2, options=options))
        for rank in range(2)
    ]
    learned = pb.LearnedSpeeds(
        stragglers=[pb.Straggler(rank=1, speed=0.5, since=3)],
        delays=[pb.Delay(rank=0, cause=pb.Delay.CAUSE_NETWORK, share=0.2, since=4)],
    )
    for number in range(3):
        for rank, stream in enumerate(streams):
            submit = old_submit(number, rank)
            if rank == newer:
                submit = pb.Submit.FromString(submit.SerializeToString())
                submit.learned.CopyFrom(learned)
            stream.send(submit=submit)
        decisions = [stream.receive().answer.decision for stream in streams]
        check_fit(decisions, 32)
        loads = [decision.balance.own_load_after for decision in decisions]
        assert loads[1] / sum(loads) == pytest.approx(1 / 3 if newer == 0 else 1 / 2, abs=0.02)  # rank 0's word holds
    for stream in streams:
        stream.end()


@pytest.mark.parametrize("newer", [0, 1])
def test_what_ranks_did_is_known_of_a_newer_first_rank(channel: grpc.Channel, newer: int) -> None:
    """Of an older one, and of any other rank, rounds count as they were decided."""
    name = f"told-{newer}"
    streams = [(NewStream if rank == newer else OldStream)(channel, old_join(name, rank, 2)) for rank in range(2)]

    def counted() -> tuple[int, dict[str, int]]:
        (found,) = Stub(channel).GetSessionStats(message("GetSessionStatsRequest")(job=name), timeout=SECONDS).sessions
        assert found.last_round == 2
        return found.rounds_balanced, dict(found.rounds_identity)

    unfollowed = [pb.Unfollowed(round=0, reason=pb.Decision.REASON_COMPILING, ranks=[1]), pb.Unfollowed(round=1)]
    unfollowed[1].reason = 9999  # type: ignore[assignment]  # of a yet newer client
    for number in range(3):
        for rank, stream in enumerate(streams):
            submit = old_submit(number, rank)
            if rank == newer:
                told = pb.Told(agreed=number, unfollowed=unfollowed[:number])
                stream.send(submit=pb.Submit.FromString(submit.SerializeToString()), told=told)
            else:
                stream.send(submit=submit)
        check_fit([stream.receive().answer.decision for stream in streams], 32)
    assert counted() == ((0, {"compiling": 1, "not_followed": 1}) if newer == 0 else (3, {}))
    streams[newer].send(submits=pb.SubmitGroup(), told=pb.Told(agreed=3, unfollowed=unfollowed))  # as at the end
    deadline = time.monotonic() + SECONDS
    while counted() != ((1, {"compiling": 1, "not_followed": 1}) if newer == 0 else (3, {})):
        assert time.monotonic() < deadline, counted()
        time.sleep(0.01)
    for stream in streams:
        stream.end()


def test_an_old_node_speaks_for_its_ranks(channel: grpc.Channel) -> None:
    nodes = [OldStream(channel, old_join("old-nodes", first, 4, ranks=[first, first + 1])) for first in (0, 2)]
    for number in range(3):
        for node, first in zip(nodes, (0, 2), strict=True):
            submits = [old_submit(number, rank) for rank in (first, first + 1)]
            node.send(submits=message("SubmitGroup")(submits=submits))
        answers: dict[int, Any] = {}
        for node in nodes:
            expected = len(answers) + 2
            while len(answers) < expected:
                answers.update({answer.rank: answer for answer in node.receive().answers.answers})
        check_fit([answers[rank].decision for rank in range(4)], 64)
    for node in nodes:
        node.end()


def test_an_old_call_takes_part_in_a_round(channel: grpc.Channel) -> None:
    responses: dict[int, Any] = {}

    def ask(rank: int) -> None:
        request = message("BalanceRoundRequest")(join=old_join("old-call", rank, 2), submit=old_submit(0, rank))
        responses[rank] = Stub(channel).BalanceRound(request, timeout=SECONDS)

    threads = [threading.Thread(target=ask, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    check_fit([responses[rank].answer.decision for rank in range(2)], 32)


@pytest.mark.parametrize("versions", [[99], [0], [2, 99]])
def test_a_client_of_other_versions_is_refused_with_both_named(channel: grpc.Channel, versions: list[int]) -> None:
    joining = old_join("other", 0, 2, protocol_versions=versions)
    error = OldStream(channel, joining).first.error
    assert (error.code, error.fatal) == (enum_value("ErrorCode", "ERROR_CODE_VERSION"), True)
    assert str(versions) in error.message
    assert "[1]" in error.message
    request = message("BalanceRoundRequest")(join=joining, submit=old_submit(0, 0))
    assert Stub(channel).BalanceRound(request, timeout=SECONDS).answer.error.message == error.message


def test_a_client_that_speaks_newer_versions_too_is_served(channel: grpc.Channel) -> None:
    stream = OldStream(channel, old_join("newer", 0, 1, protocol_versions=[1, 2, 99]))
    assert stream.first.joined.protocol_version == 1
    stream.end()


def test_today_s_job_runs_on_an_old_server(balancer: ServiceProcess) -> None:
    with old_server(balancer.address) as address:
        job = Job(steps=(6, 6), address=address, name="on-old-server")
        results = run_ranks(2, run_job, job)
    check_complete(job, results)
    assert {record["mode"] for records in results for record in records} == {"service"}
    with grpc.insecure_channel(balancer.address) as channel:  # the job has left in order: its name is free
        asked, deadline = message("GetSessionStatsRequest")(job=job.name), time.monotonic() + 5
        while Stub(channel).GetSessionStats(asked, timeout=SECONDS).sessions:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_today_s_commands_work_with_an_old_server(balancer: ServiceProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PLANNER", "TLS", "TLS_CA", "TLS_CERTIFICATE", "TLS_KEY", "TOKEN_FILE"):
        monkeypatch.delenv(f"EVENKEEL_{name}", raising=False)
    with (
        old_server(balancer.address) as address,
        RunningJob(lambda: new_channel(address, None), job="seen-on-old") as job,
    ):
        shown = CliRunner().invoke(app, ["top", "--json", "--balancer", address, "--count", "1"])
        job.check(3)
    assert shown.exit_code == 0, shown.output
    assert "seen-on-old/default/train" in [row["name"] for row in json.loads(shown.stdout)]


@contextlib.contextmanager
def server_of_version(version: int, *, refuses: bool) -> Iterator[str]:
    """A server that speaks one other version: it refuses who does not name it, or answers in it nevertheless."""

    def answer(method: str, requests: Any, _context: grpc.ServicerContext) -> Any:
        assert method == "Balance"
        spoken = list(next(requests).join.protocol_versions)
        if not refuses:
            joined = message("Joined")(protocol_version=version, server_version="9.9", instance=1)
            return iter([message("BalanceResponse")(joined=joined)])
        said = f"version: protocol_versions is {spoken}; use a client that speaks one of [{version}]"
        code = enum_value("ErrorCode", "ERROR_CODE_VERSION")
        return iter([message("BalanceResponse")(error=message("Error")(code=code, message=said, fatal=True))])

    server = grpc.server(ThreadPoolExecutor(8))
    server.add_generic_rpc_handlers((handler(answer),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0.5).wait(10)


@pytest.mark.parametrize("refuses", [True, False])
@pytest.mark.parametrize("version", [99, 0])
def test_today_s_client_refuses_a_server_of_another_version(version: int, refuses: bool) -> None:
    with server_of_version(version, refuses=refuses) as address:
        connection = Connection(address, join("elsewhere"), join_timeout=SECONDS)
        connection.start()
        try:
            deadline = time.monotonic() + SECONDS
            while "version" not in connection.trouble:
                assert time.monotonic() < deadline, connection.trouble
                time.sleep(0.01)
            assert not connection.ready
            assert "1" in connection.trouble
            assert str(version) in connection.trouble
        finally:
            connection.close()
