"""A name service that is hostile or broken: the client says so, stays bounded, and comes when names hold again."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
import trustme
from trainer_client.balancing.service import Connection, outages, uplink

from benchmarks.harness.balancer_process import ServiceProcess
from evenkeel import addresses
from evenkeel.credentials import Credentials
from tests.services.security.jobs import join
from tests.trainer_client.balancing.service.name_server import NXDOMAIN, NameServer, Reply

NAME = "balancers.example.test"
THOUSANDS = [f"127.{1 + n // 250 % 16}.{n // 4000}.{1 + n % 250}" for n in range(4000)]


def wait_until(what: Callable[[], Any], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        pytest.param(lambda _: None, "no answer from spread://", id="silent"),
        pytest.param(lambda _: NXDOMAIN, "not found", id="no such name"),
        pytest.param(lambda _: b"rubbish", "", id="rubbish"),
        pytest.param(lambda _: (), "", id="no addresses"),
        pytest.param(lambda _: THOUSANDS, "", id="thousands"),
        pytest.param(lambda n: [f"127.8.{n % 250}.{host}" for host in range(1, 6)], "refused", id="others every time"),
    ],
)
def test_names_that_do_not_hold_and_then_hold(
    balancer: ServiceProcess, monkeypatch: pytest.MonkeyPatch, reply: Callable[[int], Reply], said: str
) -> None:
    """gRPC's own resolver asks the server of the test: where it asks is all that is changed."""
    with NameServer(reply) as names:

        def resolve(address: str, job: str) -> Any:
            target, *rest = addresses.resolve(address, job)
            return target.replace("dns:///", f"dns://127.0.0.1:{names.port}/"), *rest

        monkeypatch.setattr(uplink, "resolve", resolve)
        address = f"spread://{NAME}:{balancer.port}"
        connection = Connection(address, join("named"), join_timeout=2.0)
        connection.start()
        wait_until(lambda: connection.trouble, 60)
        assert said in connection.trouble
        assert not connection.ready
        assert connection.cause is None  # it may pass
        names.reply = lambda _: ["127.0.0.1"]
        wait_until(lambda: connection.ready, 60)
        began = time.monotonic()
        connection.close()
        assert time.monotonic() - began < 10
    assert names.questions


@pytest.fixture
def unavailable() -> grpc.Call:
    """How a call ends where nobody listens."""
    with (
        closed_port() as port, grpc.insecure_channel(f"127.0.0.1:{port}") as channel,
        pytest.raises(grpc.RpcError) as caught,
    ):  # fmt: skip
        channel.unary_unary("/x/Y")(b"", timeout=30)
    assert isinstance(caught.value, grpc.Call)
    return caught.value


@contextlib.contextmanager
def closed_port() -> Iterator[int]:
    """A port at which nobody listens, and nobody else will: it is taken."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


def test_thousands_of_addresses_are_not_all_looked_into(
    unavailable: grpc.Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever listens at all of them takes connections, and his time to answer rubbish."""
    tried = 0

    def take(listener: socket.socket) -> None:
        nonlocal tried
        with contextlib.suppress(OSError):
            while True:
                peer, _ = listener.accept()
                tried += 1
                with peer:
                    time.sleep(0.2)
                    peer.sendall(b"rubbish, and not TLS")

    with socket.create_server(("0.0.0.0", 0)) as listener:
        threading.Thread(target=take, args=(listener,), daemon=True).start()
        port = listener.getsockname()[1]
        found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (place, port)) for place in THOUSANDS]
        monkeypatch.setattr(outages, "_PROBES_SECONDS", 1.0)
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_more: found)
        assert outages.of_call(unavailable, f"spread://{NAME}:{port}", Credentials()) is None
        assert 1 <= tried < 50
        listener.shutdown(socket.SHUT_RDWR)


def test_the_cause_is_found_where_the_first_of_several_is_gone(unavailable: grpc.Call) -> None:
    """The second speaks TLS, and this client plaintext."""
    with socket.create_server(("127.0.0.1", 0)) as listener, closed_port() as closed:
        port = listener.getsockname()[1]

        def speak_tls() -> None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            trustme.CA().issue_cert("localhost").configure_cert(context)
            with contextlib.suppress(OSError), listener.accept()[0] as peer:
                context.wrap_socket(peer, server_side=True).close()

        threading.Thread(target=speak_tls, daemon=True).start()
        cause = outages.of_call(unavailable, f"spread://127.0.0.1:{closed},127.0.0.1:{port}", Credentials())
    assert cause is not None
    assert cause.kind == "certificates"
    assert f"127.0.0.1:{port}" in cause.text
