"""What `evenkeel doctor` checks on the way to the balancers, step by step: the first that fails is the culprit."""

from __future__ import annotations

import json
import socket
import ssl
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc

from evenkeel import __version__
from evenkeel.addresses import Endpoint, check_address, endpoints
from evenkeel.credentials import Credentials, read_credentials
from evenkeel.handshakes import shake_hands
from evenkeel.protocol import balancer_pb2 as pb
from trainer_client.cli.doctor import Finding, Status

_SERVICE = pb.DESCRIPTOR.services_by_name["BalancerService"].full_name
_ROUND_TRIPS = 20
_DAY = 86_400.0
_SLOW_SECONDS = 0.05


def check_balancers(
    balancer: str, job: str | None, ca: Path | None, token_file: Path | None, timeout: float
) -> list[Finding]:
    """Each balancer behind an address; with a job, whether the token is for it."""
    try:
        address = check_address(balancer)
        credentials = read_credentials(ca, token_file)
        replicas = endpoints(address)
        for replica in replicas:
            credentials.check(str(replica))
    except ValueError as error:
        return [Finding("settings", Status.FAIL, str(error), "set it as the message says")]
    except OSError as error:
        return [Finding("address", Status.FAIL, f"{address} has no address: {error}", "check the name and the DNS")]
    findings = list[Finding]()
    for replica in replicas:
        found = list(_check_replica(replica, job, credentials, timeout))
        # Of several balancers each finding tells whose it is.
        findings += [replace(each, check=f"{each.check} {replica}") for each in found] if len(replicas) > 1 else found
    return findings


def _check_replica(replica: Endpoint, job: str | None, credentials: Credentials, timeout: float) -> Iterator[Finding]:
    """Network, TLS, health, token, versions, round trip and job, as far as one depends on the other."""
    for check in (_reach, _handshake):
        finding = check(replica, credentials, timeout)
        yield finding
        if finding.status == Status.FAIL:
            return
    with _Calls.opened(replica, credentials, timeout) as calls:
        try:
            healthy = calls.healthy()
        except grpc.RpcError as error:
            yield Finding("health", Status.FAIL, _explain(error), "it is no balancer: check the port")
            return
        if healthy:
            yield Finding("health", Status.OK, "serving")
        else:
            yield Finding("health", Status.WARN, "not serving", "it starts or drains: try again in a while")
        yield from _check_calls(calls, credentials, job)


def _reach(replica: Endpoint, _credentials: Credentials, timeout: float) -> Finding:
    host, port = replica.host, replica.port
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


def _handshake(replica: Endpoint, credentials: Credentials, timeout: float) -> Finding:
    try:
        found = shake_hands(replica, credentials, timeout)
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


def _check_calls(calls: _Calls, credentials: Credentials, job: str | None) -> Iterator[Finding]:
    try:
        info, times = calls.server_info(), []
        for _ in range(_ROUND_TRIPS):
            started = time.perf_counter()
            calls.server_info()
            times.append(time.perf_counter() - started)
    except grpc.RpcError as error:
        yield _of_failed_call(error)
        return
    yield Finding("token", Status.OK, "accepted" if credentials.token_file else "none needed")
    yield Finding("versions", Status.OK, f"balancer {info.server_version}, this is {__version__}; both speak v2")
    if info.draining:
        yield Finding("draining", Status.WARN, "the balancer shuts down", "use another, or wait")
    middle = statistics.median(times)
    slow = middle > _SLOW_SECONDS
    yield Finding("round trip", Status.WARN if slow else Status.OK,
                  f"{middle * 1e3:.2f} ms, worst of {_ROUND_TRIPS} {max(times) * 1e3:.2f} ms",
                  "run the balancer nearer to the job, or give it cores" if slow else "")  # fmt: skip
    limits = {field.name: getattr(info.limits, field.name) for field in info.limits.DESCRIPTOR.fields}
    yield Finding("limits", Status.OK, json.dumps(limits))
    if job is not None:
        refusal = calls.refusal_of(job)
        if refusal is None:
            yield Finding("job", Status.OK, f"{job} may be planned here")
        else:
            yield Finding("job", Status.FAIL, f"{job}: {_explain(refusal)}", "use a token whose jobs include it")


def _of_failed_call(error: grpc.RpcError) -> Finding:
    code = error.code() if isinstance(error, grpc.Call) else None
    if code == grpc.StatusCode.UNAUTHENTICATED:
        remedy = "set EVENKEEL_TOKEN_FILE to a file with a token of this balancer"
        return Finding("token", Status.FAIL, _explain(error), remedy)
    if code == grpc.StatusCode.UNIMPLEMENTED:
        text = f"the balancer does not speak {_SERVICE}, which evenkeel {__version__} needs"
        return Finding("versions", Status.FAIL, text, "run a balancer of the same version")
    return Finding("call", Status.FAIL, _explain(error), "see its log")


class _Calls:
    """Calls to one replica."""

    def __init__(self, channel: grpc.Channel, metadata: tuple[tuple[str, str], ...], timeout: float) -> None:
        # Health has two fields and needs no stubs of its own: an empty request asks for the whole server.
        self._health: Any = channel.unary_unary("/grpc.health.v1.Health/Check", bytes, bytes)
        self._info: Any = channel.unary_unary(
            f"/{_SERVICE}/GetServerInfo",
            pb.GetServerInfoRequest.SerializeToString,
            pb.GetServerInfoResponse.FromString,
        )
        self._plan: Any = channel.unary_unary(f"/{_SERVICE}/PlanRound")
        self._metadata, self._timeout = metadata, timeout

    @classmethod
    @contextmanager
    def opened(cls, replica: Endpoint, credentials: Credentials, timeout: float) -> Iterator[_Calls]:
        options: list[tuple[str, Any]] = [("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1)]
        if replica.server_name != replica.host:  # one address of a name, which is what its certificate holds
            options.append(("grpc.default_authority", replica.server_name))
            options.append(("grpc.ssl_target_name_override", replica.server_name))
        with credentials.channel(str(replica), options) as channel:
            yield cls(channel, credentials.metadata(str(replica)), timeout)

    def healthy(self) -> bool:
        """Whether the balancer reports SERVING."""
        return bool(self._health(b"", timeout=self._timeout) == b"\x08\x01")

    def server_info(self) -> Any:
        return self._info(pb.GetServerInfoRequest(), timeout=self._timeout, metadata=self._metadata)

    def refusal_of(self, job: str) -> grpc.RpcError | None:
        """Why the job's rounds would be refused: an empty request gets as far as its body if they would not be."""
        try:
            self._plan(b"", timeout=self._timeout, metadata=(*self._metadata, ("evenkeel-job", quote(job))))
        except grpc.RpcError as error:
            admitted = isinstance(error, grpc.Call) and "job is empty" in (error.details() or "")
            return None if admitted else error
        return None


def _explain(error: grpc.RpcError) -> str:
    """The status of a failed call in one line."""
    return f"{error.code().name}: {error.details()}" if isinstance(error, grpc.Call) else str(error)
