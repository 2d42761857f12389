"""What `evenkeel doctor` checks on the way to the balancers, step by step: the first that fails is the culprit."""

from __future__ import annotations

import json
import socket
import ssl
import statistics
import time
from dataclasses import replace
from pathlib import Path

import grpc

from evenkeel import __version__
from evenkeel.addresses import Endpoint, endpoints
from evenkeel.credentials import Credentials, read_credentials
from evenkeel.handshakes import shake_hands
from evenkeel.protocol import balancer_pb2 as pb
from trainer_client.cli.calls import Calls, connected, explain, home_of, read_address
from trainer_client.cli.doctor import Finding, Status

PROTOCOL_VERSION = 1
_ROUND_TRIPS = 20
_DAY = 86_400.0
_SLOW_SECONDS = 0.05


def check_balancers(
    balancer: str, job: str | None, ca: Path | None, token_file: Path | None, timeout: float
) -> list[Finding]:
    """Each balancer behind an address, and to which of them a job belongs."""
    try:
        address = read_address(balancer)
        credentials = read_credentials(ca, token_file)
        places = endpoints(address)
        for place in places:
            credentials.check(str(place))
    except ValueError as error:
        return [Finding("settings", Status.FAIL, str(error), "set it as the message says")]
    except OSError as error:
        return [Finding("address", Status.FAIL, f"{address} has no address: {error}", "check the name and the DNS")]
    findings, instances = list[Finding](), dict[int, str]()
    for place in places:
        found, instance = _check_one(place, credentials, timeout)
        if instance is not None:
            instances[instance] = str(place)
        # Of several balancers each finding tells whose it is.
        findings += [replace(each, check=f"{each.check} {place}") for each in found] if len(places) > 1 else found
    if job and instances:
        findings.append(_find_home(address, job, instances, credentials, timeout))
    return findings


def _check_one(place: Endpoint, credentials: Credentials, timeout: float) -> tuple[list[Finding], int | None]:
    """Network, TLS, health, token, versions and round trip, as far as one depends on the other; and the instance."""
    findings: list[Finding] = []
    for check in (_reach, _handshake):
        findings.append(check(place, credentials, timeout))
        if findings[-1].status == Status.FAIL:
            return findings, None
    with connected(place, credentials, timeout) as calls:
        try:
            healthy = calls.healthy()
        except grpc.RpcError as error:
            text = explain(error)
            return [*findings, Finding("health", Status.FAIL, text, "it is no balancer: check the port")], None
        if healthy:
            findings.append(Finding("health", Status.OK, "serving"))
        else:
            findings.append(Finding("health", Status.WARN, "not serving", "it starts or drains: try again in a while"))
        versions, instance = _versions(calls, credentials)
        return findings + versions, instance


def _find_home(address: str, job: str, instances: dict[int, str], credentials: Credentials, timeout: float) -> Finding:
    try:
        home = instances.get(home_of(address, job, credentials, timeout))
    except (grpc.RpcError, ValueError) as error:
        text = explain(error) if isinstance(error, grpc.RpcError) else str(error)
        return Finding("job", Status.FAIL, f"{job}: {text}", "see the findings above")
    if home is None:
        return Finding("job", Status.WARN, f"{job} belongs to a balancer that was not there a moment ago", "try again")
    return Finding("job", Status.OK, f"{job} belongs to the balancer at {home}")


def _reach(place: Endpoint, _credentials: Credentials, timeout: float) -> Finding:
    host, port = place.host, place.port
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        return Finding("address", Status.FAIL, f"{host} has no address: {error}", "check the name and the DNS")
    started = time.perf_counter()
    try:
        with socket.create_connection((host, port), timeout):
            pass
    except TimeoutError:
        return Finding("address", Status.FAIL, f"{host}:{port} does not answer within {timeout:g} s",
                       "a firewall or network policy drops the packets: open the port")  # fmt: skip
    except OSError as error:
        return Finding("address", Status.FAIL, f"{host}:{port}: {error.strerror or error}",
                       "nobody listens there: start the balancer, or correct the port")  # fmt: skip
    taken = time.perf_counter() - started
    return Finding("address", Status.OK, f"{found[0][4][0]}:{port}, connected in {taken * 1e3:.1f} ms")


def _handshake(place: Endpoint, credentials: Credentials, timeout: float) -> Finding:
    try:
        found = shake_hands(place, credentials, timeout)
    except OSError as error:
        return Finding("TLS", Status.FAIL, str(error), "try again: it answered a moment ago")
    if found.problem:
        return Finding("TLS", Status.FAIL, found.problem, found.remedy)
    if not found.version:
        return Finding("TLS", Status.SKIP, "plaintext", "set EVENKEEL_TLS_CA where others share the network")
    left = (ssl.cert_time_to_seconds(str(found.certificate["notAfter"])) - time.time()) / _DAY
    if left < 14:
        return Finding("TLS", Status.WARN, f"{found.version}; the certificate expires in {left:.1f} days", "renew it")
    return Finding("TLS", Status.OK, f"{found.version}; the certificate holds for {left:.0f} days")


def _versions(calls: Calls, credentials: Credentials) -> tuple[list[Finding], int | None]:
    try:
        info = calls.call("GetServerInfo", pb.GetServerInfoRequest())
        times = []
        for _ in range(_ROUND_TRIPS):
            started = time.perf_counter()
            calls.call("GetServerInfo", pb.GetServerInfoRequest())
            times.append(time.perf_counter() - started)
    except grpc.RpcError as error:
        denied = isinstance(error, grpc.Call) and error.code() == grpc.StatusCode.UNAUTHENTICATED
        remedy = "set EVENKEEL_TOKEN_FILE to a file with a token of this balancer" if denied else "see its log"
        return [Finding("token" if denied else "call", Status.FAIL, explain(error), remedy)], None
    findings = [Finding("token", Status.OK, "accepted" if credentials.token_file else "none needed")]
    spoken = ", ".join(map(str, info.protocol_versions))
    text = (
        f"balancer {info.server_version} speaks protocol {spoken}; this is {__version__}, protocol {PROTOCOL_VERSION}"
    )
    if PROTOCOL_VERSION in info.protocol_versions:
        findings.append(Finding("versions", Status.OK, text))
    else:
        findings.append(Finding("versions", Status.FAIL, text, "upgrade whichever is older"))
    if info.draining:
        findings.append(Finding("draining", Status.WARN, "the balancer shuts down", "use another, or wait"))
    middle = statistics.median(times)
    slow = middle > _SLOW_SECONDS
    findings.append(Finding("round trip", Status.WARN if slow else Status.OK,
                            f"{middle * 1e3:.2f} ms, worst of {_ROUND_TRIPS} {max(times) * 1e3:.2f} ms",
                            "run the balancer nearer to the job, or give it cores" if slow else ""))  # fmt: skip
    limits = json.dumps({field.name: getattr(info.limits, field.name) for field in info.limits.DESCRIPTOR.fields})
    findings.append(Finding("balancer", Status.OK, f"{info.sessions} sessions, {info.streams} streams; {limits}"))
    return findings, int(info.instance)
