"""What the balancer shows beside its metrics, to whom, and over what."""

import json
import ssl
from pathlib import Path

import trustme

from benchmarks.harness.authorities import write_certificate
from benchmarks.harness.balancer_process import running_balancer
from services.balancer.history import History
from services.balancer.site import BalancerSite
from services.balancer.views import Views
from services.operations.http import Request, Response
from services.security.tokens import TokenStore
from services.security.transport import Transport
from tests.asking import get
from tests.services.balancer.test_history import summary_of
from tests.tokens import known, write_tokens
from tests.waiting import until

TOKEN = "token-of-team-a-0123456789abcdef0123456789abcdef"


def test_tokens_and_tls_are_those_of_the_balancer(tmp_path: Path) -> None:
    server = write_certificate(trustme.CA(), tmp_path, "server")
    tokens, port = write_tokens(tmp_path / "tokens.yml", known(TOKEN, "a-*")), tmp_path / "port"
    with running_balancer(
        "--tls-certificate", str(server.certificate), "--tls-key", str(server.key), "--token-file", str(tokens),
        "--metrics-port", "0", "--metrics-port-file", str(port),
    ):  # fmt: skip
        place = f"127.0.0.1:{port.read_text().strip()}"
        trusting = ssl.create_default_context(cafile=str(server.ca))
        status, problem = get(f"https://{place}/v1/streams", context=trusting)
        assert (status, "no token" in problem["detail"]) == (401, True)
        assert get(f"https://{place}/v1/streams", "wrong", context=trusting)[0] == 401
        status, document = get(f"https://{place}/v1/streams", TOKEN, context=trusting)
        assert (status, document["streams"]) == (200, [])
        assert get(f"http://{place}/v1/streams", TOKEN)[0] == 200  # forwarded to this machine
        assert get(f"http://{place}/page/../settings.py")[0] == 404
        for scheme, context in (("http", None), ("https", trusting)):  # scrapers and probes go on as they did
            assert get(f"{scheme}://{place}/readyz", context=context)[0] == 200
            assert "Evenkeel balancer" in get(f"{scheme}://{place}/", context=context)[1]
        write_tokens(tokens)  # withdrawn
        until(lambda: get(f"http://{place}/v1/streams", TOKEN)[0] == 401)


class Site(BalancerSite):
    """One that answers whatever the tests ask."""

    def answer(self, request: Request) -> Response:
        found = super().answer(request)
        assert found is not None
        return found


def site(tmp_path: Path, *, tls: bool, plaintext: bool = False, jobs: str = "") -> Site:
    files = write_certificate(trustme.CA(), tmp_path, "server") if tls else None
    tokens = TokenStore(write_tokens(tmp_path / "tokens.yml", known(TOKEN, jobs))) if jobs else None
    transport = Transport(
        certificate=None if files is None else files.certificate, key=None if files is None else files.key,
        allow_plaintext=plaintext,
    )  # fmt: skip
    history = History()
    for job in ("a-one", "b-two"):
        history.planned(summary_of(job), 0.001)
    views = Views(history, version="1", instance=1, draining=lambda: False)
    return Site(views, transport=transport, tokens=tokens)


def asked(target: str, peer: str = "192.0.2.7", *, secure: bool = False, token: str = "") -> Request:
    headers = {"host": "balancer:9101"} | ({"authorization": f"Bearer {token}"} if token else {})
    return Request(target=target, headers=headers, peer=peer, is_secure=secure)


def test_other_machines_are_shown_nothing_in_plaintext(tmp_path: Path) -> None:
    behind = site(tmp_path, tls=True)
    page = behind.answer(asked("/?x"))
    assert (page.status, page.headers["Location"]) == (307, "https://balancer:9101/?x")
    for tls, plaintext in ((True, False), (True, True), (False, False)):
        found = site(tmp_path, tls=tls, plaintext=plaintext).answer(asked("/v1/streams"))
        assert found.status == 403, (tls, plaintext)
        assert b"https://" in found.body or b"TLS_CERTIFICATE" in found.body
    for served, request in (
        (behind, asked("/v1/streams", secure=True)),
        (behind, asked("/v1/streams", peer="127.0.0.1")),
        (behind, asked("/v1/streams", peer="::1")),
        (site(tmp_path, tls=False, plaintext=True), asked("/v1/streams")),
    ):
        assert served.answer(request).status == 200


def test_a_token_shows_its_jobs_and_no_others(tmp_path: Path) -> None:
    served = site(tmp_path, tls=False, jobs="a-*")
    found = served.answer(asked("/v1/streams", "127.0.0.1", token=TOKEN))
    assert [row["job"] for row in json.loads(found.body)["streams"]] == ["a-one"]
    for job, status in (("a-one", 200), ("b-two", 404)):
        assert served.answer(asked(f"/v1/stream?job={job}", "127.0.0.1", token=TOKEN)).status == status


def test_who_asks_too_often_is_asked_to_wait(tmp_path: Path) -> None:
    served = site(tmp_path, tls=False)
    assert {served.answer(asked("/v1/streams", "127.0.0.1")).status for _ in range(400)} == {200, 429}
    assert served.answer(asked("/v1/streams", "::1")).status == 200


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    served = site(tmp_path, tls=False)
    for query, status, text in (
        ("?job=c-three", 404, "c-three/default/train"), ("", 400, "?job=NAME"),
        ("?job=a-one&since=-1", 400, "number of a round"), ("?job=a-one&since=%D9%A3", 400, "number of a round"),
        ("?" + "&".join(f"a{number}=1" for number in range(99)), 400, ""), ("?job=" + "x" * 5000, 404, ""),
    ):  # fmt: skip
        found = served.answer(asked(f"/v1/stream{query}", "127.0.0.1"))
        problem = json.loads(found.body)
        assert (found.status, problem["status"]) == (status, status), query
        assert text in problem["detail"]
        assert len(problem["detail"]) < 400
