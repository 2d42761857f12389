"""Addresses of balancers: one name or IP, with as many replicas behind it as it has addresses; or a list of IPs."""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass

_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*|\[.*:.*\]")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One replica behind an address.

    Attributes:
        host: IP to connect to; a name that has no address.
        port: Its port.
        server_name: The name that its certificate must hold.
    """

    host: str
    port: int
    server_name: str

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def check_address(address: str) -> str:
    """The address without `grpc://`.

    Args:
        address: `host:port`, or `IP:port,IP:port,…` of several replicas that have no common name.

    Raises:
        ValueError: If it is none of them.
    """
    if not isinstance(address, str):
        raise ValueError(f"address is {address!r}; give a text host:port, for example 'balancer:50051'")
    bare = address.removeprefix("grpc://")
    if "://" in bare:
        raise ValueError(f"address is {address!r}; the balancer speaks gRPC: give host:port, or grpc://host:port")
    versions = set[int]()
    for each in bare.split(","):
        host, _, port = each.rpartition(":")
        ip = _ip(host)
        if ":" in host and not (host.startswith("[") and host.endswith("]") and ip):
            raise ValueError(
                f"address is {address!r}; give host:port, and an IPv6 address in brackets, as '[::1]:50051'"
            )
        if not (_HOST.fullmatch(host) and port.isascii() and port.isdecimal() and 0 < int(port) < 65536):
            raise ValueError(f"address is {address!r}; give host:port, for example 'balancer:50051'")
        versions.add(ip.version if ip else 0)
    if "," in bare and (0 in versions or len(versions) > 1):
        raise ValueError(
            f"address is {address!r}; of several replicas give IPs of one kind, for example "
            "'10.0.0.1:50051,10.0.0.2:50051', or one name that has all their addresses"
        )
    return bare


def grpc_target(address: str) -> str:
    """What to hand to gRPC for an address that `check_address` has passed; it knows all replicas then."""
    ip = _ip(address.partition(",")[0].rpartition(":")[0])
    return f"ipv{ip.version}:{address}" if ip else f"dns:///{address}"


def endpoints(address: str) -> list[Endpoint]:
    """Every replica behind an address that `check_address` has passed.

    Raises:
        OSError: If a name has no address.
    """
    result: dict[Endpoint, None] = {}
    for each in address.split(","):
        host, _, port = each.rpartition(":")
        host = host.strip("[]")
        for *_, place in socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM):
            result[Endpoint(str(place[0]), int(port), host)] = None
    return list(result)


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None
