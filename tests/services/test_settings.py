"""Settings of the services, and what operators get wrong: it works, or a sentence says what to do."""

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
from services.balancer.settings import load_settings
from services.operations.settings import ServiceSettings, load
from services.planner.settings import Settings as PlannerSettings
from services.security.rates import network_of
from services.security.transport import Transport
from tests.services.balancer.calls import Lead

PREFIX = "EVENKEEL_BALANCER_"


def test_flags_go_before_environment_before_file_before_defaults(tmp_path: Path) -> None:
    path, toml = tmp_path / "balancer.yaml", tmp_path / "balancer.toml"
    path.write_text("port: 1001\nworkers: 3\nmax_ranks: 77\nhost: 0.0.0.0\n")
    environment = {f"{PREFIX}PORT": "1002", f"{PREFIX}WORKERS": "2"}
    settings = load_settings(["--config", str(path), "--port", "1003", "--reflection", "true"], environment)
    assert (settings.port, settings.workers, settings.max_ranks, settings.host) == (1003, 2, 77, "0.0.0.0")
    assert settings.max_samples == BalancerSettings.model_fields["max_samples"].default
    assert settings.limits().max_ranks == 77
    toml.write_text('grace_seconds = 7.5\nlog_level = "debug"\n')
    settings = load_settings([], {f"{PREFIX}CONFIG": str(toml)})
    assert (settings.grace_seconds, settings.log_level, settings.host) == (7.5, "debug", "127.0.0.1")


def test_other_variables_of_the_prefix_are_no_settings() -> None:
    """Those of clients, and what Kubernetes makes for a service of this name."""
    links = {"SERVICE_HOST": "10.0.0.9", "SERVICE_PORT_GRPC": "50051", "PORT": "tcp://10.0.0.9:50051",
             "PORT_50051_TCP_PROTO": "tcp", "PORT_50051_TCP_ADDR": "10.0.0.9", "MAX_RANKS": "7"}  # fmt: skip
    settings = load_settings([], {PREFIX + name: value for name, value in links.items()} | {"EVENKEEL_BALANCER": "b:1"})
    assert (settings.port, settings.max_ranks) == (50051, 7)


@pytest.mark.parametrize(
    ("flags", "environment", "message"),
    [
        ([], {"TOKEN_FIL": "/run/tokens.yml"}, r"TOKEN_FIL is set.* EVENKEEL_BALANCER_TOKEN_FILE"),
        ([], {"XYZZY": "1"}, "--help"),
        ([], {"PORT": "abc"}, r"^EVENKEEL_BALANCER_PORT is 'abc': .*integer"),
        (["--max-ranks", "0"], {"MAX_RANKS": "5"}, r"^--max-ranks is '0': .*greater than 0$"),
        (["--config=/absent.yaml"], {}, r"absent\.yaml"),
        (["--config=/dev/null"], {}, "no file|must end in"),
    ],
)
def test_a_wrong_setting_is_named_as_it_was_written(
    flags: list[str], environment: dict[str, str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load_settings(flags, {PREFIX + name: value for name, value in environment.items()})


@pytest.mark.parametrize("text", ["prot: 1\n", "port: 99999\n", "max_ranks: [", "- 1", "1: 2"])
def test_a_wrong_file_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "balancer.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"balancer\.yaml|prot|port"):
        load_settings([], {f"{PREFIX}CONFIG": str(path)})


@pytest.mark.parametrize(("prefix", "kind"), [(PREFIX, BalancerSettings), ("EVENKEEL_PLANNER_", PlannerSettings)])
def test_addresses_and_empty_variables_of_both_services(prefix: str, kind: type[ServiceSettings]) -> None:
    for name, value, said in (
        ("TOKEN_FILE", "", "TOKEN_FILE is set and empty; give it a value, or unset it"),
        ("TLS_CERTIFICATE", " ", "TLS_CERTIFICATE is set and empty"),
        ("HOST", "http://127.0.0.1", "HOST is 'http://127.0.0.1': it must be an address or a name alone"),
        ("METRICS_HOST", "host/path", "METRICS_HOST is 'host/path': it must be"),
    ):
        with pytest.raises(ValueError, match="^" + prefix + said):
            load(kind, "service", [], {prefix + name: value})
    for given, bare in (("[::1]", "::1"), ("::", "::"), ("fe80::1%eth0", "fe80::1%eth0"), ("balancer", "balancer")):
        assert load(kind, "service", [], {prefix + "HOST": given}).host == bare


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.8.8.8", True), ("::1", True), ("[::1]", True), ("localhost", True), ("0.0.0.0", False), ("[::]", False),
     ("balancer.internal", False), ("", False)],
)  # fmt: skip
def test_plaintext_beyond_this_machine_must_be_asked_for(host: str, loopback: bool) -> None:
    Transport(allow_plaintext=True).check(host, prefix="X_")
    if loopback:
        Transport().check(host, prefix="X_")
        return
    with pytest.raises(ValueError, match=r"set X_TLS_CERTIFICATE and X_TLS_KEY.*X_ALLOW_PLAINTEXT=true"):
        Transport().check(host, prefix="X_")


