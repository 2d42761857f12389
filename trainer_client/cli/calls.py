"""Calls to balancers from the command line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from evenkeel.addresses import Endpoint, check_address, resolve
from evenkeel.credentials import Credentials
from evenkeel.protocol import balancer_pb2 as pb
from evenkeel.protocol import balancer_pb2_grpc as pb_grpc

_OPTIONS = [("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1)]


def read_address(balancer: str | None) -> str:
    """An address as `Balancer.connect` takes it, without `grpc://`.

    Raises:
        ValueError: If it is none.
    """
    if not balancer:
        raise ValueError("no balancer is named; give --balancer host:port, or set EVENKEEL_BALANCER")
    try:
        return check_address(balancer)
    except ValueError as error:
        raise ValueError(f"--balancer: {error}") from None


class Calls:
    """Unary calls to one balancer.

    Attributes:
        address: Where it is.
    """

    def __init__(
        self, address: str, channel: grpc.Channel, metadata: tuple[tuple[str, str], ...], timeout: float
    ) -> None:
        self.address = address
        self._stub: Any = pb_grpc.BalancerServiceStub(channel)  # type: ignore[no-untyped-call]
        # Health has two fields and needs no stubs of its own: an empty request asks for the whole server.
        self._health: Any = channel.unary_unary("/grpc.health.v1.Health/Check", bytes, bytes)
        self._metadata, self._timeout = metadata, timeout

    def healthy(self) -> bool:
        """Whether the balancer reports SERVING."""
        return bool(self._health(b"", timeout=self._timeout) == b"\x08\x01")

    def call(self, method: str, request: Any) -> Any:
        """The response of a method by name."""
        return getattr(self._stub, method)(request, timeout=self._timeout, metadata=self._metadata)


@contextmanager
def connected(endpoint: Endpoint, credentials: Credentials, timeout: float) -> Iterator[Calls]:
    """Calls to one balancer.

    Raises:
        ValueError: If a file of the credentials cannot be used.
    """
    address = str(endpoint)
    metadata = credentials.metadata(address)
    named: list[tuple[str, Any]] = []
    if endpoint.server_name != endpoint.host:  # one of the addresses of a name, which is what its certificate holds
        named = [
            ("grpc.default_authority", endpoint.server_name), ("grpc.ssl_target_name_override", endpoint.server_name)
        ]  # fmt: skip
    with credentials.channel(address, [*_OPTIONS, *named]) as channel:
        yield Calls(address, channel, metadata, timeout)


def home_of(address: str, job: str, credentials: Credentials, timeout: float) -> int:
    """The instance of the balancer to which the ranks of a job come, found as they find it.

    Raises:
        ValueError: If a file of the credentials cannot be used.
        grpc.RpcError: If it does not answer.
    """
    target, spreading, header = resolve(address, job)
    metadata = credentials.metadata(target) + header
    with credentials.channel(target, [*_OPTIONS, *spreading]) as channel:
        return int(Calls(address, channel, metadata, timeout).call("GetServerInfo", pb.GetServerInfoRequest()).instance)


def explain(error: grpc.RpcError) -> str:
    """The status of a failed call in one line."""
    return f"{error.code().name}: {error.details()}" if isinstance(error, grpc.Call) else str(error)
