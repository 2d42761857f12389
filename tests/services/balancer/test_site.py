"""What the balancer tells beside its metrics, to whom, and over what."""

from __future__ import annotations

import contextlib
import json
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import pytest
import trustme
import yaml

from benchmarks.harness.authorities import write_certificate
from benchmarks.harness.balancer_process import running_balancer
from evenkeel.protocol import balancer_pb2 as pb
from evenkeel.protocol import balancer_pb2_grpc as pb_grpc
from services.balancer.site import BalancerSite
from services.operations.http import Request
from services.security.tokens import hash_token
from services.security.transport import Transport
from tests.services.balancer.samples import join_message
from tests.services.balancer.watched import GAP, SAMPLES, WatchedJob

RANKS, LATE = 4, 2
SECONDS = 60.0
TOKEN = "token-of-team-a-0123456789abcdef0123456789abcdef"


def get(url: str, token: str = "", context: ssl.SSLContext | None = None) -> tuple[int, Any]:
    """Status and document."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.urlopen(request, timeout=SECONDS, context=context) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def events(url: str, token: str = "") -> Iterator[tuple[str, Any]]:
    """Names and documents of a stream of server-sent events."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    with urllib.request.urlopen(request, timeout=SECONDS) as response:
        assert response.headers["Content-Type"] == "text/event-stream"
        name = ""
        for line in response:
            field, _, value = line.decode().rstrip("\n").partition(": ")
            if field == "event":
                name = value
            elif field == "data":
                yield name, json.loads(value)


def until(read: Any, condition: Any) -> Any:
    """What is read, once it is as wanted."""
    deadline = time.monotonic() + SECONDS
    while not condition(found := read()):
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    return found


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = tmp_path_factory.mktemp("balancer") / "metrics_port"
    with (
        running_balancer("--metrics-port", "0", "--metrics-port-file", str(port)) as balancer,
        WatchedJob(balancer.address, "a-train", ranks=RANKS, late=LATE),
    ):
        url = f"http://127.0.0.1:{port.read_text().strip()}"
        until(lambda: get(f"{url}/v1/session?job=a-train"), lambda found: found[0] == 200 and _after_the_gap(found[1]))
        yield url


def _after_the_gap(document: Any) -> bool:
    return bool(document["session"]["round"] > GAP[1] + 5 and document["heaviest"])


def test_a_running_job_is_told_with_its_ranks_samples_and_gaps(url: str) -> None:
    status, overview = get(f"{url}/v1/sessions")
    assert status == 200
    (row,) = overview["sessions"]
    assert (row["job"], row["group"], row["loader"], row["state"]) == ("a-train", "default", "train", "balanced")
    assert (row["joined_ranks"], row["ranks"], row["run_id"]) == (RANKS, RANKS, "run-7")
    assert 1.0 <= row["bound"] <= row["imbalance_after"] + 1e-6 < row["imbalance_before"]
    assert row["saved_gpu_hours"] > 0
    status, document = get(f"{url}/v1/session?job=a-train&group=default&loader=train")
    assert status == 200
    assert (document["format"], document["version"]) == ("evenkeel-watch", 1)
    rounds = document["rounds"]
    assert {len(column) for column in rounds.values()} == {len(rounds["round"])}
    assert rounds["round"] == sorted(rounds["round"])
    for before, after, bound, mean in zip(
        rounds["before"], rounds["after"], rounds["bound"], rounds["mean_load"], strict=True
    ):
        assert mean <= bound * (1 + 1e-6)
        assert bound <= after * (1 + 1e-6)
        assert after <= before * (1 + 1e-6)
    assert set(rounds["samples"]) == {RANKS * SAMPLES}
    assert set(rounds["reason"]) == {""}
    assert [(gap["first"], gap["last"]) for gap in document["gaps"]] == [(GAP[0], GAP[1] - 1)]
    assert (document["session"]["breaker_openings"], document["session"]["rounds_elsewhere"]) == (1, GAP[1] - GAP[0])
    ranks = document["ranks"]
    assert (ranks["rank"], document["ranks_left_out"]) == (list(range(RANKS)), 0)
    assert ranks["node"] == ["gpu00", "gpu00", "gpu01", "gpu01"]
    assert max(range(RANKS), key=lambda rank: ranks["late_seconds"][rank]) == LATE
    assert sum(ranks["load_before"]) == pytest.approx(sum(ranks["load_after"]), rel=1e-5)
    heavy = document["heaviest"]["samples"]
    assert [one["cost"] for one in heavy] == sorted((one["cost"] for one in heavy), reverse=True)
    assert len(heavy) == 10


