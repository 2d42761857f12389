"""What `evenkeel doctor` checks on the way to the balancers, step by step: the first that fails is the culprit."""

from __future__ import annotations

import json
import socket
import ssl
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc

from evenkeel import __version__
from evenkeel.addresses import Endpoint, check_address, endpoints
from evenkeel.credentials import Credentials, read_credentials
from evenkeel.handshakes import shake_hands
from evenkeel.protocol import balancer_pb2 as pb
from trainer_client.cli.common import Finding, Status

_SERVICE = pb.DESCRIPTOR.services_by_name["BalancerService"].full_name
_HEALTH, _SERVING = "/grpc.health.v1.Health/Check", b"\x08\x01"  # two fields need no stubs of their own
_ROUND_TRIPS = 20
_SLOW_SECONDS = 0.05


def check_balancers(
    balancer: str, job: str | None, ca: Path | None, token_file: Path | None, timeout: float
) -> Iterator[Finding]:
    """Each balancer behind an address; with a job, whether the token is for it."""
    try:
        address = check_address(balancer)
        credentials = read_credentials(ca, token_file)
        replicas = endpoints(address)
        for replica in replicas:
            credentials.check(str(replica))
    except ValueError as error:
        yield Finding("settings", Status.FAIL, str(error), "set it as the message says")
        return
    except OSError as error:
        yield Finding("address", Status.FAIL, f"{address} has no address: {error}", "check the name and the DNS")
        return
    for replica in replicas:
        for finding in _check_replica(replica, job, credentials, timeout):
            # Of several balancers each finding tells whose it is.
            yield finding._replace(check=f"{finding.check} {replica}") if len(replicas) > 1 else finding


def _check_replica(replica: Endpoint, job: str | None, credentials: Credentials, timeout: float) -> Iterator[Finding]:
    """Network, TLS, health, token, versions, round trip and job, as far as one depends on the other."""
    for check in (_reach, _handshake):
        finding = check(replica, credentials, timeout)
        yield finding
        if finding.status is Status.FAIL:
            return
    options: list[tuple[str, Any]] = [("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1)]
    if replica.server_name != replica.host:  # one address of a name, which is what its certificate holds
        options += [(f"grpc.{name}", replica.server_name) for name in ("default_authority", "ssl_target_name_override")]
    with credentials.channel(str(replica), options) as channel:
        try:
            healthy = channel.unary_unary(_HEALTH)(b"", timeout=timeout) == _SERVING
        except grpc.RpcError as error:
            yield Finding("health", Status.FAIL, _explain(error), "it is no balancer: check the port")
            return
        if healthy:
            yield Finding("health", Status.OK, "serving")
        else:
            yield Finding("health", Status.WARN, "not serving", "it starts or drains: try again in a while")
        try:
            yield from _check_calls(channel, credentials, credentials.metadata(str(replica)), timeout)
        except grpc.RpcError as error:
            yield _of_failed_call(error)
            return
        if job is not None:
            yield _check_job(channel, job, credentials.metadata(str(replica)), timeout)


def _reach(replica: Endpoint, _credentials: Credentials, timeout: float) -> Finding:
    started = time.perf_counter()
    try:
        with socket.create_connection((replica.host, replica.port), timeout):
            taken = time.perf_counter() - started
    except TimeoutError:
        remedy = "a firewall or network policy drops the packets: open the port"
        return Finding("address", Status.FAIL, f"{replica} does not answer within {timeout:g} s", remedy)
    except OSError as error:
        remedy = "nobody listens there: start the balancer, or correct the port"
        return Finding("address", Status.FAIL, f"{replica}: {error.strerror or error}", remedy)
    return Finding("address", Status.OK, f"{replica}, connected in {taken * 1e3:.1f} ms")


def _handshake(replica: Endpoint, credentials: Credentials, timeout: float) -> Finding:
    try:
        shaken = shake_hands(replica, credentials, timeout)
    except OSError as error:
        return Finding("TLS", Status.FAIL, str(error), "it takes connections, and does not answer them: see its log")
    if shaken.problem:
        return Finding("TLS", Status.FAIL, shaken.problem, shaken.remedy)
    if not shaken.version:
        return Finding("TLS", Status.SKIP, "plaintext", "set EVENKEEL_TLS_CA where others share the network")
    days = (ssl.cert_time_to_seconds(str(shaken.certificate["notAfter"])) - time.time()) / 86_400
    if days < 14:
        return Finding("TLS", Status.WARN, f"{shaken.version}; the certificate expires in {days:.1f} days", "renew it")
    return Finding("TLS", Status.OK, f"{shaken.version}; the certificate holds for {days:.0f} days")


def _check_calls(channel: Any, credentials: Credentials, metadata: Any, timeout: float) -> Iterator[Finding]:
    server_info = channel.unary_unary(
        f"/{_SERVICE}/GetServerInfo", pb.GetServerInfoRequest.SerializeToString, pb.GetServerInfoResponse.FromString
    )
    info, times = server_info(pb.GetServerInfoRequest(), timeout=timeout, metadata=metadata), []
    for _ in range(_ROUND_TRIPS):
        started = time.perf_counter()
        server_info(pb.GetServerInfoRequest(), timeout=timeout, metadata=metadata)
        times.append(time.perf_counter() - started)
    yield Finding("token", Status.OK, "accepted" if credentials.token_file else "none needed")
    yield Finding("versions", Status.OK, f"balancer {info.server_version}, this is {__version__}; both speak v2")
    if info.draining:
        yield Finding("draining", Status.WARN, "the balancer shuts down", "use another, or wait")
    median = statistics.median(times)
    slow = median > _SLOW_SECONDS
    text = f"{median * 1e3:.2f} ms, worst of {_ROUND_TRIPS} {max(times) * 1e3:.2f} ms"
    remedy = "run the balancer nearer to the job, or give it cores" if slow else ""
    yield Finding("round trip", Status.WARN if slow else Status.OK, text, remedy)
    limits = {field.name: getattr(info.limits, field.name) for field in info.limits.DESCRIPTOR.fields}
    yield Finding("limits", Status.OK, json.dumps(limits))


def _check_job(channel: Any, job: str, metadata: Any, timeout: float) -> Finding:
    """Whether the job may be planned: an empty request gets as far as its body if it may."""
    plan = channel.unary_unary(f"/{_SERVICE}/PlanRound")
    try:
        plan(b"", timeout=timeout, metadata=(*metadata, ("evenkeel-job", quote(job))))
    except grpc.RpcError as error:
        if "job is empty" not in _explain(error):
            return Finding("job", Status.FAIL, f"{job}: {_explain(error)}", "use a token whose jobs include it")
    return Finding("job", Status.OK, f"{job} may be planned here")


def _of_failed_call(error: grpc.RpcError) -> Finding:
    code = error.code() if isinstance(error, grpc.Call) else None
    if code == grpc.StatusCode.UNAUTHENTICATED:
        remedy = "set EVENKEEL_TOKEN_FILE to a file with a token of this balancer"
        return Finding("token", Status.FAIL, _explain(error), remedy)
    if code == grpc.StatusCode.UNIMPLEMENTED:
        text = f"the balancer does not speak {_SERVICE}, which evenkeel {__version__} needs"
        return Finding("versions", Status.FAIL, text, "run a balancer of the same version")
    return Finding("call", Status.FAIL, _explain(error), "see its log")


def _explain(error: grpc.RpcError) -> str:
    return f"{error.code().name}: {error.details()}" if isinstance(error, grpc.Call) else str(error)
