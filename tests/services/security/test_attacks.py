"""Attacks on a balancer while a job trains beside them: it must not miss a round."""

from __future__ import annotations

import contextlib
import resource
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest

from evenkeel.protocol import balancer_pb2 as pb
from evenkeel.protocol import balancer_pb2_grpc as pb_grpc
from tests.services.security.conftest import Secured
from tests.services.security.jobs import RunningJob, eventually, join, submit

pytestmark = pytest.mark.timeout(400)


def test_slow_loris(secured: Secured, victim: RunningJob) -> None:
    """Connections that never finish a handshake, or trickle, are closed; they must not stop others from connecting."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(secured.dial()) for _ in range(300)]
        hello = ssl_client_hello()
        for number, raw in enumerate(sockets):
            raw.sendall(hello[: number % len(hello)])
        with secured.connect(secured.tokens["victim"]) as opened:
            pb_grpc.BalancerServiceStub(opened).GetServerInfo(pb.GetServerInfoRequest(), timeout=30)
        deadline = time.monotonic() + 60
        waiting = set(sockets)
        while waiting and time.monotonic() < deadline:
            waiting = {raw for raw in waiting if not is_closed(raw)}
            time.sleep(0.05)
        assert not waiting, f"{len(waiting)} of {len(sockets)} connections are still open"


def test_streams_that_never_join(secured: Secured, victim: RunningJob) -> None:
    with secured.connect(secured.tokens["other"]) as opened:
        stub, hold = pb_grpc.BalancerServiceStub(opened), threading.Event()

        def nothing() -> Iterator[pb.BalanceRequest]:
            hold.wait(60)
            yield from ()

        streams = [stub.Balance(nothing(), timeout=60) for _ in range(64)]
        codes = {answer.error.code for one in streams for answer in one}
        hold.set()
    assert codes == {pb.ERROR_CODE_NOT_JOINED}


def test_message_flood(secured: Secured, victim: RunningJob) -> None:
    """A client that sends as fast as it can, never reading, on many streams."""
    stop = time.monotonic() + 3
    with contextlib.ExitStack() as stack:
        calls = []
        for number in range(4):
            opened = stack.enter_context(secured.connect(secured.tokens["other"]))

            def flood(number: int = number) -> Iterator[pb.BalanceRequest]:
                yield pb.BalanceRequest(join=join(f"other-flood-{number}"))
                message = pb.BalanceRequest(submit=submit(0, samples=256))
                while time.monotonic() < stop:
                    yield message

            calls.append(pb_grpc.BalancerServiceStub(opened).Balance(flood(), timeout=30))
        time.sleep(3.5)
        for call in calls:
            call.cancel()


@pytest.mark.parametrize("seed", range(3))
def test_fuzzed_messages(secured: Secured, victim: RunningJob, seed: int) -> None:
    """Bytes that are no message, and messages whose fields say anything; the server answers each and lives on."""
    rng = np.random.default_rng(seed)
    with secured.connect(secured.tokens["other"]) as opened:
        method = "/evenkeel.balancer.v1.BalancerService/"
        raw_stream = opened.stream_stream(f"{method}Balance", lambda raw: raw, pb.BalanceResponse.FromString)
        raw_round = opened.unary_unary(f"{method}BalanceRound", lambda raw: raw, pb.BalanceRoundResponse.FromString)
        valid = pb.BalanceRequest(submit=submit(0)).SerializeToString()
        for number in range(60):
            name = f"other-{seed}-{number}"
            first = pb.BalanceRequest(join=join(name)).SerializeToString()
            with contextlib.suppress(grpc.RpcError):
                list(raw_stream(iter([first, mutate(valid, rng), mutate(valid, rng)]), timeout=5))
            with contextlib.suppress(grpc.RpcError):
                list(raw_stream(iter([mutate(first, rng)]), timeout=5))
            both = pb.BalanceRoundRequest(join=join(name, run_id="r"), submit=submit(0)).SerializeToString()
            with contextlib.suppress(grpc.RpcError):
                raw_round(mutate(both, rng), timeout=5)
        pb_grpc.BalancerServiceStub(opened).GetServerInfo(pb.GetServerInfoRequest(), timeout=30)


def test_malformed_frames(secured: Secured, victim: RunningJob) -> None:
    """Valid TLS, then no HTTP/2, broken HTTP/2, or an endless header."""
    context = ssl.create_default_context(cafile=str(secured.server.ca))
    context.set_alpn_protocols(["h2"])
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    settings = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
    rng = np.random.default_rng(0)
    attacks = [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        preface + b"\xff" * 4096,
        preface + settings + bytes([0xFF, 0xFF, 0xFF, 0, 0, 0, 0, 0, 1]) + b"x" * 65536,  # a frame of 16 MiB
        preface + settings + bytes([0, 0x10, 0, 1, 0, 0, 0, 0, 1]) + b"\x40" * 4096,  # headers that do not decode
        preface + settings + bytes([0, 0, 4, 3, 0, 0, 0, 0, 1, 0, 0, 0, 8]) * 5000,  # resets of streams never opened
        preface + settings + bytes([0, 0, 8, 6, 0, 0, 0, 0, 0]) * 1 + b"12345678" * 5000,  # pings and rubbish
        preface + settings * 20_000,  # a flood of settings
        *[preface + settings + rng.bytes(2000) for _ in range(20)],
    ]
    for attack in attacks:
        with secured.dial() as raw, context.wrap_socket(raw, server_hostname="localhost") as secure:
            with contextlib.suppress(OSError):
                secure.sendall(attack)
            secure.settimeout(0.2)
            with contextlib.suppress(OSError):
                while secure.recv(65536):
                    pass


def test_oversized_message(secured: Secured, victim: RunningJob) -> None:
    huge = submit(0)
    huge.memory = bytes(20 << 20)
    with secured.connect(secured.tokens["other"]) as opened:
        with pytest.raises(grpc.RpcError) as caught:
            pb_grpc.BalancerServiceStub(opened).BalanceRound(
                pb.BalanceRoundRequest(join=join("other-huge"), submit=huge), timeout=20
            )
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_ten_thousand_connections(secured: Secured, victim: RunningJob) -> None:
    """Beyond its limit a server takes no connection; the job's own go on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 10_000
    if hard != resource.RLIM_INFINITY and hard < wanted + 500:
        wanted = hard - 500
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted + 500), hard))
    sockets: list[socket.socket] = []
    try:
        for _ in range(wanted):
            with contextlib.suppress(OSError):
                sockets.append(secured.dial(timeout=5))
        assert len(sockets) > wanted * 0.9
        time.sleep(1.0)
    finally:
        for raw in sockets:
            raw.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    # Once they are gone there is room again.
    with secured.connect(secured.tokens["victim"]) as opened:
        stub = pb_grpc.BalancerServiceStub(opened)
        eventually(lambda: stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=5), seconds=30)


