"""TLS of a gRPC server, with certificates that may be renewed while it runs."""

from __future__ import annotations

import grpc

from services.security.transport import Transport

_CHECK_SECONDS = 1.0


def server_credentials(transport: Transport) -> grpc.ServerCredentials:
    """Credentials that follow the files: a renewed certificate holds for the connections from then on.

    Raises:
        ValueError: If a file cannot be used; the message names it.
    """
    followed = transport.follow(check_seconds=_CHECK_SECONDS)
    return grpc.dynamic_ssl_server_credentials(
        _configuration(transport),
        lambda: followed.load(lambda: _configuration(transport)),
        require_client_authentication=transport.client_ca is not None,
    )


def _configuration(transport: Transport) -> grpc.ServerCertificateConfiguration:
    chain, key, authorities = transport.read()
    return grpc.ssl_server_certificate_configuration([(key, chain)], root_certificates=authorities)
