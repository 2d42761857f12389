"""The planner's side: an HTTP server behind the middleware and the protocol, attacked with sockets; its process."""

import asyncio
import contextlib
import json
import socket
import ssl
import threading
import time
import urllib.error
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trustme
import uvicorn

from benchmarks.harness.authorities import write_certificate
from benchmarks.harness.balancer_process import fork, until_logged
from services.operations.launch import running_service
from services.planner.edge import Edge
from services.planner.metrics import Metrics
from services.planner.settings import Settings
from services.security.http_server import impatient_protocol
from services.security.tokens import TokenStore, hash_token
from services.security.transport import Transport
from tests.asking import get
from tests.services.security.conftest import TOKENS, write_all_tokens
from tests.waiting import until

MAX_CONNECTIONS = 100


async def application(scope: Any, receive: Any, send: Any) -> None:
    """Answers when it has the whole body."""
    while (await receive()).get("more_body", False):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


@dataclass
class Served:
    port: int
    context: ssl.SSLContext

    def get(self, path: str = "/", token: str | None = None) -> tuple[int, Any]:
        return get(f"https://localhost:{self.port}{path}", token, context=self.context)

    @contextlib.contextmanager
    def connect(self) -> Iterator[ssl.SSLSocket]:
        with (
            socket.create_connection(("127.0.0.1", self.port), timeout=30) as raw,
            self.context.wrap_socket(raw, server_hostname="localhost") as secure,
        ):
            yield secure


@contextlib.contextmanager
def serving(
    folder: Path, *, patience: float = 1.5, requests_per_second: float = 50.0, burst: float = 200.0
) -> Iterator[Served]:
    """A server in a thread; `patience` are the seconds that it waits for headers and bodies."""
    files = write_certificate(trustme.CA(), folder, "server")
    tokens = TokenStore(write_all_tokens(folder / "tokens.yml"))
    settings = Settings(requests_per_second=requests_per_second)
    app = Edge(application, settings=settings, metrics=Metrics(), tokens=tokens, burst=burst)
    config = uvicorn.Config(
        app, port=0, log_config=None, lifespan="off",
        http=impatient_protocol(header_seconds=patience, body_seconds=patience, max_connections=MAX_CONNECTIONS),
    )  # fmt: skip
    config.load()
    config.ssl = Transport(certificate=files.certificate, key=files.key).context()
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    until(lambda: server.started or not thread.is_alive(), 30)
    assert thread.is_alive()
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield Served(port, ssl.create_default_context(cafile=str(files.ca)))
    finally:
        server.should_exit = True
        thread.join(30)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("http")) as running:
        yield running


def closed_after(secure: ssl.SSLSocket, seconds: float) -> bool:
    secure.settimeout(seconds)
    try:
        return secure.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


SLOW = {
    "nothing": b"",
    "half the headers": b"GET / HTTP/1.1\r\nHost: x\r\n",
    "half the body": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\nAuthorization: Bearer "
    + TOKENS["planner"].encode()
    + b"\r\n\r\nabc",
}


def test_slow_clients_are_let_go_and_others_do_not_wait(served: Served) -> None:
    """All are connected at the same time, so that the server's patience with them passes once."""
    with contextlib.ExitStack() as stack:
        clients = {kind: stack.enter_context(served.connect()) for kind in SLOW}
        for kind, client in clients.items():
            if SLOW[kind]:
                client.sendall(SLOW[kind])
        assert served.get(token=TOKENS["planner"])[0] == 200
        assert {kind: closed_after(client, 60) for kind, client in clients.items()} == dict.fromkeys(SLOW, True)


def test_connections_are_bounded(tmp_path: Path) -> None:
    """Those beyond the bound are closed; the others stay, since nothing else closes one within a minute."""
    with serving(tmp_path, patience=60) as served:
        with contextlib.ExitStack() as stack:
            opened, refused = [], 0
            for _ in range(MAX_CONNECTIONS + 50):
                try:
                    opened.append(stack.enter_context(served.connect()))
                except OSError:
                    refused += 1
            deadline = time.monotonic() + 30
            while refused < 50 and time.monotonic() < deadline:
                closed = [secure for secure in opened if closed_after(secure, 0.02)]
                refused += len(closed)
                opened = [secure for secure in opened if secure not in closed]
            assert refused == 50
        assert until(lambda: served.get(token=TOKENS["planner"])[0], 30, but=OSError) == 200


def test_too_many_requests(tmp_path: Path) -> None:
    with serving(tmp_path, requests_per_second=0.1, burst=20) as served:
        answers = [served.get("/v1/profiles", token="wrong" * 10) for _ in range(30)]
        assert {status for status, _ in answers} == {401, 429}
        assert answers[-1][1]["title"] == "Too many requests"
        assert served.get("/healthz")[0] == 200


@pytest.mark.timeout(400)
def test_tls_and_tokens_of_a_planner_whose_certificate_is_renewed(tmp_path: Path) -> None:
    files = write_certificate(trustme.CA(), tmp_path, "server")
    old_ca = tmp_path / "old.pem"
    old_ca.write_bytes(files.ca.read_bytes())
    tokens = write_all_tokens(tmp_path / "tokens.yml")
    flags = ("--tls-certificate", str(files.certificate), "--tls-key", str(files.key))
    with running_service(
        "services.planner", *flags, "--token-file", str(tokens), "--log-level", "debug",
        log_file=tmp_path / "log", spawn=fork,
    ) as planner:  # fmt: skip

        def ask(ca: Path, token: str | None, path: str = "/v1/hardware-profiles") -> int:
            return Served(planner.port, ssl.create_default_context(cafile=str(ca))).get(path, token)[0]

        assert [ask(old_ca, token) for token in (TOKENS["planner"], None, TOKENS["late"])] == [200, 401, 401]
        open_to_all = {"/": 200, "/page/main.js": 200, "/healthz": 200, "//healthz": 401, "/healthz/../v1/plans": 401}
        assert {path: ask(old_ca, None, path) for path in open_to_all} == open_to_all
        with socket.create_connection(("127.0.0.1", planner.port), timeout=30) as plain:  # no TLS, no answer
            plain.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            with contextlib.suppress(OSError):
                assert b"200" not in plain.recv(4096)
        files.certificate.write_text("damaged")
        until_logged(planner, "TLS files cannot be used")
        assert ask(old_ca, TOKENS["planner"]) == 200
        renewed = write_certificate(trustme.CA(), tmp_path, "server")
        assert until(lambda: ask(renewed.ca, TOKENS["planner"]), but=urllib.error.URLError) == 200
        assert planner.stop() == 0
    log = (tmp_path / "log").read_text()
    events = [json.loads(line)["event"] for line in log.splitlines()]
    assert (events[0], events[-1]) == ("planner_ready", "planner_stopped")
    assert {"TLS files read again", "request refused"} <= set(events)
    assert not [secret for token in TOKENS.values() for secret in (token, hash_token(token)) if secret in log]
