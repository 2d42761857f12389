"""Addresses of balancers: one, or several of which gRPC's own consistent hashing on the job's name chooses one."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import socket
from dataclasses import dataclass

PREFIX = "spread://"
HEADER = "evenkeel-job"

_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*|\[.*:.*\]")
_HASH_A_HEADER = "GRPC_EXPERIMENTAL_RING_HASH_SET_REQUEST_HASH_KEY"  # gRPC does so only where this variable says it

_SERVICE_CONFIG = json.dumps(
    {
        "loadBalancingConfig": [
            {"ring_hash_experimental": {"minRingSize": 1024, "maxRingSize": 4096, "requestHashHeader": HEADER}}
        ]
    }
)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One balancer behind an address.

    Attributes:
        host: Name or IP to connect to.
        port: Its port.
        server_name: The name that its certificate must hold; differs from `host` behind a name with several addresses.
    """

    host: str
    port: int
    server_name: str

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def check_address(address: str) -> str:
    """The address without `grpc://`.

    Args:
        address: `host:port`; or `spread://name:port`, all of whose addresses are balancers; or
            `spread://IP:port,IP:port,…`.

    Raises:
        ValueError: If it is none of them.
    """
    bare = address.removeprefix("grpc://")
    if "://" in bare.removeprefix(PREFIX):
        raise ValueError(f"address is {address!r}; the balancer speaks gRPC: give host:port, or grpc://host:port")
    names = _names(bare)
    for each in names:
        host, _, port = each.rpartition(":")
        if ":" in host and not (host.startswith("[") and host.endswith("]") and _is_ip(host)):
            raise ValueError(
                f"address is {address!r}; give host:port, and an IPv6 address in brackets, as '[::1]:50051'"
            )
        if not (_HOST.fullmatch(host) and port.isascii() and port.isdecimal() and 0 < int(port) < 65536):
            raise ValueError(f"address is {address!r}; give host:port, for example 'balancer:50051'")
        if len(names) > 1 and not _is_ip(host):
            raise ValueError(
                f"address is {address!r}; of several balancers give the IPs, for example "
                "'spread://10.0.0.1:50051,10.0.0.2:50051', or one name that has all their addresses"
            )
    return bare


def resolve(address: str, job: str) -> tuple[str, list[tuple[str, str]], tuple[tuple[str, str], ...]]:
    """What to hand to gRPC for an address that `check_address` has passed.

    Args:
        address: Of the balancer or balancers.
        job: The training job.

    Returns:
        The target, options of the channel and metadata of its calls.
    """
    if not address.startswith(PREFIX):
        return address, [], ()
    os.environ.setdefault(_HASH_A_HEADER, "true")  # read at each start of a channel; see gRPC's proposal A76
    names = address.removeprefix(PREFIX)
    target = f"dns:///{names}"
    if "," in names:
        version = ipaddress.ip_address(names.partition(",")[0].rpartition(":")[0].strip("[]")).version
        target = f"ipv{version}:{names}"
    return target, [("grpc.service_config", _SERVICE_CONFIG)], ((HEADER, job),)


def endpoints(address: str) -> list[Endpoint]:
    """Every balancer behind an address that `check_address` has passed; a single one is not looked up.

    Raises:
        OSError: If a name has no address.
    """
    found: dict[Endpoint, None] = {}
    for each in _names(address):
        host, _, port = each.rpartition(":")
        host = host.strip("[]")
        if not address.startswith(PREFIX) or _is_ip(host):
            found[Endpoint(host, int(port), host)] = None
            continue
        for *_, place in socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM):
            found[Endpoint(str(place[0]), int(port), host)] = None
    return list(found)


def _names(address: str) -> list[str]:
    return address.removeprefix(PREFIX).split(",") if address.startswith(PREFIX) else [address]


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True
