"""Causes that do not pass by themselves: told once, by name, on rank 0 and in the log of the service."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import trustme
import yaml
from trainer_client.balancing.service.outages import of_refusal
from trainer_client.balancing.telling import ServiceRequiredError

from benchmarks.harness.authorities import Files, write_certificate
from benchmarks.harness.balancer_process import ServiceProcess, running_balancer, until_logged
from benchmarks.harness.ranks import run_ranks
from evenkeel.protocol import balancer_pb2 as pb
from services.security.tokens import hash_token
from tests.trainer_client.balancing.jobs import SPEC, cost_of, make_batch
from trainer_client import BalancedLoader, BalanceOptions, Balancer
from trainer_client.balancing import telling

TOKEN = "t" * 43


@dataclass
class Secured:
    """A balancer with TLS and tokens, and what its clients need.

    Attributes:
        process: The balancer.
        environment: That of a rank with everything right.
        strange_ca: An authority that the balancer's certificate is not of.
    """

    process: ServiceProcess
    environment: dict[str, str]
    strange_ca: Path

    @property
    def address(self) -> str:
        return f"localhost:{self.process.port}"


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("secured")
    (folder / "strange").mkdir()
    server: Files = write_certificate(trustme.CA(), folder, "server")
    stranger: Files = write_certificate(trustme.CA(), folder / "strange", "stranger")
    tokens, token = folder / "tokens.yml", folder / "token"
    tokens.write_text(yaml.safe_dump({"tokens": [{"name": "me", "sha256": hash_token(TOKEN), "jobs": ["mine-*"]}]}))
    token.write_text(TOKEN)
    environment = {"EVENKEEL_TLS_CA": str(server.ca), "EVENKEEL_TOKEN_FILE": str(token)}
    flags = ("--tls-certificate", str(server.certificate), "--tls-key", str(server.key), "--token-file", str(tokens))
    with running_balancer(*flags) as process:
        yield Secured(process, environment, stranger.ca)


class Kept(logging.Handler):
    """Errors and warnings of this rank."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.errors: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR:
            self.errors.append(record.getMessage())


def train(rank: int, address: str, environments: list[dict[str, str]], job: str, options: BalanceOptions) -> Any:
    """The modes of a rank's steps and its errors, with the environment that it finds itself in."""
    os.environ.update(environments[rank])
    kept = Kept()
    logging.getLogger("trainer_client").addHandler(kept)
    batches = [make_batch(rank, step, 5) for step in range(12)]
    if "EVENKEEL_JOB" in os.environ:
        made = Balancer.from_env(options=options)
    else:
        made = Balancer.connect(address, job=job, options=options)
    with made as balancer:
        loader = BalancedLoader(batches, balancer, cost=cost_of, spec=SPEC)
        modes = {loader.report.mode.value for _ in loader}
    return modes, kept.errors


def test_connect_takes_credentials_from_the_environment(secured: Secured) -> None:
    options = BalanceOptions(require_service=True)
    for modes, errors in run_ranks(2, train, secured.address, [secured.environment] * 2, "mine-1", options):
        assert modes == {"service"}
        assert errors == []


def test_a_rank_that_learns_of_the_balancer_from_rank_0_takes_its_own_credentials(secured: Secured) -> None:
    options = BalanceOptions(require_service=True)
    other = {**secured.environment, "EVENKEEL_JOB": "mine-7"}
    first = {**other, "EVENKEEL_BALANCER": secured.address}
    for modes, errors in run_ranks(2, train, "", [first, other], "", options):
        assert modes == {"service"}
        assert errors == []


