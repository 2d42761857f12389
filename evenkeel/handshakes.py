"""TLS as a client meets it, tried by hand: gRPC says no more than that the connection was closed."""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass, field
from typing import Any

from evenkeel.addresses import Endpoint
from evenkeel.credentials import Credentials

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"  # of HTTP/2, with empty settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Handshake:
    """How a handshake with a server ended.

    Attributes:
        problem: What is wrong; empty: nothing.
        remedy: What to do about it.
        version: The version of TLS; empty in plaintext.
        certificate: The server's, as `ssl.SSLSocket.getpeercert` gives it.
    """

    problem: str = ""
    remedy: str = ""
    version: str = ""
    certificate: dict[str, Any] = field(default_factory=dict)


_REMEDIES = {  # by OpenSSL's codes
    9: "it holds from later on: set the clocks of both machines",
    10: "renew the certificate of the balancer; if it is new, set this machine's clock",
}


def shake_hands(place: Endpoint, credentials: Credentials, timeout: float) -> Handshake:
    """Connects as a client with these credentials would, and says what a wrong setting comes to.

    Raises:
        OSError: If nobody can be reached there.
    """
    if not credentials.secure:
        if _speaks_tls(place, timeout):
            return Handshake(
                problem="the balancer speaks TLS, and this client plaintext",
                remedy="set EVENKEEL_TLS_CA to the file of its authority, or EVENKEEL_TLS=1 for those of the system",
            )
        return Handshake()
    try:
        context = credentials.ssl_context() or ssl.create_default_context()
    except ValueError as error:
        return Handshake(problem=str(error), remedy="check the files of EVENKEEL_TLS_…")
    context.set_alpn_protocols(["h2"])
    with socket.create_connection((place.host, place.port), timeout) as raw:
        try:
            with context.wrap_socket(raw, server_hostname=place.server_name) as secure:
                version, certificate = str(secure.version()), dict(secure.getpeercert() or {})
                # Under TLS 1.3 the server looks at the client's certificate when the handshake is over for the client.
                secure.sendall(_PREFACE)
                answered = secure.recv(1) != b""
        except ssl.SSLCertVerificationError as error:
            return Handshake(
                problem=f"the certificate does not hold: {error.verify_message}",
                remedy=_REMEDIES.get(
                    error.verify_code, "EVENKEEL_TLS_CA must name its authority, and the address a name in it"
                ),
            )
        except (ssl.SSLError, ConnectionError) as error:
            if "CERTIFICATE_REQUIRED" in str(error) or "UNKNOWN_CA" in str(error):
                return _wants_certificate(credentials, str(error))
            if _speaks_tls(place, timeout):
                return _wants_certificate(credentials, str(error))
            return Handshake(
                problem=f"no TLS there: {error}",
                remedy="the balancer serves plaintext: unset EVENKEEL_TLS_…, or give it a certificate",
            )
    if not answered and _speaks_tls(place, timeout):  # a second time: it is not just ending
        return _wants_certificate(credentials, "the connection was closed")
    return Handshake(version=version, certificate=certificate)


def _wants_certificate(credentials: Credentials, error: str) -> Handshake:
    if credentials.certificate is None:
        return Handshake(
            problem=f"the balancer wants a client certificate ({error})",
            remedy="set EVENKEEL_TLS_CERTIFICATE and EVENKEEL_TLS_KEY",
        )
    return Handshake(
        problem=f"the balancer refuses this client's certificate ({error})",
        remedy="EVENKEEL_TLS_CERTIFICATE must be of an authority that the balancer knows (its tls_client_ca)",
    )


def _speaks_tls(place: Endpoint, timeout: float) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with socket.create_connection((place.host, place.port), timeout) as raw:
        try:
            with context.wrap_socket(raw, server_hostname=place.server_name):
                return True
        except (ssl.SSLError, ConnectionError):
            return False
