"""Credentials of a rank, and ranks that train behind TLS, a client certificate and a token."""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import trustme
import yaml

from benchmarks.harness.authorities import write_certificate
from benchmarks.harness.balancer_process import running_balancer, until_logged
from benchmarks.harness.ranks import run_ranks
from evenkeel.credentials import Credentials
from services.security.tokens import hash_token
from tests.trainer_client.balancing.jobs import SPEC, Job, connect, cost_of, make_batch
from trainer_client import BalancedLoader, BalanceOptions, Balancer

TOKEN = "t" * 43


def test_from_env(tmp_path: Path) -> None:
    assert Credentials.from_env({}) == Credentials()
    assert not Credentials.from_env({"EVENKEEL_TLS": "0"}).secure
    assert Credentials.from_env({"EVENKEEL_TLS": "1"}).secure
    named = Credentials.from_env({"EVENKEEL_TLS_CA": "/ca.pem", "EVENKEEL_TOKEN_FILE": " /token "})
    assert named == Credentials(ca=Path("/ca.pem"), token_file=Path("/token"))
    with pytest.raises(ValueError, match="EVENKEEL_TLS is 'maybe'"):
        Credentials.from_env({"EVENKEEL_TLS": "maybe"})
    with pytest.raises(ValueError, match="certificate is set and key is not"):
        Credentials.from_env({"EVENKEEL_TLS_CERTIFICATE": "/c.pem"})


@pytest.mark.parametrize("content", ["", "two words", "x" * 600, "é", f"{TOKEN}\n{TOKEN}"])
def test_files_that_hold_no_token(tmp_path: Path, content: str) -> None:
    file = tmp_path / "token"
    file.write_text(content)
    with pytest.raises(ValueError, match="does not hold one token") as caught:
        Credentials(token_file=file).check("127.0.0.1:1")
    assert TOKEN not in str(caught.value)


def test_a_token_is_not_sent_in_the_clear(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    credentials = Credentials(token_file=file)
    with pytest.raises(ValueError, match=r"balancer:50051 would send the token in the clear: set tls or ca"):
        Balancer.connect("balancer:50051", job="j", credentials=credentials)
    for address in ("127.0.0.1:1", "localhost:1", "[::1]:1"):
        assert credentials.metadata(address) == (("authorization", f"Bearer {TOKEN}"),)
    secure = Credentials(tls=True, token_file=file)
    assert secure.metadata("balancer:50051") == (("authorization", f"Bearer {TOKEN}"),)
    assert TOKEN not in repr(secure)
    with pytest.raises(ValueError, match=r"ca .*none.pem cannot be read"):
        Balancer.connect("balancer:50051", job="j", credentials=Credentials(ca=tmp_path / "none.pem"))


def batches_until(rank: int, over: Path) -> Iterator[dict[str, torch.Tensor]]:
    """Until a file is there, which ranks may see one step apart."""
    for step in itertools.count():
        if over.exists():
            return
        time.sleep(0.02)
        yield make_batch(rank, step, 8)


def train(rank: int, job: Job, environment: dict[str, str], over: Path | None = None) -> list[dict[str, Any]]:
    credentials = Credentials.from_env(environment)
    assert job.address is not None
    records, loaded = [], []

    def batches() -> Iterator[dict[str, torch.Tensor]]:
        for batch in job.batches(rank) if over is None else batches_until(rank, over):
            loaded.extend(batch["id"].tolist())
            yield batch

    with connect(job.address, job=job.name, options=job.options, credentials=credentials) as balancer:
        loader = BalancedLoader(batches(), balancer, cost=cost_of, spec=SPEC)
        for batch in loader:
            records.append({"ids": batch["id"].tolist(), "mode": loader.report.mode.value, "loaded": loaded})
    return records


def check_whole(results: list[list[dict[str, Any]]]) -> None:
    """Asserts that all ranks took the same steps alike, and that no sample was lost or doubled."""
    assert all(len({record["mode"] for record in step}) == 1 for step in zip(*results, strict=True))
    trained = sorted(sample for records in results for record in records for sample in record["ids"])
    assert trained == sorted(sample for records in results for sample in records[0]["loaded"])


def test_ranks_train_behind_tls_and_tokens(tmp_path: Path) -> None:
    """Also while the token is rotated: no call is refused."""
    authority = trustme.CA()
    server, client = (write_certificate(authority, tmp_path, name) for name in ("server", "client"))
    tokens, token, over = (tmp_path / name for name in ("tokens.yml", "token", "over"))

    def allow(*known: str) -> None:
        entries = [{"name": key[:4], "sha256": hash_token(key), "jobs": ["secured"]} for key in known]
        part = tokens.with_suffix(".part")
        part.write_text(yaml.safe_dump({"tokens": entries}))
        part.replace(tokens)

    allow(TOKEN)
    token.write_text(TOKEN)
    environment = {"EVENKEEL_TLS_CA": str(server.ca), "EVENKEEL_TLS_CERTIFICATE": str(client.certificate),
                   "EVENKEEL_TLS_KEY": str(client.key), "EVENKEEL_TOKEN_FILE": str(token)}  # fmt: skip

    def rotate() -> None:
        until_logged(balancer, "round planned")
        allow(TOKEN, "n" * 43)
        time.sleep(1.2)  # files are looked at once a second
        token.write_text("n" * 43)
        time.sleep(1.2)
        allow("n" * 43)
        time.sleep(1.2)
        over.touch()

    with running_balancer(
        "--tls-certificate", str(server.certificate), "--tls-key", str(server.key), "--tls-client-ca", str(server.ca),
        "--token-file", str(tokens), "--log-level", "debug",
    ) as balancer:  # fmt: skip
        job = Job(steps=(0, 0), name="secured", address=f"localhost:{balancer.port}")
        rotation = threading.Thread(target=rotate)
        rotation.start()
        results = run_ranks(2, train, job, environment, over)
        rotation.join()
        check_whole(results)
        assert "call failed" not in balancer.log
        modes = [record["mode"] for record in results[0]]
        assert modes.count("service") > 30
        assert modes[-1] == "service"
        options = BalanceOptions(timeout=timedelta(seconds=2))  # it is never served
        wrong = Job(steps=(4, 4), name="another", address=job.address, options=options)
        results = run_ranks(2, train, wrong, environment)
        check_whole(results)
        assert {record["mode"] for record in results[0]} == {"embedded"}
        until_logged(balancer, "PERMISSION_DENIED")
        with socket.create_connection(("127.0.0.1", balancer.port), 60) as stranger:  # no TLS: gRPC's core complains
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            with contextlib.suppress(OSError):
                assert stranger.recv(4096) is not None
        assert balancer.stop() == 0
        log = balancer.log
    lines = [json.loads(line) for line in log.splitlines()]
    life = ["serving", "draining", "stopped"]
    assert [line["event"] for line in lines if line["event"] in life] == life
    assert {line["job"] for line in lines if line["event"] == "round planned"} == {"secured"}
    for secret in (TOKEN, hash_token(TOKEN), "PRIVATE KEY"):
        assert secret not in log