@pytest.mark.parametrize(
    ("change", "job", "strategy", "told", "logged"),
    [
        ({"EVENKEEL_TLS_CA": "", "EVENKEEL_TOKEN_FILE": ""}, "mine-2", "lpt",
         "(certificates: localhost:PORT: the balancer speaks TLS, and this client plaintext; set EVENKEEL_TLS_CA", ""),
        ({"EVENKEEL_TLS_CA": "STRANGE"}, "mine-3", "lpt",
         "(certificates: localhost:PORT: the certificate does not hold: unable to get local issuer certificate", ""),
        ({"EVENKEEL_TOKEN_FILE": ""}, "mine-4", "lpt",
         "(authentication: no token: send 'authorization: Bearer TOKEN'; set EVENKEEL_TOKEN_FILE to", "call refused"),
        ({"EVENKEEL_TOKEN_FILE": "", "EVENKEEL_TOKENFILE": "/run/token"}, "mine-6", "lpt",
         "(authentication: no token: send 'authorization: Bearer TOKEN'; EVENKEEL_TOKENFILE is set", "call refused"),
        ({}, "yours", "lpt", "(authentication: ", "call refused"),
        ({}, "mine-5", "nope", "(strategy: options.strategy is 'nope'; use", "options.strategy"),
    ],
)  # fmt: skip
def test_what_waiting_does_not_mend_is_told_once(
    secured: Secured, change: dict[str, str], job: str, strategy: str, told: str, logged: str
) -> None:
    """On rank 1 alone where it is of a rank's environment."""
    change = {name: value.replace("STRANGE", str(secured.strange_ca)) for name, value in change.items()}
    environments = [secured.environment, {**secured.environment, **change}]
    whose = "rank 1 " if change else "ranks 0, 1 "
    told = whose + told.replace("PORT", str(secured.process.port))
    options = BalanceOptions(strategy=strategy, fallback="identity", timeout=timedelta(seconds=1))
    before = secured.process.log
    (modes, errors), (other_modes, other_errors) = run_ranks(2, train, secured.address, environments, job, options)
    assert modes == other_modes == {"identity"}
    assert len(errors) == 1
    assert told in errors[0]
    assert "waiting will not bring the balancer to" in errors[0]
    assert other_errors == []
    if logged:
        until_logged(secured.process, logged, before.count(logged) + 1)
    assert TOKEN not in secured.process.log
    required = BalanceOptions(strategy=strategy, require_service=True)
    for error in run_ranks(2, train, secured.address, environments, job, required, check=False):
        assert isinstance(error, ServiceRequiredError)
        assert told in str(error)


def without_anybody(rank: int, port: int) -> Any:
    telling.START_SECONDS = 1.0
    kept = Kept()
    logging.getLogger("trainer_client").addHandler(kept)
    found = []
    for required in (False, True):
        options = BalanceOptions(require_service=required)
        with Balancer.connect(f"127.0.0.1:{port}", job="outage", options=options) as balancer:
            loader = BalancedLoader([make_batch(rank, 0, 5)], balancer, cost=cost_of, spec=SPEC)
            try:
                found.append(str([loader.report.mode.value for _ in loader]))
            except ServiceRequiredError as error:
                found.append(str(error))
    return found, kept.errors


def test_an_outage_is_none_of_them() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        results = run_ranks(2, without_anybody, nobody.getsockname()[1])
    for found, errors in results:
        assert errors == []
        assert found[0] == "['embedded']"
        assert "ranks 0, 1 did not come to the balancer within 1 s: " in found[1]


def test_refusals_that_pass_are_no_causes() -> None:
    kinds = {pb.ERROR_CODE_VERSION: "protocol versions", pb.ERROR_CODE_RANKS_DIFFER: "ranks that differ"}
    for code, kind in kinds.items():
        cause = of_refusal(pb.Error(code=code, message="why"))
        assert cause is not None
        assert str(cause) == f"{kind}: why"
    for code in (pb.ERROR_CODE_DRAINING, pb.ERROR_CODE_JOB_NAME_TAKEN, pb.ERROR_CODE_LIMIT_EXCEEDED):
        assert of_refusal(pb.Error(code=code, message="why")) is None
    taken_over = pb.Error(code=pb.ERROR_CODE_SUPERSEDED, field="run_id", message="gone past its expiry")
    assert of_refusal(taken_over) is None  # the name may be free again