def test_ranks_that_have_not_come_and_those_that_have_gone_are_told_apart_by_name(tmp_path: Path) -> None:
    port = tmp_path / "port"
    with (
        contextlib.ExitStack() as streams,
        running_balancer("--metrics-port", "0", "--metrics-port-file", str(port)) as balancer,
    ):
        stub = pb_grpc.BalancerServiceStub(streams.enter_context(grpc.insecure_channel(balancer.address)))
        outboxes: list[SimpleQueue[pb.BalanceRequest | None]] = []

        def join(rank: int) -> Any:
            outboxes.append(outbox := SimpleQueue())
            outbox.put(pb.BalanceRequest(join=join_message(rank, world_size=3)))
            call = stub.Balance(iter(outbox.get, None))
            assert next(call).WhichOneof("response") == "joined"
            return call

        def states() -> list[tuple[str, list[int]]]:
            _, overview = get(f"http://127.0.0.1:{port.read_text().strip()}/v1/sessions")
            return [(row["state"], row["missing_ranks"]) for row in overview["sessions"]]

        calls = [join(0), join(2)]
        assert states() == [("joining", [1])]
        calls.append(join(1))
        assert states() == [("starting", [])]
        calls[1].cancel()  # as when its process is killed
        assert until(states, lambda found: found != [("starting", [])]) == [("missing ranks", [2])]
        calls.append(join(2))
        assert states() == [("starting", [])]
        for outbox in outboxes:
            outbox.put(None)


def test_events_are_whole_first_and_then_go_on_where_they_were(url: str) -> None:
    stream = events(f"{url}/v1/events?job=a-train")
    numbers: list[int] = []
    for _ in range(3):
        name, document = next(stream)
        assert name == "session"
        numbers += document["rounds"]["number"]
    stream.close()
    assert numbers == list(range(numbers[0], numbers[-1] + 1))  # none twice, none left out
    name, document = next(events(f"{url}/v1/events"))
    assert (name, [row["job"] for row in document["sessions"]]) == ("sessions", ["a-train"])


def test_what_is_not_there_is_said_by_name(url: str) -> None:
    status, problem = get(f"{url}/v1/session?job=b-train")
    assert (status, problem["status"]) == (404, 404)
    assert "b-train/default/train" in problem["detail"]
    assert get(f"{url}/v1/events?job=b-train")[0] == 404
    status, problem = get(f"{url}/v1/session")
    assert status == 400
    assert "?job=NAME" in problem["detail"]
    for wrong in ("&".join(f"a{number}=1" for number in range(99)), "job=" + "x" * 5000):
        status, problem = get(f"{url}/v1/session?{wrong}")
        assert status in (400, 404)
        assert len(problem["detail"]) < 400
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"{url}/page/../settings.py", timeout=SECONDS)
    for path, kind in (("/", "text/html"), ("/page/main.js", "text/javascript"), ("/metrics", "text/plain")):
        with urllib.request.urlopen(f"{url}{path}", timeout=SECONDS) as answer:
            assert answer.headers["Content-Type"].startswith(kind)


def tokens(path: Path, *jobs: str) -> None:
    entries = [{"name": "team-a", "sha256": hash_token(TOKEN), "jobs": list(jobs)}] if jobs else []
    part = path.with_suffix(".part")
    part.write_text(yaml.safe_dump({"tokens": entries}))
    part.replace(path)