def test_no_secret_in_log_or_process_list(secured: Secured) -> None:
    with secured.connect("a-wrong-token-0123456789abcdef0123456789") as opened, pytest.raises(grpc.RpcError):
        pb_grpc.BalancerServiceStub(opened).GetServerInfo(pb.GetServerInfoRequest(), timeout=30)
    process = secured.balancer.process
    assert process is not None
    command = Path(f"/proc/{process.pid}/cmdline").read_text() + Path(f"/proc/{process.pid}/environ").read_text()
    log = secured.balancer.log
    assert "call refused" in log  # as have the attacks above
    for token in secured.tokens.values():
        assert token not in log
        assert token not in command
    assert "Traceback" not in log, log[log.index("Traceback") :][:3000]


# ------------------------------------------------------------------ helpers


def is_closed(raw: socket.socket) -> bool:
    raw.settimeout(0.001)
    try:
        return raw.recv(4096) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


def ssl_client_hello() -> bytes:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname="localhost").do_handshake()
    return outgoing.read()


def mutate(message: bytes, rng: np.random.Generator) -> bytes:
    """Some bytes changed, cut out, doubled or appended."""
    data = bytearray(message)
    for _ in range(int(rng.integers(1, 6))):
        at = int(rng.integers(0, max(1, len(data))))
        kind = rng.integers(0, 5)
        if kind == 0 and data:
            data[at % len(data)] = int(rng.integers(0, 256))
        elif kind == 1:
            del data[at : at + int(rng.integers(1, 32))]
        elif kind == 2:
            data[at:at] = rng.bytes(int(rng.integers(1, 32)))
        elif kind == 3:
            data[at:at] = data[: int(rng.integers(1, 64))]
        else:
            data += rng.bytes(8)
    return bytes(data)