def test_tls_files_that_do_not_fit_are_named(tmp_path: Path) -> None:
    ca = trustme.CA()
    files, other = write_certificate(ca, tmp_path, "one"), write_certificate(trustme.CA(), tmp_path, "two")
    past = datetime.datetime.now(datetime.UTC).replace(tzinfo=None) - datetime.timedelta(days=1)
    old = write_certificate(ca, tmp_path, "old", expires=past)
    (tmp_path / "empty").touch()
    Transport(certificate=files.certificate, key=files.key, client_ca=files.ca).check("0.0.0.0", prefix="X_")
    for wrong, message in (
        (Transport(certificate=files.certificate), "tls_certificate is set and tls_key is not"),
        (Transport(key=files.key), "tls_key is set and tls_certificate is not"),
        (Transport(client_ca=files.ca), "tls_client_ca is set without tls_certificate"),
        (Transport(certificate=files.certificate, key=other.key), "cannot be used together"),
        (Transport(certificate=files.ca, key=tmp_path / "none.pem"), "none.pem cannot be read"),
        (Transport(certificate=tmp_path / "empty", key=files.key), "not both hold what they should, in PEM"),
        (Transport(certificate=files.certificate, key=files.key, client_ca=files.key), "tls_client_ca .* cannot be"),
        (Transport(certificate=old.certificate, key=old.key), r"tls_certificate .*old\.pem has expired; renew it"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong.check("0.0.0.0", prefix="X_")
    with pytest.raises(ValueError, match="has expired"):  # nor as a renewal
        Transport(certificate=old.certificate, key=old.key).read()


@pytest.mark.parametrize(
    ("peer", "network"),
    [("ipv4:192.0.2.1:5000", "192.0.2.1"), ("ipv6:%5B2001:db8:1:2:3:4:5:6%5D:5000", "2001:db8:1:2::/64"),
     ("2001:db8:1:2::9", "2001:db8:1:2::/64"), ("ipv6:%5B::ffff:192.0.2.1%5D:80", "192.0.2.1"),
     ("ipv6:%5Bfe80::1%25eth0%5D:80", "fe80::/64"), ("unix:/run/evenkeel.sock", "unix"), ("unknown", "unknown")],
)  # fmt: skip
def test_an_address_counts_as_its_network(peer: str, network: str) -> None:
    assert network_of(peer) == network


@pytest.mark.timeout(400)
def test_what_cannot_be_had_ends_the_start_in_a_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for service, flags, status, message in (
            ("balancer", ("--metrics-port", port), 1, f"cannot listen on 127.0.0.1:{port} for metrics"),
            (
                "balancer",
                ("--port-file", f"{tmp_path}/no/port"),
                1,
                f"the port cannot be written to {tmp_path}/no/port",
            ),
            ("balancer", ("--host", "0.0.0.0"), 2, "EVENKEEL_BALANCER_ALLOW_PLAINTEXT=true"),
            ("planner", ("--host", "0.0.0.0"), 2, "EVENKEEL_PLANNER_ALLOW_PLAINTEXT=true"),
            ("planner", ("--workers", "-4"), 2, "--workers is '-4'"),
            ("planner", ("--token-file", "/no/tokens.yml"), 2, "token file /no/tokens.yml cannot be read"),
        ):
            done = zygote.run(f"services.{service}", "--port", "0", *flags, timeout=240)
            assert done.returncode == status, done.stderr
            assert message in done.stderr
            assert "Traceback" not in done.stderr


def test_ipv6_is_listened_on_as_it_is_written_and_sighup_changes_nothing() -> None:
    with running_balancer("--host", "::1", "--metrics-host", "::1", "--metrics-port", "0") as balancer:
        metrics = int(until_logged(balancer, '"metrics_port": ').split('"metrics_port": ')[1].split(",")[0])
        socket.create_connection(("::1", metrics), timeout=60).close()
        balancer.signal(signal.SIGHUP)
        until_logged(balancer, "SIGHUP changes nothing")
        with grpc.insecure_channel(f"[::1]:{balancer.port}") as channel:
            assert not Lead(channel).info().draining
        assert balancer.stop() == 0
