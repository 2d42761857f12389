"""Whom an address stands for: one host has one IPv4 address, and a whole network of IPv6 addresses."""

from __future__ import annotations

import ipaddress
from functools import lru_cache
from urllib.parse import unquote

_IPV6_PREFIX = 64  # what a provider or a data centre gives to one host or customer, at least


@lru_cache(maxsize=4096)
def network_of(peer: str) -> str:
    """The network that a caller's address counts as: an IPv4 address, or the /64 of an IPv6 address.

    Args:
        peer: As gRPC writes it (`ipv4:192.0.2.1:5000`, `ipv6:%5B2001:db8::1%5D:5000`), or an address alone.
    """
    text = unquote(peer)
    scheme, separator, rest = text.partition(":")
    if separator and scheme in ("ipv4", "ipv6"):
        text = rest.rpartition(":")[0]
    try:
        address = ipaddress.ip_address(text.strip("[]").partition("%")[0])
    except ValueError:
        return peer if scheme not in ("unix", "unix-abstract") else scheme
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, _IPV6_PREFIX), strict=False))
