"""How much a caller may do per second, by token buckets to which the clock is an argument, and who counts as one."""

from __future__ import annotations

import ipaddress
from collections import OrderedDict
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import unquote

_IPV6_PREFIX = 64  # what a provider or a data centre gives to one host or customer, at least


@dataclass(slots=True)
class Bucket:
    """Holds up to `burst` permits and gains `rate` of them a second.

    Attributes:
        rate: Permits a second.
        burst: Permits at most.
        level: Permits now.
        at: When that was true.
    """

    rate: float
    burst: float
    level: float
    at: float

    @classmethod
    def full(cls, *, rate: float, burst: float, now: float) -> Bucket:
        """A bucket that nothing has been taken from."""
        return cls(rate, burst, burst, now)

    def try_take(self, now: float) -> bool:
        """Takes a permit if there is one."""
        self.level = min(self.burst, self.level + max(0.0, now - self.at) * self.rate)
        self.at = max(self.at, now)
        if self.level < 1.0:
            return False
        self.level -= 1.0
        return True


class Buckets:
    """One bucket per caller, for a bounded number of callers: the one unheard of for longest is forgotten."""

    def __init__(self, *, rate: float, burst: float, most: int = 4096) -> None:
        self._rate, self._burst, self._most = rate, burst, most
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()

    def try_take(self, caller: str, now: float) -> bool:
        """Whether the caller may go on; takes a permit if so."""
        bucket = self._buckets.get(caller)
        if bucket is None:
            while len(self._buckets) >= self._most:
                self._buckets.popitem(last=False)
            bucket = self._buckets[caller] = Bucket.full(rate=self._rate, burst=self._burst, now=now)
        self._buckets.move_to_end(caller)
        return bucket.try_take(now)

    def __len__(self) -> int:
        return len(self._buckets)


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
