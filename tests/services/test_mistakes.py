"""What operators get wrong: it ends with something that works, or a sentence that says what is missing."""

from __future__ import annotations

import datetime
import signal
import socket
from pathlib import Path

import grpc
import pytest
import trustme

from benchmarks.harness import zygote
from benchmarks.harness.authorities import write_certificate
from benchmarks.harness.balancer_process import running_balancer, until_logged
from services.balancer.settings import Settings as BalancerSettings
from services.operations.settings import ServiceSettings, load
from services.planner.settings import Settings as PlannerSettings
from services.security.tokens import TokenStore
from services.security.transport import Transport
from tests.services.balancer.calls import Lead


@pytest.mark.parametrize(
    ("prefix", "kind"), [("EVENKEEL_BALANCER_", BalancerSettings), ("EVENKEEL_PLANNER_", PlannerSettings)]
)
def test_wrong_variables_are_named_with_what_to_do(prefix: str, kind: type[ServiceSettings]) -> None:
    for name, value, said in (
        ("TOKEN_FILE", "", "TOKEN_FILE is set and empty; give it a value, or unset it"),
        ("TLS_CERTIFICATE", " ", "TLS_CERTIFICATE is set and empty"),
        ("HOST", "http://127.0.0.1", "HOST is 'http://127.0.0.1': it must be an address or a name alone"),
        ("HOST", "127.0.0.1:50051", "HOST is '127.0.0.1:50051': it must be an address or a name alone"),
        ("METRICS_HOST", "host/path", "METRICS_HOST is 'host/path': it must be"),
    ):
        with pytest.raises(ValueError, match="^" + prefix + said):
            load(kind, "service", [], {prefix + name: value})
    for given, bare in (("[::1]", "::1"), ("::", "::"), ("fe80::1%eth0", "fe80::1%eth0"), ("balancer", "balancer")):
        assert load(kind, "service", [], {prefix + "HOST": given}).host == bare


def test_ipv6_addresses_are_listened_on_as_they_are_written() -> None:
    with running_balancer("--host", "::1", "--metrics-host", "::1", "--metrics-port", "0") as balancer:
        with grpc.insecure_channel(f"[::1]:{balancer.port}") as channel:
            assert Lead(channel).info().instance
        metrics = int(until_logged(balancer, '"metrics_port": ').split('"metrics_port": ')[1].split(",")[0])
        socket.create_connection(("::1", metrics), timeout=60).close()


def test_an_expired_certificate_is_refused_also_as_a_renewal(tmp_path: Path) -> None:
    now = datetime.datetime.now(datetime.UTC).replace(tzinfo=None)
    ca = trustme.CA()
    good = write_certificate(ca, tmp_path, "good")
    Transport(certificate=good.certificate, key=good.key, client_ca=good.ca).check("0.0.0.0", prefix="X_")
    old = write_certificate(ca, tmp_path, "old", expires=now - datetime.timedelta(days=1))
    transport = Transport(certificate=old.certificate, key=old.key, client_ca=old.ca)
    for call in (lambda: transport.check("0.0.0.0", prefix="X_"), transport.read):
        with pytest.raises(ValueError, match=r"tls_certificate .*old\.pem has expired; renew it"):
            call()


def test_files_that_are_missing_or_empty_are_named(tmp_path: Path) -> None:
    files = write_certificate(trustme.CA(), tmp_path, "one")
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match=r"not both hold what they should, in PEM"):
        Transport(certificate=tmp_path / "empty", key=files.key).check("0.0.0.0", prefix="X_")
    with pytest.raises(ValueError, match=r"none cannot be read: No such file or directory"):
        TokenStore(tmp_path / "none")


def test_what_cannot_be_had_ends_the_start_in_a_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = zygote.run("services.balancer", "--port", "0", "--metrics-port", port, timeout=240)
        assert done.returncode == 1
        assert f"cannot listen on 127.0.0.1:{port} for metrics" in done.stderr
        assert "Traceback" not in done.stderr
    done = zygote.run("services.balancer", "--port", "0", "--port-file", str(tmp_path / "no/port"), timeout=240)
    assert done.returncode == 1
    assert f"the port cannot be written to {tmp_path}/no/port: No such file or directory" in done.stderr


def test_sighup_changes_nothing_and_says_so() -> None:
    with running_balancer() as balancer:
        balancer.signal(signal.SIGHUP)
        until_logged(balancer, "SIGHUP changes nothing")
        until_logged(balancer, "certificates and tokens are followed by themselves")
        with grpc.insecure_channel(balancer.address) as channel:
            assert not Lead(channel).info().draining
        assert balancer.stop() == 0
