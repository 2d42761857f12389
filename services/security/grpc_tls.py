"""TLS of a gRPC server, with certificates that may be renewed while it runs."""

from __future__ import annotations

import time
from collections.abc import Callable

import grpc

from services.security.transport import Renewals, Transport


def server_credentials(
    transport: Transport, *, check_seconds: float = 1.0, clock: Callable[[], float] = time.monotonic
) -> grpc.ServerCredentials:
    """Credentials that follow the files: a renewed certificate holds for the connections from then on.

    Files that have become unusable are reported, and what was read before stays in force.

    Raises:
        ValueError: If a file cannot be used; the message names it.
    """
    required = transport.client_ca is not None
    checked_at, renewals = clock(), Renewals(transport)
    initial = _configuration(transport)

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal checked_at
        if clock() - checked_at < check_seconds:
            return None  # as before
        checked_at = clock()
        return renewals.load(lambda: _configuration(transport))

    return grpc.dynamic_ssl_server_credentials(initial, fetch, require_client_authentication=required)


def _configuration(transport: Transport) -> grpc.ServerCertificateConfiguration:
    chain, key, authorities = transport.read()
    return grpc.ssl_server_certificate_configuration([(key, chain)], root_certificates=authorities)