def test_tokens_and_tls_are_those_of_the_balancer(tmp_path: Path) -> None:
    server = write_certificate(trustme.CA(), tmp_path, "server")
    known, port = tmp_path / "tokens.yml", tmp_path / "port"
    tokens(known, "a-*")
    with running_balancer(
        "--tls-certificate", str(server.certificate), "--tls-key", str(server.key), "--token-file", str(known),
        "--metrics-port", "0", "--metrics-port-file", str(port),
    ):  # fmt: skip
        place = f"127.0.0.1:{port.read_text().strip()}"
        trusting = ssl.create_default_context(cafile=str(server.ca))
        status, problem = get(f"https://{place}/v1/sessions", context=trusting)
        assert (status, "no token" in problem["detail"]) == (401, True)
        assert get(f"https://{place}/v1/sessions", "wrong", trusting)[0] == 401
        status, document = get(f"https://{place}/v1/sessions", TOKEN, trusting)
        assert (status, document["sessions"]) == (200, [])
        assert get(f"http://{place}/v1/sessions", TOKEN)[0] == 200  # forwarded to this machine
        for scheme, context in (("http", None), ("https", trusting)):  # scrapers and probes go on as they did
            with urllib.request.urlopen(f"{scheme}://{place}/readyz", timeout=SECONDS, context=context) as answer:
                assert answer.status == 200
            with urllib.request.urlopen(f"{scheme}://{place}/", timeout=SECONDS, context=context) as answer:
                assert b"Evenkeel balancer" in answer.read()
        stream = events(f"http://{place}/v1/events", TOKEN)
        assert next(stream)[0] == "sessions"
        tokens(known)  # withdrawn: what is open ends
        for _ in stream:
            pass
        until(lambda: get(f"http://{place}/v1/sessions", TOKEN)[0], lambda status: status == 401)


class _Views:
    """Two sessions, of which nothing but the names is asked."""

    def overview(self, allows: Any) -> dict[str, Any]:
        return {"sessions": [job for job in ("a-one", "b-two") if allows(job)]}


def site(tmp_path: Path, *, tls: bool, plaintext: bool = False, jobs: str = "") -> BalancerSite:
    files = write_certificate(trustme.CA(), tmp_path, "server") if tls else None
    store: Any = None
    if jobs:
        from services.security.tokens import TokenStore

        tokens(tmp_path / "tokens.yml", jobs)
        store = TokenStore(tmp_path / "tokens.yml", now=lambda: datetime.now(UTC))
    transport = Transport(
        certificate=files and files.certificate, key=files and files.key, allow_plaintext=plaintext
    )  # fmt: skip
    return BalancerSite(_Views(), transport=transport, tokens=store)  # type: ignore[arg-type]


def asked(target: str, peer: str = "192.0.2.7", *, secure: bool = False, token: str = "") -> Request:
    headers = {"host": "balancer:9101"} | ({"authorization": f"Bearer {token}"} if token else {})
    return Request(target=target, headers=headers, peer=peer, is_secure=secure)


def test_other_machines_are_told_nothing_in_plaintext(tmp_path: Path) -> None:
    behind = site(tmp_path, tls=True)
    page = behind.answer(asked("/?x"))
    assert page is not None
    assert (page.status, page.headers["Location"]) == (307, "https://balancer:9101/?x")
    for tls, plaintext in ((True, False), (True, True), (False, False)):
        found = site(tmp_path, tls=tls, plaintext=plaintext).answer(asked("/v1/sessions"))
        assert found is not None
        assert found.status == 403, (tls, plaintext)
        assert b"https://" in found.body or b"TLS_CERTIFICATE" in found.body
    for served, request in (
        (behind, asked("/v1/sessions", secure=True)),
        (behind, asked("/v1/sessions", peer="127.0.0.1")),
        (behind, asked("/v1/sessions", peer="::1")),
        (site(tmp_path, tls=False, plaintext=True), asked("/v1/sessions")),
    ):
        found = served.answer(request)
        assert found is not None
        assert found.status == 200


def test_a_token_shows_its_jobs_and_no_others(tmp_path: Path) -> None:
    found = site(tmp_path, tls=False, jobs="a-*").answer(asked("/v1/sessions", "127.0.0.1", token=TOKEN))
    assert found is not None
    assert json.loads(found.body) == {"sessions": ["a-one"]}


def test_who_asks_too_often_is_told_to_wait(tmp_path: Path) -> None:
    served = site(tmp_path, tls=False)
    statuses = {getattr(served.answer(asked("/v1/sessions", "127.0.0.1")), "status", 0) for _ in range(400)}
    assert statuses == {200, 429}
    other = served.answer(asked("/v1/sessions", "::1"))
    assert other is not None
    assert other.status == 200
